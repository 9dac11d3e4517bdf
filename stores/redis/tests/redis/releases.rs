//! Waiters are woken by subscription.

use std::{
    task::{Context, Waker},
    time::Duration,
};

use lockkit::store::LeaseStore;
use lockkit_redis::RedisStore;
use lockkit_store_servers::redis::Redis;
use tokio::{task::JoinHandle, time::timeout};

use crate::support::{PATIENCE, claim, plain, send, store, take, until};

const TTL: Duration = Duration::from_secs(30);

/// A waiter that is woken by what is released from here on: a call counts from its first poll.
fn waiting(store: &RedisStore, key: &'static str) -> JoinHandle<()> {
    let store = store.clone();
    let mut freed = Box::pin(async move { store.lease_freed(&key.into()).await });
    let is_woken = freed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    tokio::spawn(async move {
        if !is_woken {
            freed.await;
        }
    })
}

async fn channels(server: &Redis) -> usize {
    send::<Vec<String>>(&mut plain(server).await, "PUBSUB CHANNELS lockkit:*").await.len()
}

/// A waiter that the beginning of its subscription does not wake any more.
async fn settled(server: &Redis, store: &RedisStore, key: &'static str) -> JoinHandle<()> {
    // Woken, unless there was a subscription before.
    let mut first = waiting(store, key);
    let is_woken = timeout(Duration::from_millis(500), &mut first).await.is_ok();
    first.abort();
    until("it is subscribed", async || is_woken || channels(server).await > 0).await;
    waiting(store, key)
}

#[tokio::test]
async fn a_release_by_another_process_wakes_the_waiters_of_its_key_only() {
    let server = Redis::start();
    let (here, there) = (store(&server).await, store(&server).await);
    let (a, b) = (claim("a", TTL), claim("b", TTL));
    take(&here, &a).await;
    take(&here, &b).await;
    // Together, so that neither subscription ends in between.
    let (wait_for_a, wait_for_b) = tokio::join!(settled(&server, &there, "a"), settled(&server, &there, "b"));
    let other = waiting(&there, "a");
    assert_eq!(channels(&server).await, 2);
    here.lease_release(&a.key, a.token, Duration::ZERO).await.unwrap();
    timeout(PATIENCE, wait_for_a).await.expect("it is woken").unwrap();
    timeout(PATIENCE, other).await.expect("it is woken").unwrap();
    assert!(!wait_for_b.is_finished());
    here.lease_release(&b.key, b.token, Duration::ZERO).await.unwrap();
    timeout(PATIENCE, wait_for_b).await.expect("it is woken").unwrap();
}

#[tokio::test]
async fn one_connection_serves_all_waiters_and_is_closed_after_the_last() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let subscribers = async |conn: &mut _| send::<String>(conn, "CLIENT LIST TYPE pubsub").await.lines().count();
    assert_eq!(subscribers(&mut conn).await, 0);
    let connections = async |conn: &mut _| send::<String>(conn, "CLIENT LIST").await.lines().count();
    let before = connections(&mut conn).await;
    let settled = |key| settled(&server, &store, key);
    let (a, b, c) = tokio::join!(settled("a"), settled("b"), settled("c"));
    let mut settled = vec![a, b, c];
    settled.extend(["c", "c"].map(|key| waiting(&store, key)));
    assert_eq!((subscribers(&mut conn).await, channels(&server).await), (1, 3));
    settled[0].abort();
    until("the channel without waiters is left", async || channels(&server).await == 2).await;
    for waiter in &settled {
        waiter.abort();
    }
    until("the connection is closed", async || connections(&mut conn).await == before).await;
}

#[tokio::test]
async fn a_broken_subscription_is_made_again_and_wakes_the_waiters() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let held = claim("k", TTL);
    take(&store, &held).await;
    let waiter = settled(&server, &store, "k").await;
    send::<i64>(&mut conn, "CLIENT KILL TYPE pubsub").await;
    timeout(PATIENCE, waiter).await.expect("a release may have been missed").unwrap();
    let waiter = settled(&server, &store, "k").await;
    store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    timeout(PATIENCE, waiter).await.expect("it is woken").unwrap();
}

#[test]
fn a_runtime_that_ended_does_not_keep_the_waiters_of_another() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = Redis::start();
    let (first, second) = (runtime(), runtime());
    let store = first.block_on(store(&server));
    let _here = first.block_on(settled(&server, &store, "k"));
    let there = {
        let _inside = second.enter();
        waiting(&store, "k")
    };
    drop(first);
    let held = claim("k", TTL);
    second.block_on(async {
        until("a release wakes it", async || {
            take(&store, &held).await;
            store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
            there.is_finished()
        })
        .await;
    });
}
