//! Leases that are held, waited for, stolen and swept.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::{
    Lease, LeaseStore, Released,
    store::{Acquired, AcquiredAll, Answer, Claim, Renewal, Token},
};
use lockkit_etcd::EtcdStore;
use tokio::time::timeout;

use crate::server::{PATIENCE, SESSION, client_at, keys, leases, shared, store, until};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

#[tokio::test]
async fn fences_rise_with_room_between_them() {
    let (here, there) = (leases().await, leases().await);
    let mut last = 0;
    for round in 0..6 {
        let leases = if round % 2 == 0 { &here } else { &there };
        let lease = leases.lease("fences").acquire().await.unwrap();
        assert!(lease.fence().get() > last + 255, "{} after {last}", lease.fence());
        last = lease.fence().get();
        lease.release().await.unwrap();
    }
    let claim = Claim::new("fences", Token::random(), "test", SECONDS(2));
    let Acquired::Granted(grant) = here.store().lease_acquire(&claim).await.unwrap() else { panic!("it is free") };
    assert_eq!(grant.spare_fences, 255);
    here.store().lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn waiting_processes_are_served_in_order_and_nobody_passes_them() {
    let holder = leases().await;
    let lease = holder.lease("order").acquire().await.unwrap();
    let (served, mut waiting) = (Arc::new(Mutex::new(Vec::new())), Vec::new());
    let mut client = client_at(shared()).await;
    for number in 0..6 {
        let (leases, served) = (leases().await, served.clone());
        waiting.push(tokio::spawn(async move {
            let lease = leases.lease("order").acquire().await.unwrap();
            served.lock().unwrap().push(number);
            lease.release().await.unwrap();
        }));
        until("it waits", async || keys(&mut client, "lockkit/lock/order/").await == i64::from(number) + 2).await;
    }
    lease.release().await.unwrap();
    // The holder tries again at once, and is refused as long as others wait.
    let mut refused = 0;
    while holder.lease("order").try_acquire().await.unwrap().is_none() {
        refused += 1;
    }
    assert!(refused > 0);
    for it in waiting {
        timeout(PATIENCE, it).await.expect("served").unwrap();
    }
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
}

#[tokio::test]
async fn a_place_in_the_queue_is_given_up_with_the_wait() {
    let (holder, other) = (leases().await, leases().await);
    let lease = holder.lease("given-up").acquire().await.unwrap();
    let refused = other.lease("given-up").wait(Duration::from_millis(300)).acquire().await.unwrap_err();
    assert!(refused.is_contended());
    drop(timeout(Duration::from_millis(300), other.lease("given-up").acquire()).await);
    let mut client = client_at(shared()).await;
    until("one claim is left", async || keys(&mut client, "lockkit/lock/given-up/").await == 1).await;
    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
}

#[tokio::test]
async fn a_minimum_hold_outlives_its_process_and_keeps_its_place() {
    let (holder, other) = (leases().await, leases().await);
    let lease = holder.lease("least").min_hold(SECONDS(4)).acquire().await.unwrap();
    let fence = lease.fence();
    let waiting = tokio::spawn(async move { other.lease("least").acquire().await.unwrap() });
    lease.release().await.unwrap();
    // The store is dropped, and its session revoked.
    drop(holder);
    let shown = store().await.lease_look(&"least".into()).await.unwrap().expect("it stays taken");
    assert!(shown.token.is_nobody());
    assert!(!waiting.is_finished());
    let lease = timeout(PATIENCE, waiting).await.expect("let in").unwrap();
    assert!(lease.fence() > fence);
    assert!(lease.previous().is_none(), "it was released");
}

#[tokio::test]
async fn a_theft_is_learned_with_the_next_renewal_and_a_dead_process_is_heard_of() {
    let (holder, other) = (leases().await, leases().await);
    let lease = holder.lease("stolen").acquire().await.unwrap();
    assert!(other.steal("stolen").await.unwrap().is_some());
    timeout(PATIENCE, lease.lost()).await.expect("it learns of the theft");
    let next = other.lease("stolen").acquire().await.unwrap();
    assert!(next.previous().is_none());
    next.release().await.unwrap();

    let claim = Claim::new("dead", Token::random(), "the dead", SECONDS(1));
    let dead = store().await;
    let Acquired::Granted(grant) = dead.lease_acquire(&claim).await.unwrap() else { panic!("it is free") };
    let lease = other.lease("dead").acquire().await.unwrap();
    let previous = lease.previous().expect("it expired");
    assert_eq!((previous.holder.as_str(), previous.fence), ("the dead", grant.fence));
}

#[tokio::test]
async fn the_record_of_a_dead_holder_is_swept_and_a_held_lease_is_not() {
    let builder = EtcdStore::builder([shared()]).session_ttl(SESSION).prefix("swept/");
    let store = builder.connect().await.unwrap();
    let dead = Claim::new("dead", Token::random(), "test", Duration::from_millis(100));
    let held = Claim::new("held", Token::random(), "test", SECONDS(60));
    for claim in [&dead, &held] {
        assert!(matches!(store.lease_acquire(claim).await.unwrap(), Acquired::Granted(_)));
    }
    until("it expires", async || store.lease_look(&dead.key).await.unwrap().is_none()).await;
    let mut swept = 0;
    until("swept", async || {
        swept += store.lease_sweep(Duration::from_millis(10), 10).await.unwrap();
        swept > 0
    })
    .await;
    assert_eq!(swept, 1);
    assert!(store.lease_look(&held.key).await.unwrap().is_some());
    let mut client = client_at(shared()).await;
    let last = |name: &str| format!("lockkit/last/swept/{name}");
    assert_eq!(client.get(last("dead"), None).await.unwrap().kvs().len(), 0);
    assert_eq!(client.get(last("held"), None).await.unwrap().kvs().len(), 1);
}

#[tokio::test]
async fn names_with_a_slash_are_leases_of_their_own() {
    let leases = leases().await;
    let held: Vec<Lease<_>> = {
        let mut held = Vec::new();
        for name in ["slash", "slash/b", "slash%2fb", "slash/b/c"] {
            held.push(leases.lease(name).try_acquire().await.unwrap().expect("free"));
        }
        held
    };
    let listed: Vec<_> = leases.list("slash/").await.unwrap().into_iter().map(|it| it.key.to_string()).collect();
    assert_eq!(listed, ["slash/b", "slash/b/c"]);
    drop(held);
}

#[tokio::test]
async fn more_leases_than_a_transaction_has_operations_are_taken_renewed_and_released() {
    let store = store().await;
    let claims: Vec<_> =
        (0..300).map(|it| Claim::new(format!("many/{it:03}"), Token::random(), "test", SECONDS(20))).collect();
    let AcquiredAll::Granted(grants) = store.lease_acquire_all(&claims).await.unwrap() else { panic!("all are free") };
    assert_eq!(grants.len(), 300);
    let renewals: Vec<_> = claims.iter().map(|it| Renewal::new(&it.key, it.token, it.ttl)).collect();
    assert!(store.lease_renew(&renewals).await.unwrap().iter().all(|it| *it == Answer::Done));
    assert_eq!(store.lease_list("many/", 1000).await.unwrap().len(), 300);

    // The last key of another set is held, so nothing of the set is taken.
    let more: Vec<_> = (200..300).chain([299]).map(|it| format!("more/{it}")).collect();
    let mut more: Vec<_> = more.iter().map(|it| Claim::new(it, Token::random(), "test", SECONDS(20))).collect();
    more.truncate(100);
    more.push(Claim::new("many/299", Token::random(), "test", SECONDS(20)));
    let held = store.lease_acquire_all(&more).await.unwrap();
    assert!(matches!(&held, AcquiredAll::Held { key, .. } if key == "many/299"), "{held:?}");
    assert_eq!(store.lease_list("more/", 1000).await.unwrap().len(), 0);

    let releases: Vec<_> =
        claims.iter().map(|it| lockkit::store::Release::new(&it.key, it.token, Duration::ZERO)).collect();
    assert!(store.lease_release_all(&releases).await.unwrap().iter().all(|it| *it == Answer::Done));
    assert_eq!(store.lease_list("many/", 1000).await.unwrap().len(), 0);
}

#[tokio::test]
async fn semaphores_readers_and_writers_work() {
    let (here, there) = (leases().await, leases().await);
    let first = here.semaphore("pool", 2).acquire().await.unwrap();
    let second = there.semaphore("pool", 2).acquire().await.unwrap();
    assert!(here.semaphore("pool", 2).try_acquire().await.unwrap().is_none());
    first.release().await.unwrap();
    here.semaphore("pool", 2).acquire().await.unwrap().release().await.unwrap();
    second.release().await.unwrap();

    let (one, other) = (here.rw("rw").read().acquire().await.unwrap(), there.rw("rw").read().acquire().await.unwrap());
    let writing = tokio::spawn({
        let here = here.clone();
        async move { here.rw("rw").write().acquire().await.unwrap().release().await.unwrap() }
    });
    one.release().await.unwrap();
    other.release().await.unwrap();
    timeout(PATIENCE, writing).await.expect("the writer is let in").unwrap();
}

#[tokio::test]
async fn a_waiter_is_let_in_though_the_history_it_watches_is_compacted() {
    let (holder, waiter) = (leases().await, leases().await);
    let lease = holder.lease("compacted").acquire().await.unwrap();
    let waiting = tokio::spawn(async move { waiter.lease("compacted").acquire().await.unwrap() });
    let mut client = client_at(shared()).await;
    until("it waits", async || keys(&mut client, "lockkit/lock/compacted/").await == 2).await;
    let put = client.put("elsewhere", "", None).await.unwrap();
    let revision = put.header().expect("a header").revision();
    client.compact(revision, None).await.unwrap();
    lease.release().await.unwrap();
    timeout(PATIENCE, waiting).await.expect("let in").unwrap().release().await.unwrap();
}

#[tokio::test]
async fn claims_to_one_lease_that_end_together_are_all_removed() {
    let (store, thief) = (store().await, store().await);
    let [first, second] = [(); 2].map(|()| Claim::new("together", Token::random(), "test", Duration::from_millis(300)));
    assert!(matches!(store.lease_acquire(&first).await.unwrap(), Acquired::Granted(_)));
    assert_eq!(thief.lease_release(&first.key, first.token, Duration::ZERO).await.unwrap(), Answer::Done);
    assert!(matches!(store.lease_acquire(&second).await.unwrap(), Acquired::Granted(_)));
    // Nothing runs in this runtime until both have expired.
    std::thread::sleep(Duration::from_millis(600));
    let mut client = client_at(shared()).await;
    until("both are removed", async || keys(&mut client, "lockkit/lock/together/").await == 0).await;
    let next = Claim::new("together", Token::random(), "test", SECONDS(2));
    let Acquired::Granted(grant) = thief.lease_acquire(&next).await.unwrap() else { panic!("it is free") };
    assert!(grant.previous.is_some());
    thief.lease_release(&next.key, next.token, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_lease_that_was_waited_for_lives_no_longer_than_its_ttl() {
    let (store, other) = (store().await, store().await);
    let held = Claim::new("short", Token::random(), "test", SECONDS(20));
    assert!(matches!(other.lease_acquire(&held).await.unwrap(), Acquired::Granted(_)));
    let ttl = Duration::from_millis(700);
    let mut waits = Claim::new("short", Token::random(), "test", ttl);
    waits.queue = true;
    assert!(matches!(store.lease_acquire(&waits).await.unwrap(), Acquired::Held { .. }));
    other.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    assert!(matches!(store.lease_acquire(&waits).await.unwrap(), Acquired::Granted(_)));
    let shown = store.lease_look(&waits.key).await.unwrap().expect("it is held");
    assert!(shown.info.expires_in <= ttl, "{shown:?}");
    until("it expires", async || other.lease_look(&waits.key).await.unwrap().is_none()).await;
}
