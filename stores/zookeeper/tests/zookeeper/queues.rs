//! Waiting: the order, tries beside waiters, and places that are given up.

use std::time::Duration;

use lockkit::{
    LeaseStore, Leases,
    store::{Acquired, Answer, Claim, Token},
};
use tokio::{sync::mpsc, time::Instant};

use crate::support::{SESSION, children, client, own_root, store, wait_for_children, within};

const WAIT: Duration = Duration::from_secs(50);

#[tokio::test]
async fn requests_of_several_sessions_are_served_in_the_order_of_their_arrival() {
    let (root, client) = (own_root(), client().await);
    let first = Leases::new(store(&root).await);
    let path = first.store().path("k");
    let lease = first.lease("k").acquire().await.expect("it is free");
    let (served, mut order) = mpsc::unbounded_channel();
    for number in 0..4 {
        let (leases, served) = (Leases::new(store(&root).await), served.clone());
        tokio::spawn(async move {
            let lease = leases.lease("k").wait(WAIT).acquire().await.expect("its turn");
            served.send((number, lease.fence())).expect("the test listens");
            lease.release().await.expect("a release");
        });
        wait_for_children(&client, &path, number + 2).await;
    }
    let mut last = lease.fence();
    lease.release().await.expect("a release");
    for number in 0..4 {
        let (served, fence) = within(order.recv()).await.expect("somebody is served");
        assert_eq!(served, number);
        assert!(fence > last);
        last = fence;
    }
    wait_for_children(&client, &path, 0).await;
}

#[tokio::test]
async fn an_attempt_without_a_wait_is_refused_while_others_wait_and_leaves_nothing_behind() {
    let (root, client) = (own_root(), client().await);
    let [holder, waiter, other] = [store(&root).await, store(&root).await, store(&root).await]
        .map(|it| Leases::builder(it).build().expect("valid settings"));
    let path = holder.store().path("k");
    let lease = holder.lease("k").acquire().await.expect("it is free");
    let claim = {
        let mut claim = Claim::new("k", Token::random(), "waiter", SESSION * 10);
        claim.queue = true;
        claim
    };
    for _ in 0..3 {
        let refused = waiter.store().lease_acquire(&claim).await.expect("an answer");
        assert!(matches!(refused, Acquired::Held { .. }), "{refused:?}");
        wait_for_children(&client, &path, 2).await;
    }
    lease.release().await.expect("a release");
    // The place is the first now, and its owner has not tried again.
    for leases in [&holder, &other] {
        assert!(leases.lease("k").try_acquire().await.expect("an answer").is_none());
    }
    wait_for_children(&client, &path, 1).await;
    assert!(waiter.show("k").await.expect("an answer").is_none(), "it is free for the owner of the place");
    let granted = waiter.store().lease_acquire(&claim).await.expect("an answer");
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
    let released = waiter.store().lease_release(&claim.key, claim.token, Duration::ZERO).await;
    assert_eq!(released.expect("an answer"), Answer::Done);
    wait_for_children(&client, &path, 0).await;
}

#[tokio::test]
async fn a_place_is_given_up_by_a_release_by_a_drop_and_when_nobody_comes_for_it() {
    let (root, client) = (own_root(), client().await);
    let (here, there) = (Leases::new(store(&root).await), Leases::new(store(&root).await));
    let path = here.store().path("k");
    let lease = here.lease("k").acquire().await.expect("it is free");

    let waiting = tokio::spawn({
        let request = there.lease("k").wait(WAIT);
        async move { request.acquire().await.map(drop) }
    });
    wait_for_children(&client, &path, 2).await;
    waiting.abort();
    wait_for_children(&client, &path, 1).await;

    let short = there.lease("k").wait(Duration::from_millis(100)).acquire().await;
    assert!(short.expect_err("it is held").is_contended());
    wait_for_children(&client, &path, 1).await;

    let mut claim = Claim::new("k", Token::random(), "forgotten", Duration::from_millis(1200));
    claim.queue = true;
    let place = there.store().lease_acquire(&claim).await.expect("an answer");
    assert!(matches!(place, Acquired::Held { .. }));
    let gone = there.store().lease_release(&claim.key, claim.token, Duration::ZERO).await.expect("an answer");
    assert_eq!(gone, Answer::Gone, "it never held the lease");
    wait_for_children(&client, &path, 1).await;

    // No call claims or releases it again: as if the release never arrived.
    there.store().lease_acquire(&claim).await.expect("an answer");
    wait_for_children(&client, &path, 2).await;
    lease.release().await.expect("a release");
    let next = here.lease("k").wait(WAIT).acquire().await.expect("the place ends with the ttl of its claim");
    next.release().await.expect("a release");
    wait_for_children(&client, &path, 0).await;
}

