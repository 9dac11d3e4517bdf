//! Leases that are held, waited for, stolen and swept.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::{
    Lease, LeaseStore, Leases, Released,
    store::{Acquired, AcquiredAll, Answer, Claim, Renewal, Token},
    testing::{Oracle, drop_at_every_await},
};
use lockkit_etcd::{
    EtcdStore, Options, SetupError,
    etcd_client::{ConnectOptions, Permission},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::server::{PATIENCE, SESSION, client_at, keys, shared, store, until};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

async fn leases() -> Leases<EtcdStore> {
    Leases::builder(store().await).ttl(SECONDS(2)).wait(PATIENCE).build().unwrap()
}

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
    let options = Options::new().session_ttl(SESSION).prefix("swept/");
    let store = EtcdStore::connect([shared()], options).await.unwrap();
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
async fn a_future_dropped_anywhere_leaves_no_claim() {
    let leases = leases().await;
    let mut client = client_at(shared()).await;
    let work = || async {
        let lease = leases.lease("dropped").acquire().await.unwrap();
        lease.extend(SECONDS(3)).await.unwrap();
        lease.release().await.unwrap();
    };
    let drops = drop_at_every_await(work)
        .then(async |_| {
            until("no claim is left", async || keys(&mut client, "lockkit/lock/dropped/").await == 0).await;
        })
        .await;
    println!("{drops:?}");
    assert!(drops.completed && drops.points > 5, "{drops:?}");
}

#[tokio::test]
async fn a_call_of_the_store_dropped_anywhere_takes_nothing_for_longer_than_its_ttl() {
    let store = store().await;
    let acquire = || async {
        let mut claim = Claim::new("raw", Token::random(), "test", Duration::from_millis(200));
        claim.queue = true;
        store.lease_acquire(&claim).await.unwrap();
        store.lease_release(&claim.key, claim.token, Duration::from_millis(300)).await.unwrap();
    };
    let mut client = client_at(shared()).await;
    let drops = drop_at_every_await(acquire)
        .then(async |_| {
            until("no claim is left", async || keys(&mut client, "lockkit/lock/raw/").await == 0).await;
        })
        .await;
    println!("{drops:?}");
    assert!(drops.points > 5, "{drops:?}");
}

#[test]
fn a_store_survives_the_runtime_on_which_it_was_made() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let (leases, lease) = first.block_on(async {
        let leases = leases().await;
        let lease = leases.lease("runtime").acquire().await.unwrap();
        (leases, lease)
    });
    let second = runtime();
    // The second runtime is known before the first one ends.
    let _other = second.block_on(async {
        assert!(leases.lease("runtime").try_acquire().await.unwrap().is_none());
        leases.lease("runtime/other").acquire().await.unwrap()
    });
    drop(first);
    second.block_on(async {
        let lost = timeout(SECONDS(3), lease.lost()).await;
        assert!(lost.is_err(), "it is renewed on the other runtime: {lost:?}");
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        leases.lease("runtime").acquire().await.unwrap().release().await.unwrap();
    });
}

#[tokio::test]
async fn wrong_settings_are_named() {
    let connect = async |options: Options| EtcdStore::connect([shared()], options).await.map(drop);
    let short = connect(Options::new().session_ttl(SECONDS(1))).await.unwrap_err();
    assert!(matches!(short, SetupError::SessionTtl { .. }), "{short}");
    let own = connect(Options::new().prefix("lockkit/last/x")).await.unwrap_err();
    assert!(matches!(own, SetupError::Prefix { .. }), "{own}");
    let none = EtcdStore::connect::<&str>([], Options::new()).await.unwrap_err();
    assert!(matches!(none, SetupError::NoEndpoints), "{none}");
    let port = lockkit_store_servers::free_port();
    let nobody = EtcdStore::connect([format!("http://127.0.0.1:{port}")], Options::new()).await.unwrap_err();
    assert!(matches!(nobody, SetupError::Unreachable { .. }), "{nobody}");
    let reserved = EtcdStore::connect([shared()], Options::new().prefix("")).await.unwrap();
    let refused = Leases::new(reserved).lease("lockkit").try_acquire().await.unwrap_err();
    assert!(!refused.is_contended(), "{refused}");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_works_with_a_user_and_says_when_the_password_is_wrong() {
    let server = Etcd::alone();
    let mut admin = client_at(&server.endpoints()[0]).await;
    admin.user_add("root", "root", None).await.unwrap();
    admin.user_grant_role("root", "root").await.unwrap();
    admin.user_add("locker", "secret", None).await.unwrap();
    admin.role_add("locks").await.unwrap();
    let below = |prefix: &str| Permission::read_write(prefix).with_prefix();
    admin.role_grant_permission("locks", below("lockkit/")).await.unwrap();
    admin.user_grant_role("locker", "locks").await.unwrap();
    admin.auth_enable().await.unwrap();

    let connect = async |password| {
        let client = ConnectOptions::new().with_user("locker", password);
        EtcdStore::connect(server.endpoints(), Options::new().client(client)).await
    };
    let refused = connect("wrong").await.unwrap_err();
    assert!(matches!(refused, SetupError::Unreachable { .. }), "{refused}");
    let leases = Leases::builder(connect("secret").await.unwrap()).ttl(SECONDS(1)).build().unwrap();
    let lease = leases.lease("k").min_hold(Duration::from_millis(1)).acquire().await.unwrap();
    until("renewed", async || leases.show("k").await.unwrap().expect("it is held").renewals >= 2).await;
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    assert_eq!(leases.list("").await.unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_that_are_dropped_at_any_time_neither_share_nor_leave_a_lease() {
    let oracle = Oracle::new();
    let mut working = JoinSet::new();
    for process in 0..6 {
        let leases = Leases::builder(oracle.watch(store().await)).ttl(SECONDS(2)).build().unwrap();
        for task in 0..2 {
            let leases = leases.clone();
            working.spawn(async move {
                let (begun, mut granted, mut dropped) = (Instant::now(), 0, 0);
                let mut turn = process * 7 + task * 3;
                while begun.elapsed() < SECONDS(3) {
                    turn += 1;
                    let patience = Duration::from_millis(turn * 37 % 200);
                    let key = if turn % 3 == 0 { "dropping/a" } else { "dropping/b" };
                    match timeout(patience, leases.lease(key).acquire()).await {
                        Ok(lease) => {
                            granted += 1;
                            sleep(Duration::from_millis(turn % 5)).await;
                            let lease = lease.unwrap();
                            if turn % 2 == 0 {
                                lease.release().await.unwrap();
                            }
                        }
                        Err(_) => dropped += 1,
                    }
                }
                (granted, dropped)
            });
        }
    }
    let (mut granted, mut dropped) = (0, 0);
    for (more_granted, more_dropped) in working.join_all().await {
        granted += more_granted;
        dropped += more_dropped;
    }
    oracle.assert_exclusive();
    println!("{granted} grants, {dropped} dropped waits");
    assert!(granted > 20 && dropped > 20, "{granted} {dropped}");
    let mut client = client_at(shared()).await;
    until("no claim is left", async || keys(&mut client, "lockkit/lock/dropping").await == 0).await;
}
