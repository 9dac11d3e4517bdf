//! A replica takes over: leases that it never received have one holder all the same.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::{
    Error, Fault,
    store::{Answer, LeaseStore, Renewal},
};
use lockkit_redis::{RedisStore, RedisStoreBuilder};
use lockkit_store_servers::redis::{Redis, Sentinels};
use redis::sentinel::{SentinelClient, SentinelServerType};
use tokio::time::{Instant, sleep};

use crate::support::{builder, claim, declared, is_refused, plain, send, take, until, until_granted};

async fn follows(replica: &Redis) {
    let mut conn = plain(replica).await;
    until("the replica follows", async || {
        send::<String>(&mut conn, "INFO replication").await.contains("master_link_status:up")
    })
    .await;
}

/// A master with a replica, watched by Sentinels that know both.
async fn watched() -> (Redis, Redis, Sentinels) {
    let master = Redis::start();
    let replica = master.replica();
    follows(&replica).await;
    let sentinels = Sentinels::start(&master);
    for sentinel in &sentinels.programs {
        let client = redis(sentinel.port);
        let mut conn = client.get_multiplexed_async_connection().await.unwrap();
        until("a Sentinel knows the replica and the other Sentinels", async || {
            let info: String = send(&mut conn, "INFO sentinel").await;
            info.contains("slaves=1,sentinels=3")
        })
        .await;
    }
    (master, replica, sentinels)
}

fn redis(port: u16) -> redis::Client {
    redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap()
}

fn by_sentinel(sentinels: &Sentinels) -> RedisStoreBuilder {
    let urls: Vec<_> = sentinels.programs.iter().map(|it| format!("redis://127.0.0.1:{}/", it.port)).collect();
    let name = Sentinels::MASTER.to_owned();
    RedisStore::builder(SentinelClient::build(urls, name, None, SentinelServerType::Master).unwrap())
}

/// The replica receives nothing of what follows, until the master is dead.
async fn cut_off(master: &Redis, replica: &Redis) {
    replica.program.stop();
    send::<i64>(&mut plain(master).await, "CLIENT KILL TYPE replica").await;
}

#[tokio::test]
async fn a_replica_that_lagged_behind_grants_no_lease_twice() {
    const TTL: Duration = Duration::from_secs(4);
    let (mut master, replica, sentinels) = watched().await;
    let holder = declared(by_sentinel(&sentinels).longest_ttl(TTL)).await;
    let rival = by_sentinel(&sentinels).longest_ttl(TTL).connect().await.unwrap();
    cut_off(&master, &replica).await;
    let (first, sent) = (claim("k", TTL), Instant::now());
    let fence = take(&holder, &first).await.fence;
    master.program.kill();
    replica.program.go_on();
    let (grant, _) = until_granted(&rival, &claim("k", TTL)).await;
    println!("lagging replica promoted: rival granted after {:?}, ttl {TTL:?}", sent.elapsed());
    assert!(sent.elapsed() >= TTL, "granted {:?} after the forgotten grant", sent.elapsed());
    assert!(grant.fence.get() > fence.get() + 127);
    assert_eq!(holder.lease_renew(&[Renewal::new("k", first.token, TTL)]).await.unwrap(), [Answer::Gone]);
}