#[tokio::test]
async fn the_same_claim_sent_several_times_at_once_has_one_child() {
    let (root, client) = (own_root(), client().await);
    let store = store(&root).await;
    let claim = Claim::new("k", Token::random(), "the same", SESSION);
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, claim) = (store.clone(), claim.clone());
        asking.spawn(async move { store.lease_acquire(&claim).await.expect("an answer") });
    }
    let fence = |it| match it {
        Acquired::Granted(grant) => grant.fence,
        held @ Acquired::Held { .. } => panic!("{held:?}"),
    };
    let fences: Vec<_> = asking.join_all().await.into_iter().map(fence).collect();
    assert!(fences.iter().all(|it| *it == fences[0]), "{fences:?}");
    wait_for_children(&client, &store.path("k"), 1).await;
}

#[tokio::test]
async fn a_place_that_somebody_deletes_is_taken_again_and_grants_nothing() {
    let (root, client) = (own_root(), client().await);
    let (here, there) = (store(&root).await, store(&root).await);
    let path = here.path("k");
    let [holder, mut waiter] = ["holder", "waiter"].map(|it| Claim::new("k", Token::random(), it, SESSION * 10));
    waiter.queue = true;
    here.lease_acquire(&holder).await.expect("an answer");
    let held = children(&client, &path).await;
    for _ in 0..2 {
        let refused = there.lease_acquire(&waiter).await.expect("an answer");
        assert!(matches!(refused, Acquired::Held { .. }), "{refused:?}");
        let places = children(&client, &path).await;
        let place = places.iter().find(|it| !held.contains(it)).expect("a place");
        client.delete(&format!("{path}/{place}"), None).await.expect("it is there");
    }
    // The key is deleted with all that is in it.
    client.delete(&format!("{path}/{}", held[0]), None).await.expect("it is there");
    client.delete(&path, None).await.expect("it has no children");
    assert_eq!(here.lease_release(&holder.key, holder.token, Duration::ZERO).await.expect("an answer"), Answer::Gone);
    let granted = there.lease_acquire(&waiter).await.expect("an answer");
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
    wait_for_children(&client, &path, 1).await;
}

#[tokio::test]
async fn a_claim_that_was_stolen_is_not_granted_again() {
    let (root, client) = (own_root(), client().await);
    let (here, there) = (store(&root).await, store(&root).await);
    let [first, second] = ["first", "second"].map(|it| Claim::new("k", Token::random(), it, SESSION * 100));
    let granted = here.lease_acquire(&first).await.expect("an answer");
    let Acquired::Granted(grant) = granted else { panic!("{granted:?}") };
    let stolen = there.lease_release(&first.key, first.token, Duration::ZERO).await.expect("an answer");
    assert_eq!(stolen, Answer::Done);
    assert!(matches!(there.lease_acquire(&second).await.expect("an answer"), Acquired::Granted(_)));
    let again = here.lease_acquire(&first).await.expect("an answer");
    assert!(matches!(again, Acquired::Held { .. }), "{again:?}");
    wait_for_children(&client, &here.path("k"), 1).await;
    there.lease_release(&second.key, second.token, Duration::ZERO).await.expect("an answer");
    let anew = here.lease_acquire(&first).await.expect("an answer");
    let Acquired::Granted(anew) = anew else { panic!("{anew:?}") };
    assert!(anew.fence.get() > grant.fence.get() + grant.spare_fences, "it is another grant");
}

#[tokio::test]
async fn a_release_wakes_a_waiter_without_a_poll() {
    let root = own_root();
    let (here, there) = (store(&root).await, store(&root).await);
    let claim = |holder: &str| Claim::new("k", Token::random(), holder, SESSION * 10);
    let (holder, mut waiter) = (claim("holder"), claim("waiter"));
    waiter.queue = true;
    here.lease_acquire(&holder).await.expect("an answer");
    there.lease_acquire(&waiter).await.expect("an answer");
    let freed = there.lease_freed(&waiter.key);
    tokio::pin!(freed);
    let early = tokio::time::timeout(Duration::from_millis(300), &mut freed).await;
    assert!(early.is_err(), "it is still held");
    let released = Instant::now();
    here.lease_release(&holder.key, holder.token, Duration::ZERO).await.expect("an answer");
    within(freed).await;
    eprintln!("a waiter was woken by a release after {:?}", released.elapsed());
    let granted = there.lease_acquire(&waiter).await.expect("an answer");
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
    // Who does not queue watches the holder.
    let watching = tokio::spawn({
        let (store, key) = (here.clone(), holder.key.clone());
        async move { store.lease_freed(&key).await }
    });
    there.lease_release(&waiter.key, waiter.token, Duration::ZERO).await.expect("an answer");
    within(watching).await.expect("no panic");
}
