//! Futures that are dropped at every await leave no lease.

use std::time::Duration;

use lockkit::{
    Leases,
    store::{LeaseStore, Release},
    testing::drop_at_every_await,
};
use lockkit_store_servers::redis::Redis;

use crate::support::{PATIENCE, builder, claim, declared, store, until};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_dropped_request_leaves_no_lease() {
    let server = Redis::start();
    let store = declared(builder(&server)).await;
    let leases = Leases::builder(store.clone()).ttl(TTL).build().unwrap();
    let acquire_and_release = || async { leases.lease("k").acquire().await.unwrap().release().await.unwrap() };
    let drops = drop_at_every_await(acquire_and_release)
        .blocked_after(PATIENCE)
        .then(async |_| {
            until("the lease is free", async || store.lease_list("", 10).await.unwrap().is_empty()).await;
        })
        .await;
    assert!(drops.completed && drops.points > 3, "{drops:?}");
}

#[tokio::test]
async fn a_dropped_request_for_several_leaves_none() {
    let server = Redis::start();
    let store = declared(builder(&server)).await;
    let leases = Leases::builder(store.clone()).ttl(TTL).build().unwrap();
    let acquire = || async { drop(leases.all(["a", "b", "c"]).acquire().await.unwrap()) };
    let drops = drop_at_every_await(acquire)
        .blocked_after(PATIENCE)
        .then(async |_| {
            until("the leases are free", async || store.lease_list("", 10).await.unwrap().is_empty()).await;
        })
        .await;
    assert!(drops.completed && drops.points > 3, "{drops:?}");
}

#[tokio::test]
async fn a_dropped_call_leaves_a_store_that_works() {
    let server = Redis::start();
    let store = store(&server).await;
    let calls = || {
        let (store, held) = (store.clone(), claim("k", TTL));
        async move {
            store.lease_acquire(&held).await.unwrap();
            store.lease_look(&held.key).await.unwrap();
            store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
        }
    };
    let drops = drop_at_every_await(calls)
        .blocked_after(PATIENCE)
        .then(async |_| {
            // What a dropped claim may have taken is released by its token, as lockkit does. Here, by an operator.
            let held = store.lease_list("", 10).await.unwrap();
            let releases: Vec<_> = held.iter().map(|it| Release::new(&it.info.key, it.token, Duration::ZERO)).collect();
            store.lease_release_all(&releases).await.unwrap();
            until("the lease is free", async || store.lease_list("", 10).await.unwrap().is_empty()).await;
        })
        .await;
    assert!(drops.completed && drops.points > 3, "{drops:?}");
}
