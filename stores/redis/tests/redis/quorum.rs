//! Leases in a majority of servers, of which some stop, die, forget, or have another clock.

use std::{
    task::{Context, Waker},
    time::Duration,
};

use lockkit::{
    Error, Fault, LeaseStore, Leases,
    store::{Acquired, Answer, Renewal},
    testing::{Oracle, conformance, drop_at_every_await},
};
use lockkit_redis::{ConnectError, Layout, Quorum, RedisStore, RedisStoreBuilder, Unfit, redis::Client};
use lockkit_store_servers::redis::{Redis, independent};
use tokio::{task::JoinSet, time::Instant, time::sleep};

use crate::support::{PATIENCE, Row, builder, claim, is_refused, plain, send, take, until, until_granted};

const TTL: Duration = Duration::from_secs(30);

/// Time limits for servers that do not answer.
const LIMIT: Duration = Duration::from_secs(1);

fn members(servers: &[Redis], longest_ttl: Duration) -> Vec<RedisStoreBuilder> {
    let terms = |it| builder(it).longest_ttl(longest_ttl).connect_timeout(LIMIT).answer_timeout(LIMIT);
    servers.iter().map(terms).collect()
}

async fn quorum(servers: &[Redis], longest_ttl: Duration) -> Quorum {
    let quorum = Quorum::with(members(servers, longest_ttl)).await.unwrap();
    quorum.declare_new().await.unwrap();
    quorum
}

/// For servers that answer, however busy the machine is.
async fn patient(servers: &[Redis], layout: Layout) -> Quorum {
    let terms = |it| builder(it).layout(layout).longest_ttl(Duration::from_hours(1));
    let quorum = Quorum::with(servers.iter().map(terms)).await.unwrap();
    quorum.declare_new().await.unwrap();
    quorum
}

/// How many servers have the lock.
async fn locked(servers: &[Redis], key: &str) -> usize {
    let mut locked = 0;
    for server in servers {
        locked += send::<usize>(&mut plain(server).await, &format!("EXISTS {key}")).await;
    }
    locked
}

#[tokio::test]
async fn a_quorum_of_three_keeps_all_promises() {
    let servers = independent(3);
    let quorum = patient(&servers, Layout::Token).await;
    conformance::run(async || quorum.clone()).await;
}

#[tokio::test]
async fn a_quorum_keeps_all_promises_in_the_layout_of_redisson() {
    let servers = independent(3);
    let quorum = patient(&servers, Layout::Redisson).await;
    conformance::run(async || quorum.clone()).await;
}

#[tokio::test]
async fn a_quorum_of_five_keeps_all_promises() {
    let servers = independent(5);
    let quorum = patient(&servers, Layout::Token).await;
    conformance::run(async || quorum.clone()).await;
}