#[tokio::test]
async fn a_planned_failover_lets_no_two_masters_grant_whatever_the_ttl() {
    const TTL: Duration = Duration::from_secs(2);
    let (master, replica, sentinels) = watched().await;
    let holder = declared(by_sentinel(&sentinels).longest_ttl(TTL)).await;
    let first = claim("k", TTL);
    take(&holder, &first).await;
    // The old master does not know of its successor for some seconds.
    let renewed = Arc::new(Mutex::new(Instant::now()));
    let renewing = tokio::spawn({
        let renewed = renewed.clone();
        async move {
            loop {
                let sent = Instant::now();
                let answer = holder.lease_renew(&[Renewal::new("k", first.token, TTL)]).await;
                if answer.is_ok_and(|it| it == [Answer::Done]) {
                    *renewed.lock().unwrap() = sent;
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let mut sentinel = redis(sentinels.programs[0].port).get_multiplexed_async_connection().await.unwrap();
    until("Sentinel begins the failover", async || {
        let begun: Result<(), _> =
            redis::cmd("SENTINEL").arg("FAILOVER").arg(Sentinels::MASTER).query_async(&mut sentinel).await;
        begun.is_ok()
    })
    .await;
    // Sentinel closes the connections of clients.
    until("the replica is the master", async || {
        let Ok(mut conn) = redis(replica.program.port).get_multiplexed_async_connection().await else { return false };
        let info: Result<String, _> = redis::cmd("INFO").arg("replication").query_async(&mut conn).await;
        info.is_ok_and(|it| it.contains("role:master"))
    })
    .await;
    let promoted = Instant::now();
    until("all Sentinels name it", async || {
        for program in &sentinels.programs {
            let mut conn = redis(program.port).get_multiplexed_async_connection().await.unwrap();
            let (_, port): (String, u16) =
                send(&mut conn, &format!("SENTINEL GET-MASTER-ADDR-BY-NAME {}", Sentinels::MASTER)).await;
            if port != replica.program.port {
                return false;
            }
        }
        true
    })
    .await;
    let rival = by_sentinel(&sentinels).longest_ttl(TTL).connect().await.unwrap();
    until_granted(&rival, &claim("k", TTL)).await;
    let granted = Instant::now();
    // A renewal that was sent before the grant may still be answered.
    sleep(TTL / 2).await;
    renewing.abort();
    let renewed = *renewed.lock().unwrap();
    let (went_on, free) = (renewed.saturating_duration_since(promoted), granted.saturating_duration_since(renewed));
    println!("planned failover: the old master renewed for {went_on:?}, rival granted {free:?} later, ttl {TTL:?}");
    assert!(renewed > promoted, "the old master renewed nothing after the promotion, so nothing was tested");
    assert!(granted >= renewed + TTL, "granted {free:?} after the last renewal, ttl {TTL:?}");
    drop(master);
}

#[tokio::test]
async fn behind_sentinel_a_quarantine_that_is_shorter_than_a_failover_is_refused() {
    let sentinel = || {
        // With TLS the client takes any text, and a `String` without.
        let (urls, master) = (vec!["redis://127.0.0.1:1/"], Sentinels::MASTER.to_owned());
        SentinelClient::build(urls, master, None, SentinelServerType::Master).unwrap()
    };
    let settings = || RedisStore::builder(sentinel()).longest_ttl(Duration::from_secs(2));
    let refused = settings().quarantine(Duration::from_secs(21)).connect().await.unwrap_err();
    let lockkit_redis::ConnectError::InvalidOption { option, reason, .. } = &refused else { panic!("{refused:?}") };
    assert!(*option == "quarantine" && reason.contains("Sentinel") && reason.contains("22s"), "{reason}");
    for fits in [settings(), settings().quarantine(Duration::from_secs(22)), settings().without_quarantine()] {
        let refused = fits.connect().await.unwrap_err();
        assert!(matches!(refused, lockkit_redis::ConnectError::Unreachable { .. }), "{refused:?}");
    }
}

#[tokio::test]
async fn without_quarantine_it_does() {
    const TTL: Duration = Duration::from_mins(1);
    let (mut master, replica, sentinels) = watched().await;
    let store = by_sentinel(&sentinels).without_quarantine().connect().await.unwrap();
    cut_off(&master, &replica).await;
    take(&store, &claim("k", TTL)).await;
    master.program.kill();
    replica.program.go_on();
    let (_, after) = until_granted(&store, &claim("k", TTL)).await;
    println!("lagging replica promoted, no quarantine: rival granted after {after:?}, ttl {TTL:?}");
}

#[tokio::test]
async fn a_master_that_is_cut_off_stops_renewing_before_the_quarantine_of_its_successor_ends() {
    const TTL: Duration = Duration::from_secs(1);
    // Redis counts the lag in whole seconds, and looks at it once a second.
    const LAG: Duration = Duration::from_secs(3);
    let master = Redis::with(&["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]);
    let (replica, silent) = (master.replica(), master.replica());
    follows(&replica).await;
    follows(&silent).await;
    let store = async |server| builder(server).longest_ttl(TTL).quarantine(TTL + LAG).connect().await.unwrap();
    let holder = store(&master).await;
    until("the master has its replicas", async || holder.declare_new().await.is_ok()).await;
    let first = claim("k", TTL);
    until_granted(&holder, &first).await;

    // One replica is promoted. The other one has just answered for the last time, and still counts.
    silent.program.stop();
    send::<()>(&mut plain(&replica).await, "REPLICAOF NO ONE").await;
    let promoted = Instant::now();
    let rival = store(&replica).await;
    let granting = tokio::spawn(async move {
        until_granted(&rival, &claim("k", TTL)).await;
        Instant::now()
    });
    let (mut renewed, mut refused) = (Instant::now(), 0);
    while !granting.is_finished() {
        let sent = Instant::now();
        match holder.lease_renew(&[Renewal::new("k", first.token, TTL)]).await {
            Ok(answers) if answers == [Answer::Done] => renewed = sent,
            _ => refused += 1,
        }
        sleep(Duration::from_millis(20)).await;
    }
    let granted = granting.await.unwrap();
    let (went_on, free) = (renewed.saturating_duration_since(promoted), granted - renewed);
    println!("cut off master: renewed for {went_on:?}, rival granted {free:?} after its last renewal, ttl {TTL:?}");
    assert!(!went_on.is_zero(), "it did not renew after the promotion, so nothing was tested");
    assert!(refused > 0, "the master went on renewing");
    assert!(granted >= renewed + TTL, "granted {:?} after the last renewal", granted - renewed);
}

#[tokio::test]
async fn a_server_that_followed_another_one_for_a_while_has_a_quarantine_though_it_never_ended() {
    const TTL: Duration = Duration::from_mins(1);
    let first = Redis::start();
    let second = first.replica();
    follows(&second).await;
    let store = declared(builder(&first)).await;
    let (mut first_conn, mut second_conn) = (plain(&first).await, plain(&second).await);
    let follow = async |conn: &mut _, of: &Redis| {
        send::<()>(conn, &format!("REPLICAOF 127.0.0.1 {}", of.program.port)).await;
    };
    until("the replica knows the epoch", async || send::<usize>(&mut second_conn, "EXISTS lockkit:epoch").await == 1)
        .await;
    // Its successor never receives the lease, and no process requests one of it.
    send::<()>(&mut second_conn, "REPLICAOF NO ONE").await;
    // So that it takes less time than a check counts.
    send::<()>(&mut second_conn, "CONFIG SET repl-diskless-sync no").await;
    take(&store, &claim("k", TTL)).await;
    follow(&mut first_conn, &second).await;
    follows(&first).await;
    send::<()>(&mut first_conn, "REPLICAOF NO ONE").await;
    assert_eq!(send::<usize>(&mut first_conn, "EXISTS k").await, 0, "it is forgotten");
    let renewal = [Renewal::new("k", lockkit::store::Token::random(), TTL)];
    until("it answers again", async || store.lease_renew(&renewal).await.is_ok()).await;
    assert!(is_refused(&store, &claim("k", TTL)).await, "on a connection that was open all the time");
    let rival = builder(&first).connect().await.unwrap();
    assert!(is_refused(&rival, &claim("k", TTL)).await);
    assert!(rival.quarantined_for().await.unwrap() > TTL / 2);
}

#[tokio::test]
async fn a_master_that_became_a_replica_grants_and_renews_nothing_on_connections_that_stayed_open() {
    const TTL: Duration = Duration::from_mins(1);
    // With `no`, it goes on accepting writes.
    for read_only in ["yes", "no"] {
        let server = Redis::with(&["--replica-read-only", read_only]);
        // One connection for each operation, because the refusal ends it.
        let connect = async || builder(&server).connect().await.unwrap();
        let (holder, rival, reader, operator) = (connect().await, connect().await, connect().await, connect().await);
        let without = builder(&server).without_quarantine().connect().await.unwrap();
        operator.declare_new().await.unwrap();
        let held = claim("k", TTL);
        take(&holder, &held).await;
        // Its master cannot be reached, so it keeps its data.
        send::<()>(&mut plain(&server).await, "REPLICAOF 127.0.0.1 1").await;
        let is_read_only = |it: Option<Error>| matches!(it, Some(Error::Database { fault: Fault::ReadOnly, .. }));
        // The second time on a new connection.
        for time in 1..=2 {
            let renewed = holder.lease_renew(&[Renewal::new("k", held.token, TTL)]).await;
            assert!(is_read_only(renewed.err()), "{read_only}: renewed, {time}");
        }
        assert!(is_read_only(reader.lease_list("", 10).await.err()), "{read_only}: listed");
        assert!(is_read_only(operator.declare_new().await.err()), "{read_only}: declared new");
        if read_only == "no" {
            // So long the check of the last grant counts.
            sleep(Duration::from_secs(1)).await;
        }
        for store in [rival, without] {
            let granted = store.lease_acquire(&claim("other", TTL)).await;
            assert!(is_read_only(granted.err()), "{read_only}: granted by {store:?}");
        }
    }
}

#[tokio::test]
async fn a_replica_does_not_count_as_checked() {
    let master = Redis::start();
    let replica = master.replica();
    follows(&replica).await;
    let store = declared(builder(&master)).await;
    take(&store, &claim("k", Duration::from_mins(1))).await;
    let mut conn = plain(&replica).await;
    until("the replica knows the lease", async || send::<usize>(&mut conn, "EXISTS k").await == 1).await;
    assert_eq!(send::<usize>(&mut conn, "EXISTS lockkit:open").await, 0);
}

#[tokio::test]
async fn a_sentinel_that_does_not_answer_is_passed_over() {
    let (master, _replica, sentinels) = watched().await;
    sentinels.programs[0].stop();
    let store = by_sentinel(&sentinels).without_quarantine().connect().await.unwrap();
    take(&store, &claim("k", Duration::from_secs(1))).await;
    send::<i64>(&mut plain(&master).await, "CLIENT KILL TYPE normal").await;
    until_granted(&store, &claim("other", Duration::from_secs(1))).await;
}

#[tokio::test]
async fn a_replica_is_refused() {
    let master = Redis::start();
    let replica = master.replica();
    let refused = builder(&replica).connect().await.unwrap_err();
    assert!(matches!(refused, lockkit_redis::ConnectError::Unfit(lockkit_redis::Unfit::Replica)), "{refused}");
}
