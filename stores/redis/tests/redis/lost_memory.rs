//! Servers that forget leases: no other process gets them before their ttl is over.

use std::time::Duration;

use lockkit::{
    Error, Fault, Holder, Leases,
    store::{Answer, LeaseStore, Renewal},
};
use lockkit_redis::{ConnectError, Unfit};
use lockkit_store_servers::redis::Redis;
use tokio::time::Instant;

use crate::support::{builder, claim, declared, is_refused, plain, send, take, until, until_granted};

const TTL: Duration = Duration::from_millis(1500);

/// What makes a server forget.
#[derive(Debug, Clone, Copy)]
enum Loss {
    Flushed,
    Killed,
}

impl Loss {
    async fn happens(self, server: &mut Redis) {
        match self {
            Self::Flushed => send(&mut plain(server).await, "FLUSHALL").await,
            Self::Killed => server.program.start_again(),
        }
    }
}

#[tokio::test]
async fn a_lease_that_the_server_forgot_has_one_holder_until_its_ttl_is_over() {
    for loss in [Loss::Flushed, Loss::Killed] {
        let mut server = Redis::start();
        let holder = declared(builder(&server).longest_ttl(TTL)).await;
        let rival = builder(&server).longest_ttl(TTL).connect().await.unwrap();
        let (first, sent) = (claim("k", TTL), Instant::now());
        let fence = take(&holder, &first).await.fence;
        loss.happens(&mut server).await;
        let (grant, _) = until_granted(&rival, &claim("k", TTL)).await;
        println!("{loss:?}: rival granted after {:?}, ttl {TTL:?}", sent.elapsed());
        assert!(sent.elapsed() >= TTL, "{loss:?}: granted {:?} after the forgotten grant", sent.elapsed());
        assert!(grant.fence.get() > fence.get() + 127, "{loss:?}: {} after {fence}", grant.fence);
        let late = holder.lease_renew(&[Renewal::new("k", first.token, TTL)]).await.unwrap();
        assert_eq!(late, [Answer::Gone]);
    }
}

#[tokio::test]
async fn a_refusal_in_the_quarantine_names_it_and_no_holder() {
    let server = Redis::start();
    let leases = Leases::new(builder(&server).connect().await.unwrap());
    let refused = leases.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
    let Error::Contended { holder: Some(holder), .. } = &refused else { panic!("{refused:?}") };
    let Holder::Unknown(reason) = &**holder else { panic!("{holder:?}") };
    assert!(reason.starts_with("the server may have forgotten leases: its quarantine ends in "), "{reason}");
    assert!(refused.to_string().starts_with("lock `k` is not granted (waited "), "{refused}");
    leases.store().declare_new().await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let held = leases.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
    assert!(held.to_string().starts_with("lock `k` is held by this process (waited "), "{held}");
    drop(lease);
}

#[tokio::test]
async fn a_waiting_writer_does_not_enter_beside_a_forgotten_reader() {
    // Nothing is renewed while the test runs.
    let ttl = Duration::from_mins(3);
    for loss in [Loss::Flushed, Loss::Killed] {
        let mut server = Redis::start();
        let store = declared(builder(&server).longest_ttl(ttl)).await;
        let leases = Leases::builder(store.clone()).ttl(ttl).build().unwrap();
        let reader = leases.rw("k").read().acquire().await.unwrap();
        let rival = Leases::builder(builder(&server).longest_ttl(ttl).connect().await.unwrap()).ttl(ttl);
        let rival = rival.wait(Duration::from_secs(5)).build().unwrap();
        let waiting = tokio::spawn(async move { rival.rw("k").write().acquire().await.map(drop) });
        until("the writer waits", async || store.lease_look(&"k/writer".into()).await.unwrap().is_some()).await;
        loss.happens(&mut server).await;
        let entered = waiting.await.unwrap();
        assert!(reader.is_trusted() && entered.is_err(), "{loss:?}: both are inside");
        for read in [store.lease_look(&"k".into()).await.err(), store.lease_list("", 10).await.err()] {
            assert!(matches!(read, Some(Error::Database { fault: Fault::Unavailable, .. })), "{loss:?}: {read:?}");
        }
    }
}

#[tokio::test]
async fn without_quarantine_it_has_two() {
    for loss in [Loss::Flushed, Loss::Killed] {
        let mut server = Redis::start();
        let ttl = Duration::from_mins(1);
        let store = builder(&server).without_quarantine().connect().await.unwrap();
        take(&store, &claim("k", ttl)).await;
        loss.happens(&mut server).await;
        let (_, after) = until_granted(&store, &claim("k", ttl)).await;
        println!("{loss:?}, no quarantine: rival granted after {after:?}, ttl {ttl:?}");
    }
}