#[tokio::test]
async fn a_lease_that_expired_before_it_was_granted_is_held_by_nobody() {
    let servers = independent(3);
    let quorum = patient(&servers, Layout::Token).await;
    // A server that does one round of requests between two long scripts is mostly too late with the second round of a
    // claim.
    let mut busy = JoinSet::new();
    for server in servers.iter().chain(&servers) {
        let mut conn = plain(server).await;
        busy.spawn(async move {
            loop {
                send::<()>(&mut conn, "EVAL for\ti=1,8e6\tdo\tend 0").await;
            }
        });
    }
    let (mut number, mut late) = (0, 0);
    while late < 4 {
        number += 1;
        match quorum.lease_acquire(&claim(&number.to_string(), Duration::from_millis(50))).await {
            Ok(Acquired::Granted(_)) => {}
            Err(Error::Database { fault: Fault::Unavailable, .. }) => late += 1,
            other => panic!("{number}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn without_two_of_five_it_goes_on_and_without_three_it_takes_nothing() {
    let mut servers = independent(5);
    let quorum = quorum(&servers, TTL).await;
    servers[0].program.stop();
    servers[1].program.kill();
    let held = claim("k", TTL);
    let fence = take(&quorum, &held).await.fence;
    let began = Instant::now();
    assert_eq!(quorum.lease_renew(&[Renewal::new("k", held.token, TTL)]).await.unwrap(), [Answer::Done]);
    assert_eq!(quorum.lease_look(&held.key).await.unwrap().expect("it is held").info.fence, fence);
    assert!(is_refused(&quorum, &claim("k", TTL)).await);
    assert!(began.elapsed() < PATIENCE);

    servers[2].program.stop();
    assert!(quorum.lease_acquire(&claim("other", TTL)).await.is_err());
    assert!(quorum.lease_renew(&[Renewal::new("k", held.token, TTL)]).await.is_err());
    assert!(quorum.lease_look(&held.key).await.is_err());
    assert_eq!(locked(&servers[3..], "other").await, 0);

    // The servers that could not answer receive the release when they can.
    servers[0].program.go_on();
    servers[2].program.go_on();
    servers[1].program.start_again();
    until("no server has the refused lock", async || locked(&servers, "other").await == 0).await;
    until("it is renewed", async || {
        let renewed = quorum.lease_renew(&[Renewal::new("k", held.token, TTL)]).await;
        renewed.is_ok_and(|it| it == [Answer::Done])
    })
    .await;
    assert_eq!(quorum.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
    assert!(take(&quorum, &claim("k", TTL)).await.fence > fence);
}

#[tokio::test]
async fn it_starts_without_a_minority_and_not_without_a_majority() {
    let mut servers = independent(3);
    servers[0].program.stop();
    let quorum = Quorum::with(members(&servers, TTL)).await.unwrap();
    assert!(is_refused(&quorum, &claim("k", TTL)).await, "no server is declared new");
    servers[1].program.kill();
    let refused = Quorum::with(members(&servers, TTL)).await.unwrap_err();
    assert!(matches!(refused, ConnectError::Unreachable { .. }), "{refused}");
    servers[1].program.start_again();
    send::<()>(&mut plain(&servers[1]).await, "CONFIG SET maxmemory-policy allkeys-lru maxmemory 100mb").await;
    let refused = Quorum::with(members(&servers, TTL)).await.unwrap_err();
    assert!(matches!(refused, ConnectError::Unfit(Unfit::Evicts { .. })), "{refused}");
    for wrong in [members(&servers[..2], TTL), members(&servers[..1], TTL), {
        let mut differ = members(&servers, TTL);
        differ[0] = builder(&servers[0]).longest_ttl(TTL * 2);
        differ
    }] {
        let refused = Quorum::with(wrong).await.unwrap_err();
        assert!(matches!(refused, ConnectError::InvalidOption { option: "servers", .. }), "{refused}");
    }
}

#[tokio::test]
async fn a_server_counts_once() {
    let servers = independent(2);
    let other_database = RedisStore::builder(Client::open(format!("{}1", servers[1].url())).unwrap());
    for again in [builder(&servers[1]), other_database.connect_timeout(PATIENCE).answer_timeout(PATIENCE)] {
        let refused = Quorum::with([builder(&servers[0]), builder(&servers[1]), again]).await.unwrap_err();
        assert!(refused.to_string().contains("twice"), "{refused}");
    }
}

#[tokio::test]
async fn two_of_three_holders_that_forget_do_not_let_a_rival_in() {
    let ttl = Duration::from_millis(1500);
    for with_quarantine in [true, false] {
        let mut servers = independent(5);
        let connect = async || {
            let members = members(&servers, ttl);
            let members = members.into_iter().map(|it| if with_quarantine { it } else { it.without_quarantine() });
            Quorum::with(members).await.unwrap()
        };
        let (holder, rival) = (connect().await, connect().await);
        holder.declare_new().await.unwrap();
        // Three servers grant it.
        servers[3].program.stop();
        servers[4].program.stop();
        let (first, sent) = (claim("k", ttl), Instant::now());
        let fence = take(&holder, &first).await.fence;
        servers[0].program.start_again();
        servers[1].program.start_again();
        servers[3].program.go_on();
        servers[4].program.go_on();
        // The claim that the stopped servers had received counts, so it is removed.
        for server in &servers[3..] {
            send::<i64>(&mut plain(server).await, "DEL k").await;
        }
        let (grant, _) = until_granted(&rival, &claim("k", ttl)).await;
        let after = sent.elapsed();
        println!("quarantine: {with_quarantine}; rival granted after {after:?} of {ttl:?}");
        assert!(after >= ttl || !with_quarantine, "granted after {after:?}");
        assert!(grant.fence > fence);
    }
}

#[tokio::test]
async fn fences_rise_though_one_clock_is_ahead_and_majorities_change() {
    const AHEAD: u64 = 60_000_000;
    let servers = independent(5);
    let store = quorum(&servers, TTL).await;
    // The first server gives fences of a clock that is a minute ahead.
    let ahead = async |key: &str| {
        let clock: Vec<u64> = send(&mut plain(&servers[0]).await, "TIME").await;
        let last = clock[0] * 1_000_000 + clock[1] + AHEAD;
        Row::released(last, 0).put(&mut plain(&servers[0]).await, key).await;
    };
    let mut grants = 0;
    for round in 0..8 {
        let key = format!("k{round}");
        ahead(&key).await;
        let mut last = 0;
        for without in [[3, 4], [0, 1], [2, 3], [0, 4]] {
            // The others hold it for another claim, so each grant has another majority.
            for at in without {
                send::<()>(&mut plain(&servers[at]).await, &format!("SET {key} other")).await;
            }
            let held = claim(&key, TTL);
            let grant = take(&store, &held).await;
            assert!(grant.fence.get() > last, "{} after {last}", grant.fence);
            last = grant.fence.get() + grant.spare_fences;
            grants += 1;
            assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
            for at in without {
                send::<i64>(&mut plain(&servers[at]).await, &format!("DEL {key}")).await;
            }
        }
    }
    println!("quorum of 5, one clock 60 s ahead: {grants} grants by changing majorities, 0 fences fell");
}

#[tokio::test]
async fn a_renewal_is_gone_only_if_no_majority_can_hold_it() {
    let servers = independent(5);
    let store = quorum(&servers, TTL).await;
    let held = claim("k", TTL);
    take(&store, &held).await;
    until("all servers have it", async || locked(&servers, "k").await == 5).await;
    let renew = async || store.lease_renew(&[Renewal::new("k", held.token, TTL)]).await;
    let forget = async |at: usize| send::<i64>(&mut plain(&servers[at]).await, "DEL k").await;
    forget(0).await;
    forget(1).await;
    assert_eq!(renew().await.unwrap(), [Answer::Done], "three of five hold it");
    servers[4].program.stop();
    assert_eq!(renew().await.unwrap(), [Answer::Busy], "the fifth may hold it");
    servers[3].program.stop();
    assert_eq!(renew().await.unwrap(), [Answer::Busy], "the fourth and the fifth may hold it");
    servers[2].program.stop();
    assert!(renew().await.is_err());
    for server in &servers[2..] {
        server.program.go_on();
    }
    forget(2).await;
    until("a majority says so", async || renew().await.is_ok_and(|it| it == [Answer::Gone])).await;
}

#[tokio::test]
async fn a_stopped_server_delays_the_answers_of_a_majority_for_a_moment_only() {
    let servers = independent(3);
    let terms = |it| builder(it).longest_ttl(TTL).answer_timeout(PATIENCE / 2);
    let store = Quorum::with(servers.iter().map(terms)).await.unwrap();
    store.declare_new().await.unwrap();
    let held = [claim("a", TTL), claim("b", TTL)];
    store.lease_acquire_all(&held).await.unwrap();
    until("all servers have it", async || locked(&servers, "b").await == 3).await;
    send::<i64>(&mut plain(&servers[0]).await, "DEL b").await;
    servers[2].program.stop();
    let began = Instant::now();
    let renewals = held.clone().map(|it| Renewal::new(it.key, it.token, TTL));
    assert_eq!(store.lease_renew(&renewals).await.unwrap(), [Answer::Done, Answer::Busy]);
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
}

#[tokio::test]
async fn what_needs_a_list_is_refused() {
    let servers = independent(3);
    let leases = Leases::builder(quorum(&servers, TTL).await).ttl(TTL).build().unwrap();
    let refused = [
        leases.any(["k", "l"]).acquire().await.err(),
        leases.semaphore("k", 2).acquire().await.err(),
        leases.rw("k").read().acquire().await.err(),
        leases.rw("k").write().acquire().await.err(),
        leases.lease("k").fair().acquire().await.err(),
    ];
    for (refused, expected) in refused.into_iter().zip(["any", "semaphore", "rw", "rw", "fair"]) {
        let Some(Error::InvalidOption { option, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(option, expected);
    }
    assert_eq!(leases.store().profile().fence_domain, "redis-quorum");
    leases.all(["a", "b"]).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn waiting_processes_exclude_each_other_while_servers_stop_and_die() {
    let ttl = Duration::from_secs(1);
    let mut servers = independent(3);
    let oracle = Oracle::new();
    quorum(&servers, ttl).await;
    let mut workers = Vec::new();
    for _ in 0..3 {
        let store = Quorum::with(members(&servers, ttl)).await.unwrap();
        let leases = Leases::builder(store).ttl(ttl).wait(PATIENCE).build().unwrap();
        let oracle = oracle.clone();
        workers.push(tokio::spawn(async move {
            loop {
                if let Ok(lease) = leases.lease("k").acquire().await {
                    let held = oracle.hold(&lease);
                    sleep(Duration::from_millis(20)).await;
                    drop(held);
                    drop(lease.release().await);
                }
            }
        }));
    }
    for round in 0..4 {
        sleep(Duration::from_millis(700)).await;
        let server = &mut servers[round % 3];
        if round % 2 == 0 {
            server.program.stop();
            sleep(Duration::from_millis(700)).await;
            server.program.go_on();
        } else {
            server.program.start_again();
        }
    }
    for worker in &workers {
        worker.abort();
    }
    let grants = oracle.assert_exclusive();
    println!("quorum of 3: {grants} grants while one server after the other stopped or forgot");
    assert!(grants > 10, "{grants}");
}

#[tokio::test]
async fn many_that_ask_at_once_are_all_served() {
    let servers = independent(3);
    let oracle = Oracle::new();
    quorum(&servers, TTL).await;
    let mut working = JoinSet::new();
    for _ in 0..4 {
        let store = Quorum::with(members(&servers, TTL)).await.unwrap();
        let leases = Leases::builder(store).ttl(TTL).wait(PATIENCE).build().unwrap();
        let oracle = oracle.clone();
        working.spawn(async move {
            for _ in 0..5 {
                let lease = leases.lease("k").acquire().await.unwrap();
                drop(oracle.hold(&lease));
                lease.release().await.unwrap();
            }
        });
    }
    working.join_all().await;
    assert_eq!(oracle.assert_exclusive(), 20);
}

#[tokio::test]
async fn a_dropped_request_leaves_no_lease() {
    let servers = independent(3);
    let store = quorum(&servers, TTL).await;
    let leases = Leases::builder(store.clone()).ttl(TTL).build().unwrap();
    let acquire_and_release = || async { leases.lease("k").acquire().await.unwrap().release().await.unwrap() };
    let drops = drop_at_every_await(acquire_and_release)
        .blocked_after(PATIENCE)
        .then(async |_| {
            until("no server has the lock", async || locked(&servers, "k").await == 0).await;
        })
        .await;
    assert!(drops.completed && drops.points > 3, "{drops:?}");
}

#[tokio::test]
async fn a_refused_request_gives_back_what_it_took() {
    const LONG: Duration = Duration::from_hours(1);
    let servers = independent(3);
    let quorum = quorum(&servers, LONG).await;
    for server in &servers[..2] {
        send::<()>(&mut plain(server).await, "SET k other PX 3600000").await;
    }
    assert!(is_refused(&quorum, &claim("k", LONG)).await);
    until("the third server is free", async || locked(&servers[2..], "k").await == 0).await;
}

#[tokio::test]
async fn a_release_wakes_the_waiters() {
    let servers = independent(3);
    let (here, there) = (quorum(&servers, TTL).await, Quorum::with(members(&servers, TTL)).await.unwrap());
    let held = claim("k", TTL);
    take(&here, &held).await;
    // The first is woken by the beginning of the subscriptions.
    there.lease_freed(&held.key).await;
    let mut freed = Box::pin(async move { there.lease_freed(&"k".into()).await });
    assert!(freed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "nothing was released");
    let waiting = tokio::spawn(freed);
    here.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    tokio::time::timeout(PATIENCE, waiting).await.expect("it is woken").unwrap();
    assert!(matches!(here.lease_acquire(&held).await.unwrap(), Acquired::Granted(_)));
}
