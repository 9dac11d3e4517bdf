//! Other clients that lock with `SET NX PX` and release by a script, as redis-py and the Redlock family do.

use std::time::Duration;

use lockkit::{
    Leases,
    store::{Answer, LeaseStore},
};
use lockkit_redis::Layout;
use lockkit_store_servers::redis::Redis;
use redis::Script;
use tokio::time::sleep;

use crate::support::{builder, claim, is_refused, plain, send, store, take, until_granted};

const TTL: Duration = Duration::from_secs(30);

/// What such clients send to release a lock.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

#[tokio::test]
async fn each_client_refuses_what_the_other_holds() {
    let server = Redis::start();
    let store = store(&server).await;
    let mut other = plain(&server).await;

    let held = claim("k", TTL);
    let fence = take(&store, &held).await.fence;
    assert_eq!(send::<Option<String>>(&mut other, "SET k theirs NX PX 30000").await, None);
    let stale: i64 = Script::new(RELEASE).key("k").arg("theirs").invoke_async(&mut other).await.unwrap();
    assert_eq!(stale, 0);
    store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();

    assert!(send::<Option<String>>(&mut other, "SET k theirs NX PX 30000").await.is_some());
    assert!(is_refused(&store, &claim("k", TTL)).await);
    assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Gone);
    let leases = Leases::new(store.clone());
    let shown = leases.show("k").await.unwrap().expect("it is held");
    assert_eq!(shown.holder, "another client: theirs");
    assert!(shown.expires_in <= TTL && shown.expires_in > TTL / 2);
    let freed: i64 = Script::new(RELEASE).key("k").arg("theirs").invoke_async(&mut other).await.unwrap();
    assert_eq!(freed, 1);
    assert!(take(&store, &claim("k", TTL)).await.fence.get() > fence.get() + 127);
}

#[tokio::test]
async fn a_lock_of_another_client_is_waited_for_and_can_be_freed_by_an_operator() {
    let server = Redis::start();
    let store = store(&server).await;
    let leases = Leases::new(store.clone());
    let mut other = plain(&server).await;
    send::<()>(&mut other, "SET expires theirs NX PX 300").await;
    drop(leases.lease("expires").acquire().await.unwrap());

    send::<()>(&mut other, "SET stays theirs NX PX 3600000").await;
    assert!(is_refused(&store, &claim("stays", TTL)).await);
    let stolen = leases.steal("stays").await.unwrap().expect("it is held");
    assert_eq!(stolen.holder, "another client: theirs");
    assert_eq!(send::<Option<String>>(&mut other, "GET stays").await, None);
    take(&store, &claim("stays", TTL)).await;
}

#[tokio::test]
async fn a_lock_of_another_client_may_be_empty() {
    let server = Redis::start();
    let store = store(&server).await;
    let mut other = plain(&server).await;
    // After a release, the row has no token.
    let held = claim("k", TTL);
    take(&store, &held).await;
    store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    redis::cmd("SET").arg("k").arg("").arg("PX").arg(30_000).exec_async(&mut other).await.unwrap();
    let leases = Leases::new(store.clone());
    assert_eq!(leases.show("k").await.unwrap().expect("it is held").holder, "another client: ");
    assert_eq!(leases.list("k").await.unwrap().len(), 0, "it is not lockkit's");
    leases.steal("k").await.unwrap().expect("it is held");
    take(&store, &claim("k", TTL)).await;
}

#[tokio::test]
async fn a_list_forgets_no_lease_of_the_other_layout() {
    let server = Redis::start();
    let store = store(&server).await;
    let redisson = builder(&server).layout(Layout::Redisson).connect().await.unwrap();
    take(&store, &claim("k", TTL)).await;
    assert!(redisson.lease_list("", 10).await.unwrap().is_empty());
    assert_eq!(store.lease_list("", 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn keys_named_as_those_of_lockkit_are_leases_like_others() {
    let server = Redis::start();
    let store = store(&server).await;
    take(&store, &claim("a", TTL)).await;
    for key in ["lockkit:names", "lockkit:times", "lockkit:epoch", "lockkit:{a}", "lockkit::a"] {
        let held = claim(key, TTL);
        take(&store, &held).await;
        assert!(is_refused(&store, &claim(key, TTL)).await);
        assert_eq!(store.lease_list(key, 10).await.unwrap().len(), 1, "{key}");
        assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
    }
    sleep(Duration::from_millis(5)).await;
    assert_eq!(store.lease_sweep(Duration::from_millis(1), 10).await.unwrap(), 5);
    assert!(is_refused(&store, &claim("a", TTL)).await);
}

#[tokio::test]
async fn a_lease_whose_row_was_deleted_goes_on() {
    let server = Redis::start();
    let store = store(&server).await;
    let held = claim("k", Duration::from_millis(300));
    let fence = take(&store, &held).await.fence;
    send::<i64>(&mut plain(&server).await, "DEL lockkit:{k}").await;
    let renewed = store.lease_renew(&[lockkit::store::Renewal::new("k", held.token, held.ttl)]).await.unwrap();
    assert_eq!(renewed, [Answer::Done]);
    let (grant, _) = until_granted(&store, &claim("k", TTL)).await;
    assert!(grant.fence > fence);
}
