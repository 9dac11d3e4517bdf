//! Servers that stop, die and forget scripts. Every call ends, and the store recovers by itself.

use std::time::Duration;

use lockkit::{
    Leases,
    store::{Acquired, Answer, LeaseStore, Renewal},
    testing::Oracle,
};
use lockkit_redis::{Layout, RedisStore};
use lockkit_store_servers::redis::Redis;
use redis::Client;
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Network, builder, claim, declared, is_refused, plain, send, store, take, until, until_granted};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_stopped_server_ends_every_call_and_answers_again_when_it_goes_on() {
    let server = Redis::start();
    let store = declared(builder(&server).connect_timeout(SECOND).answer_timeout(SECOND / 2)).await;
    let held = claim("k", 30 * SECOND);
    take(&store, &held).await;
    let (renewals, other) = ([Renewal::new("k", held.token, SECOND)], claim("other", SECOND));
    server.program.stop();
    for round in 0..2 {
        let began = Instant::now();
        let (renewed, taken, listed, looked, swept) = tokio::join!(
            store.lease_renew(&renewals),
            store.lease_acquire(&other),
            store.lease_list("", 10),
            store.lease_look(&held.key),
            store.lease_sweep(SECOND, 10),
        );
        assert!(renewed.is_err() && taken.is_err() && listed.is_err() && looked.is_err() && swept.is_err());
        assert!(began.elapsed() < 10 * SECOND, "round {round}: {:?}", began.elapsed());
    }
    assert!(builder(&server).connect_timeout(SECOND).connect().await.is_err());
    server.program.go_on();
    until("it is renewed", async || {
        let renewed = store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]).await;
        renewed.is_ok_and(|it| it == [Answer::Done])
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_carries_nothing_any_more_is_replaced_though_calls_are_dropped_early() {
    let server = Redis::start();
    let network = Network::before(&server).await;
    let client = Client::open(format!("redis://127.0.0.1:{}/", network.port)).unwrap();
    let store = declared(RedisStore::builder(client)).await;
    let held = claim("k", 30 * SECOND);
    take(&store, &held).await;
    network.stalls_what_is_open();
    // As lockkit does with short ttls.
    let limit = Duration::from_millis(30);
    until("it is renewed on another connection", async || {
        let renewal = [Renewal::new("k", held.token, 30 * SECOND)];
        let renewing = store.lease_renew(&renewal);
        timeout(limit, renewing).await.is_ok_and(|it| it.is_ok_and(|it| it == [Answer::Done]))
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_ended_while_nobody_used_it_costs_no_error() {
    let mut server = Redis::with(&["--appendonly", "yes"]);
    let store = store(&server).await;
    let held = claim("k", 30 * SECOND);
    take(&store, &held).await;
    for _ in 0..3 {
        send::<i64>(&mut plain(&server).await, "CLIENT KILL TYPE normal").await;
        // The client's task sees the end of the connection.
        sleep(Duration::from_millis(50)).await;
        let renewed = store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]).await;
        assert_eq!(renewed.unwrap(), [Answer::Done]);
    }
    server.program.start_again();
    sleep(Duration::from_millis(50)).await;
    let renewed = store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]).await;
    assert_eq!(renewed.unwrap(), [Answer::Done]);
}

#[test]
fn a_runtime_that_ended_takes_no_other_runtime_with_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Redis::start();
    let (first, second) = (runtime(), runtime());
    let store = first.block_on(store(&server));
    let held = claim("k", 30 * SECOND);
    first.block_on(take(&store, &held));
    drop(first);
    let renewed = second.block_on(store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]));
    assert_eq!(renewed.unwrap(), [Answer::Done]);
}

/// A runtime that is alive and not driven, as one whose thread is busy or that waits for its next `block_on`.
#[test]
fn a_runtime_that_is_not_driven_stops_no_other() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Redis::start();
    let (idle, other) = (runtime(), runtime());
    let held = claim("k", 30 * SECOND);
    // It has opened the connection.
    let store = idle.block_on(declared(builder(&server).answer_timeout(2 * SECOND).connect_timeout(2 * SECOND)));
    idle.block_on(take(&store, &held));
    let renewed = other.block_on(store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]));
    assert_eq!(renewed.unwrap(), [Answer::Done]);
    // It waits for a release.
    let freed = |key: &str| {
        let (store, key) = (store.clone(), key.into());
        async move { store.lease_freed(&key).await }
    };
    let waiting = idle.spawn(freed("k"));
    idle.block_on(tokio::task::yield_now());
    // It opens the connection.
    other.block_on(async { send::<i64>(&mut plain(&server).await, "CLIENT KILL TYPE normal").await });
    let looking = idle.spawn({
        let store = store.clone();
        async move { store.lease_look(&"k".into()).await }
    });
    idle.block_on(async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    });
    // The first command may still meet the end of the old connection.
    other.block_on(until("it is renewed", async || {
        let renewed = store.lease_renew(&[Renewal::new("k", held.token, 30 * SECOND)]).await;
        renewed.is_ok_and(|it| it == [Answer::Done])
    }));
    // Waiters of another runtime are woken by releases.
    other.block_on(async {
        let freed = tokio::spawn(freed("other"));
        until("the other runtime is woken by a release", async || {
            let held = claim("other", SECOND);
            if let Ok(Acquired::Granted(_)) = store.lease_acquire(&held).await {
                drop(store.lease_release(&held.key, held.token, Duration::ZERO).await);
            }
            freed.is_finished()
        })
        .await;
    });
    waiting.abort();
    drop(idle.block_on(looking).unwrap());
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_gets_them_again() {
    let server = Redis::start();
    let store = store(&server).await;
    let mut conn = plain(&server).await;
    for round in 0..2 {
        let key = format!("k{round}");
        let held = claim(&key, 30 * SECOND);
        send::<()>(&mut conn, "SCRIPT FLUSH").await;
        take(&store, &held).await;
        send::<()>(&mut conn, "SCRIPT FLUSH").await;
        let renewed = store.lease_renew(&[Renewal::new(&held.key, held.token, 30 * SECOND)]).await;
        assert_eq!(renewed.unwrap(), [Answer::Done]);
        send::<()>(&mut conn, "SCRIPT FLUSH").await;
        assert_eq!(store.lease_list(&key, 10).await.unwrap().len(), 1);
        send::<()>(&mut conn, "SCRIPT FLUSH").await;
        assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
    }
}

