//! Futures dropped at every await, and answers that are lost: neither leaves a child behind.

use std::time::Duration;

use lockkit::{
    LeaseStore, Leases,
    store::{Claim, Token},
    testing::drop_at_every_await,
};
use lockkit_zookeeper::Layout;

use crate::{
    proxy::{Answers, Proxy},
    support::{SESSION, client, own_root, shared_server, store, store_on, wait_for_children, within},
};

#[tokio::test]
async fn a_dropped_request_leaves_no_child() {
    let (root, client) = (own_root(), client().await);
    let leases = Leases::new(store(&root).await);
    let path = leases.store().path("k");
    let work = || async {
        let lease = leases.lease("k").acquire().await.expect("it is free");
        lease.release().await.expect("a release");
    };
    let drops = drop_at_every_await(work).then(async |_| wait_for_children(&client, &path, 0).await).await;
    assert!(drops.completed && drops.points > 4, "{drops:?}");
    eprintln!("acquire and release: {drops:?}");
}

#[tokio::test]
async fn a_dropped_wait_leaves_no_place() {
    let (root, client) = (own_root(), client().await);
    let (here, there) = (Leases::new(store(&root).await), Leases::new(store(&root).await));
    let path = here.store().path("k");
    let _held = here.lease("k").acquire().await.expect("it is free");
    let work = || async {
        there.lease("k").wait(Duration::from_millis(400)).acquire().await.map(drop).expect_err("it is held")
    };
    let drops = drop_at_every_await(work).then(async |_| wait_for_children(&client, &path, 1).await).await;
    assert!(drops.points > 4, "{drops:?}");
    eprintln!("waiting: {drops:?}");
}

#[tokio::test]
async fn a_call_of_the_store_that_is_dropped_leaves_no_child() {
    let (root, client) = (own_root(), client().await);
    let store = store(&root).await;
    let path = store.path("k");
    for queue in [false, true] {
        let work = || async {
            let mut claim = Claim::new("k", Token::random(), "dropped", SESSION);
            claim.queue = queue;
            store.lease_acquire(&claim).await.expect("an answer");
            store.lease_release(&claim.key, claim.token, Duration::ZERO).await.expect("an answer");
        };
        // A release that was never sent is up to the caller. The calls themselves finish.
        let free = async |_| {
            for held in store.lease_list("k", 10).await.expect("an answer") {
                store.lease_release(&held.info.key, held.token, Duration::ZERO).await.expect("an answer");
            }
            wait_for_children(&client, &path, 0).await;
        };
        let drops = drop_at_every_await(work).then(free).await;
        assert!(drops.completed && drops.points > 2, "{drops:?}");
    }
}

#[tokio::test]
async fn a_claim_that_nobody_waits_for_is_given_up_when_its_answer_comes() {
    let (root, client) = (own_root(), client().await);
    let proxy = Proxy::to(shared_server()).await;
    let store = store_on(&proxy.host(), &root, SESSION, Layout::Curator).await;
    let path = store.path("k");
    drop(Leases::new(store.clone()).lease("k").acquire().await.expect("it is free"));
    wait_for_children(&client, &path, 0).await;
    for queue in [false, true] {
        // It does not end by its ttl, and no call releases it.
        let mut claim = Claim::new("k", Token::random(), "dropped", SESSION * 100);
        claim.queue = queue;
        proxy.answers(Answers::Wait);
        let asking = tokio::spawn({
            let store = store.clone();
            async move { store.lease_acquire(&claim).await }
        });
        wait_for_children(&client, &path, 1).await;
        asking.abort();
        assert!(within(asking).await.is_err(), "it was dropped without an answer");
        proxy.answers(Answers::Pass);
        wait_for_children(&client, &path, 0).await;
    }
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_leaves_no_child() {
    let (root, client) = (own_root(), client().await);
    let proxy = Proxy::to(shared_server()).await;
    let store = store_on(&proxy.host(), &root, SESSION, Layout::Curator).await;
    let path = store.path("k");
    // The node of the key exists from now on.
    drop(Leases::new(store.clone()).lease("k").acquire().await.expect("it is free"));
    wait_for_children(&client, &path, 0).await;
    for queue in [false, true] {
        let mut claim = Claim::new("k", Token::random(), "unheard", SESSION * 10);
        claim.queue = queue;
        // The server gets the claim, and its answer never arrives.
        proxy.answers(Answers::Vanish);
        let asking = tokio::spawn({
            let (store, claim) = (store.clone(), claim.clone());
            async move { store.lease_acquire(&claim).await }
        });
        wait_for_children(&client, &path, 1).await;
        proxy.cut();
        proxy.answers(Answers::Pass);
        let answer = within(asking).await.expect("no panic");
        assert!(answer.is_err(), "{answer:?}");
        // No call releases it, and its ttl is long.
        wait_for_children(&client, &path, 0).await;
    }
    // The session is the same, and works.
    let lease = Leases::new(store.clone()).lease("k").acquire().await.expect("it is free");
    wait_for_children(&client, &path, 1).await;
    // The note that the release replaces is written, and the store has the answer: the answer to a later request has
    // come.
    while !client.get_data(&path).await.expect("the node is there").0.starts_with(b"lockkit 1\nheld") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    within(store.lease_look(&"k".into())).await.expect("an answer");
    // A release whose answer is lost is executed once, and the session deletes the child.
    proxy.answers(Answers::Vanish);
    let releasing = tokio::spawn(lease.release());
    wait_for_children(&client, &path, 0).await;
    proxy.cut();
    proxy.answers(Answers::Pass);
    within(releasing).await.expect("no panic").expect("an answer in the end");
}

#[tokio::test]
async fn a_lease_survives_a_connection_that_breaks() {
    let root = own_root();
    let proxy = Proxy::to(shared_server()).await;
    let store = store_on(&proxy.host(), &root, SESSION, Layout::Curator).await;
    let leases = Leases::builder(store).renew_every(Duration::from_millis(200)).build().expect("valid settings");
    let lease = leases.lease("k").acquire().await.expect("it is free");
    let until = lease.trusted_until();
    for _ in 0..5 {
        proxy.cut();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!(lease.is_trusted() && lease.trusted_until() > until, "it was renewed on other connections");
    lease.release().await.expect("a release");
}