#[tokio::test]
async fn a_lease_in_an_append_only_file_survives_the_server() {
    let mut server = Redis::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let holder = declared(builder(&server).longest_ttl(TTL)).await;
    let (first, sent) = (claim("k", TTL), Instant::now());
    take(&holder, &first).await;
    server.program.start_again();
    until("the server has read its file", async || {
        let renewed = holder.lease_renew(&[Renewal::new("k", first.token, TTL)]).await;
        renewed.is_ok_and(|it| it == [Answer::Done])
    })
    .await;
    let rival = builder(&server).longest_ttl(TTL).connect().await.unwrap();
    until_granted(&rival, &claim("k", TTL)).await;
    assert!(sent.elapsed() >= TTL);
}

#[tokio::test]
async fn a_server_that_was_saved_to_disk_right_before_it_died_has_a_quarantine() {
    let mut server = Redis::start();
    let ttl = Duration::from_mins(1);
    let holder = declared(builder(&server).longest_ttl(ttl)).await;
    take(&holder, &claim("other", ttl)).await;
    send::<()>(&mut plain(&server).await, "SAVE").await;
    take(&holder, &claim("k", ttl)).await;
    server.program.start_again();
    let rival = builder(&server).longest_ttl(ttl).connect().await.unwrap();
    assert!(is_refused(&rival, &claim("k", ttl)).await, "its holder trusts it");
    assert!(is_refused(&rival, &claim("other", ttl)).await);
}

#[tokio::test]
async fn a_swap_of_databases_has_a_quarantine_unless_the_other_one_has_leases_of_its_own() {
    let server = Redis::start();
    let ttl = Duration::from_mins(1);
    let store = declared(builder(&server).longest_ttl(ttl)).await;
    take(&store, &claim("k", ttl)).await;
    let mut conn = plain(&server).await;
    send::<()>(&mut conn, "SWAPDB 0 1").await;
    assert!(is_refused(&store, &claim("k", ttl)).await, "its holder trusts it");
    store.declare_new().await.unwrap();
    take(&store, &claim("other", ttl)).await;
    // What comes back has the record of this server. The documents name this limit.
    send::<()>(&mut conn, "SWAPDB 0 1").await;
    assert!(is_refused(&store, &claim("k", ttl)).await);
    take(&store, &claim("other", ttl)).await;
}

#[tokio::test]
async fn a_new_server_grants_nothing_until_it_is_declared_new() {
    let server = Redis::start();
    let store = builder(&server).connect().await.unwrap();
    assert!(is_refused(&store, &claim("k", TTL)).await);
    let left = store.quarantined_for().await.unwrap();
    assert!(left > Duration::from_secs(30) && left <= Duration::from_mins(1), "{left:?}");
    store.declare_new().await.unwrap();
    assert_eq!(store.quarantined_for().await.unwrap(), Duration::ZERO);
    take(&store, &claim("k", TTL)).await;
}

#[tokio::test]
async fn the_quarantine_is_as_long_as_the_longest_ttl_of_any_client() {
    let server = Redis::start();
    let long = declared(builder(&server).longest_ttl(Duration::from_secs(600))).await;
    let short = builder(&server).longest_ttl(TTL).connect().await.unwrap();
    // Each of them acquires once, so the second learns of the first.
    take(&long, &claim("a", TTL)).await;
    take(&short, &claim("b", TTL)).await;
    send::<()>(&mut plain(&server).await, "FLUSHALL").await;
    assert!(is_refused(&short, &claim("a", TTL)).await);
    let left = short.quarantined_for().await.unwrap();
    assert!(left > Duration::from_secs(300), "{left:?}");

    // A client that comes after the loss prolongs what a shorter one began.
    send::<()>(&mut plain(&server).await, "FLUSHALL").await;
    let newcomer = builder(&server).longest_ttl(TTL).connect().await.unwrap();
    assert!(is_refused(&newcomer, &claim("a", TTL)).await);
    assert!(newcomer.quarantined_for().await.unwrap() <= TTL);
    assert!(is_refused(&long, &claim("a", TTL)).await);
    let left = long.quarantined_for().await.unwrap();
    assert!(left > Duration::from_secs(300), "{left:?}");
    assert!(is_refused(&newcomer, &claim("a", TTL)).await);

    // An operator knows that the long one is no more.
    drop(long);
    let last = builder(&server).longest_ttl(TTL).connect().await.unwrap();
    last.declare_new().await.unwrap();
    take(&last, &claim("a", TTL)).await;
    send::<()>(&mut plain(&server).await, "FLUSHALL").await;
    assert!(last.quarantined_for().await.unwrap() <= TTL);
}