#[tokio::test]
async fn leases_of_two_processes_stay_exclusive_while_the_server_stops_and_dies() {
    let mut server = Redis::start();
    let (oracle, limit) = (Oracle::new(), SECOND / 4);
    let mut workers = Vec::new();
    for _ in 0..3 {
        let store = builder(&server).longest_ttl(SECOND).connect_timeout(SECOND).answer_timeout(limit).connect().await;
        let leases = Leases::builder(store.unwrap()).ttl(SECOND).wait(SECOND * 3).build().unwrap();
        let oracle = oracle.clone();
        workers.push(tokio::spawn(async move {
            loop {
                if let Ok(lease) = leases.lease("k").acquire().await {
                    let held = oracle.hold(&lease);
                    sleep(Duration::from_millis(30)).await;
                    drop(held);
                    drop(lease.release().await);
                }
                sleep(Duration::from_millis(5)).await;
            }
        }));
    }
    for fault in 0..4 {
        sleep(Duration::from_millis(700)).await;
        match fault % 2 {
            0 => {
                server.program.stop();
                sleep(Duration::from_millis(1200)).await;
                server.program.go_on();
            }
            _ => server.program.start_again(),
        }
    }
    sleep(Duration::from_millis(1500)).await;
    for worker in &workers {
        worker.abort();
    }
    let grants = oracle.assert_exclusive();
    println!("{grants} grants across 2 stops and 2 deaths of the server");
    assert!(grants > 10, "{grants} grants");
    let store = builder(&server).longest_ttl(SECOND).connect().await.unwrap();
    until_granted(&store, &claim("k", SECOND)).await;
}

#[tokio::test]
async fn a_full_server_grants_nothing_new_and_does_all_else() {
    const TTL: Duration = Duration::from_secs(30);
    for layout in [Layout::Token, Layout::Redisson] {
        let server = Redis::start();
        let store = declared(builder(&server).layout(layout)).await;
        let (held, briefly, free) = (claim("held", TTL), claim("briefly", TTL), claim("free", TTL));
        for it in [&held, &briefly, &free] {
            take(&store, it).await;
        }
        store.lease_release(&free.key, free.token, Duration::ZERO).await.unwrap();
        let mut conn = plain(&server).await;
        send::<()>(&mut conn, "CONFIG SET maxmemory 1").await;

        let refused = store.lease_acquire(&claim("new", TTL)).await.unwrap_err();
        let source = std::error::Error::source(&refused).expect("what the server says").to_string();
        assert!(source.contains("OOM") && !source.contains("lockkit:names"), "{source}");
        assert_eq!(store.lease_acquire_each(&[claim("new", TTL)]).await.unwrap(), [None]);
        assert!(is_refused(&store, &claim("held", TTL)).await);
        // The second ttl does not prolong it.
        let mut again = held.clone();
        for ttl in [2 * TTL, SECOND] {
            again.ttl = ttl;
            let renewed = store.lease_renew(&[Renewal::new("held", held.token, ttl)]).await;
            assert_eq!(renewed.unwrap(), [Answer::Done], "{ttl:?}");
            take(&store, &again).await;
        }
        let info = store.lease_look(&held.key).await.unwrap().expect("it is held").info;
        assert!(info.expires_in > TTL && info.renewals == 4, "{info:?}");
        assert_eq!(store.lease_list("", 10).await.unwrap().len(), 2);
        // The keys in use come first.
        sleep(Duration::from_millis(20)).await;
        assert_eq!(store.lease_sweep(Duration::from_millis(1), 10).await.unwrap(), 1, "`free`");
        assert_eq!(store.lease_release(&briefly.key, briefly.token, TTL).await.unwrap(), Answer::Done);
        assert!(is_refused(&store, &claim("briefly", TTL)).await, "it stays taken for the least holding time");
        assert_eq!(store.lease_release(&briefly.key, briefly.token, TTL).await.unwrap(), Answer::Gone);
        assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);

        send::<()>(&mut conn, "CONFIG SET maxmemory 0").await;
        take(&store, &claim("held", TTL)).await;
    }
}
