//! Locks of Redisson: the commands that its `RLock` runs in its scripts, sent by a plain client.

use std::time::Duration;

use futures_util::StreamExt;
use lockkit::{
    Leases,
    store::{Answer, LeaseStore, Renewal},
};
use lockkit_redis::{Layout, RedisStore};
use lockkit_store_servers::redis::Redis;
use redis::{Script, aio::MultiplexedConnection};
use tokio::time::{sleep, timeout};

use crate::support::{PATIENCE, builder, claim, client, declared, is_refused, plain, send, store, take};

const TTL: Duration = Duration::from_secs(30);
const JAVA: &str = "0bd23dbe-7c1b-4c15-8d6c-8d1d4c1c8d11:42";

/// Enters if no thread or this one is inside; otherwise answers how long the lock lives.
const LOCK: &str = "local is_free = redis.call('EXISTS', KEYS[1]) == 0
    if is_free or redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then
      redis.call('HINCRBY', KEYS[1], ARGV[2], 1) redis.call('PEXPIRE', KEYS[1], ARGV[1]) return false
    end return redis.call('PTTL', KEYS[1])";

/// What Redisson's watchdog sends.
const RENEW: &str = "if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return 0 end
    return redis.call('PEXPIRE', KEYS[1], ARGV[1])";

/// Leaves once. The last one that leaves deletes the lock and publishes that.
const UNLOCK: &str = "if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return false end
    if redis.call('HINCRBY', KEYS[1], ARGV[2], -1) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 0 end
    redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[2], '0') return 1";

const CHANNEL: &str = "redisson_lock__channel:{k}";

async fn java(conn: &mut MultiplexedConnection, script: &str, thread: &str) -> Option<i64> {
    Script::new(script).key("k").key(CHANNEL).arg(30_000).arg(thread).invoke_async(conn).await.unwrap()
}

async fn redisson(server: &Redis) -> RedisStore {
    declared(builder(server).layout(Layout::Redisson)).await
}

#[tokio::test]
async fn a_lease_is_a_lock_of_another_thread_for_redisson() {
    let server = Redis::start();
    let (store, mut conn) = (redisson(&server).await, plain(&server).await);
    let held = claim("k", TTL);
    take(&store, &held).await;
    assert_eq!(send::<String>(&mut conn, "TYPE k").await, "hash");
    let (fields, counts): (Vec<String>, Vec<i64>) =
        (send(&mut conn, "HKEYS k").await, send(&mut conn, "HVALS k").await);
    let (uuid, thread) = fields[0].split_once(':').expect("a client and its thread");
    assert!(uuid.len() == 36 && thread.parse::<u64>().is_ok() && counts == [1], "{fields:?} {counts:?}");

    let left = java(&mut conn, LOCK, JAVA).await.expect("it is held");
    assert!(left > 15_000 && left <= 30_000);
    assert_eq!(java(&mut conn, RENEW, JAVA).await, Some(0));
    assert_eq!(java(&mut conn, UNLOCK, JAVA).await, None);
    assert_eq!(store.lease_renew(&[Renewal::new("k", held.token, TTL)]).await.unwrap(), [Answer::Done]);
}

#[tokio::test]
async fn a_lock_of_redisson_is_refused_shown_and_waited_for() {
    let server = Redis::start();
    let (store, mut conn) = (redisson(&server).await, plain(&server).await);
    assert_eq!(java(&mut conn, LOCK, JAVA).await, None);
    assert_eq!(java(&mut conn, LOCK, JAVA).await, None, "it enters twice");
    assert!(is_refused(&store, &claim("k", TTL)).await);
    let leases = Leases::new(store.clone());
    assert_eq!(leases.show("k").await.unwrap().unwrap().holder, "another client: 0bd23dbe…");

    let waiting = tokio::spawn({
        let request = leases.lease("k").wait(PATIENCE);
        async move { request.acquire().await.unwrap() }
    });
    assert_eq!(java(&mut conn, UNLOCK, JAVA).await, Some(0));
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it is still inside once");
    assert_eq!(java(&mut conn, UNLOCK, JAVA).await, Some(1));
    waiting.await.unwrap().release().await.unwrap();
    assert_eq!(java(&mut conn, LOCK, JAVA).await, None);
}

#[tokio::test]
async fn a_release_wakes_the_waiters_of_redisson() {
    let server = Redis::start();
    let store = redisson(&server).await;
    let held = claim("k", TTL);
    take(&store, &held).await;
    let mut subscription = client(&server).get_async_pubsub().await.unwrap();
    subscription.subscribe(CHANNEL).await.unwrap();
    store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    let message = timeout(PATIENCE, subscription.on_message().next()).await.unwrap().unwrap();
    assert_eq!(message.get_payload::<String>().unwrap(), "0");
}

#[tokio::test]
async fn locks_of_two_layouts_let_nobody_enter() {
    let server = Redis::start();
    let (token, redisson) = (store(&server).await, redisson(&server).await);
    take(&token, &claim("a", TTL)).await;
    assert!(redisson.lease_acquire(&claim("a", TTL)).await.is_err());
    take(&redisson, &claim("b", TTL)).await;
    assert!(token.lease_acquire(&claim("b", TTL)).await.is_err());
}