#[tokio::test]
async fn a_ttl_beyond_the_longest_is_refused() {
    let server = Redis::start();
    let store = declared(builder(&server).longest_ttl(TTL)).await;
    let leases = Leases::builder(store.clone()).ttl(TTL).build().unwrap();
    let refused = leases.lease("k").ttl(TTL * 2).acquire().await.unwrap_err();
    assert!(matches!(refused, Error::InvalidOption { option: "ttl", .. }), "{refused:?}");
    // lockkit's own leases, such as the sweeper's, are shortened.
    let grant = take(&store, &claim("k", TTL * 2)).await;
    assert_eq!(grant.ttl, Some(TTL));
    let left = leases.show("k").await.unwrap().unwrap().expires_in;
    assert!(left <= TTL, "{left:?}");
}

#[tokio::test]
async fn a_server_that_evicts_is_refused_at_the_start_and_later() {
    let server = Redis::with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-random"]);
    let refused = builder(&server).connect().await.unwrap_err();
    assert!(matches!(refused, ConnectError::Unfit(Unfit::Evicts { .. })), "{refused}");

    let mut conn = plain(&server).await;
    send::<()>(&mut conn, "CONFIG SET maxmemory-policy noeviction").await;
    let store = declared(builder(&server)).await;
    let without = builder(&server).without_quarantine().connect().await.unwrap();
    let held = claim("k", TTL);
    take(&store, &held).await;
    // A second later the next claim is refused, on the connection that is open.
    send::<()>(&mut conn, "CONFIG SET maxmemory-policy volatile-lru").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    for store in [&store, &without] {
        let refused = store.lease_acquire(&claim("other", TTL)).await.expect_err("it may evict");
        let source = std::error::Error::source(&refused).expect("the server's settings").to_string();
        assert!(source.contains("maxmemory-policy is `volatile-lru` with a maxmemory of 104857600 bytes"), "{source}");
        assert!(!refused.is_transient(), "{refused:?}");
    }
    assert_eq!(store.lease_renew(&[Renewal::new("k", held.token, TTL)]).await.unwrap(), [Answer::Done]);
    send::<i64>(&mut conn, "CLIENT KILL TYPE normal").await;
    assert!(store.lease_acquire(&claim("other", TTL)).await.is_err());
    send::<()>(&mut conn, "CONFIG SET maxmemory-policy noeviction").await;
    take(&store, &claim("other", TTL)).await;
}

#[tokio::test]
async fn a_server_that_evicted_something_meanwhile_has_a_quarantine() {
    let server = Redis::start();
    let ttl = Duration::from_mins(1);
    let store = declared(builder(&server).longest_ttl(ttl)).await;
    let held = claim("k", ttl);
    take(&store, &held).await;
    let mut conn = plain(&server).await;
    // Keys with an expiry go, and the settings are what they were.
    send::<()>(&mut conn, "CONFIG SET maxmemory-policy volatile-random").await;
    send::<()>(&mut conn, "CONFIG SET maxmemory 1").await;
    until("the lock is evicted", async || send::<usize>(&mut conn, "EXISTS k").await == 0).await;
    send::<()>(&mut conn, "CONFIG SET maxmemory 0").await;
    send::<()>(&mut conn, "CONFIG SET maxmemory-policy noeviction").await;
    assert!(is_refused(&store, &claim("k", TTL)).await, "its holder trusts it");
    store.declare_new().await.unwrap();
    take(&store, &claim("k", TTL)).await;
    // The counter of evicted keys begins again.
    send::<()>(&mut conn, "CONFIG RESETSTAT").await;
    take(&store, &claim("other", TTL)).await;
}

#[tokio::test]
async fn a_user_without_info_hears_what_to_allow_and_one_without_config_is_enough() {
    let server = Redis::start();
    let mut conn = plain(&server).await;
    send::<()>(&mut conn, "ACL SETUSER a on nopass ~* &* +@all -info").await;
    send::<()>(&mut conn, "ACL SETUSER b on nopass ~* &* +@all -@dangerous -@admin +info").await;
    let connect = async |user: &str| {
        let url = server.url().replace("redis://", &format!("redis://{user}:any@"));
        lockkit_redis::RedisStore::connect(redis::Client::open(url).unwrap()).await
    };
    let refused = connect("a").await.unwrap_err();
    assert!(matches!(refused, ConnectError::Unfit(Unfit::InfoDenied)), "{refused}");
    let store = connect("b").await.unwrap();
    store.declare_new().await.unwrap();
    take(&store, &claim("k", TTL)).await;
}
