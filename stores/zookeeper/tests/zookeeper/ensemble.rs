//! Three servers: leaders that die and stop, a lost quorum, and a follower that dies with what it has not reported.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit::{
    LeaseStore, Leases,
    store::{Acquired, Answer, Claim, Renewal, Token},
    testing::Oracle,
};
use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{Layout, ZooKeeperStore};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::support::{store_on, within};

const SESSION: Duration = Duration::from_secs(3);

/// Keys that tasks of several sessions take in turns.
const KEYS: [&str; 2] = ["a", "b"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_exclude_each_other_while_leaders_die_and_a_quorum_is_lost() {
    let mut servers = ZooKeeper::ensemble(3);
    let hosts: Vec<_> = servers.iter().map(ZooKeeper::host).collect();
    let hosts = hosts.join(",");
    let oracle = Oracle::new();
    let stores = [connect(&hosts).await, connect(&hosts).await, connect(&hosts).await];
    let load = Load::start(&stores, &oracle);

    // Held all the time by other sessions: do they survive?
    let held_by = Leases::new(connect(&hosts).await);
    let mut survivors = Vec::new();
    let held = |number: u32| held_by.lease(format!("held/{number}")).wait(SESSION * 10).acquire();

    for (fault, number) in ["leader killed", "leader stopped"].into_iter().zip(0..) {
        load.grants(20).await;
        let lease = held(number).await.expect("it is free");
        let leader = servers.iter().position(ZooKeeper::is_leader).expect("a leader");
        let follower = connect(&servers[(leader + 1) % servers.len()].host()).await;
        let renewed = Claim::new(fault, Token::random(), "holder", SESSION);
        follower.lease_acquire(&renewed).await.expect("an answer");
        // Answered after the note in the node of the key, which the claim does not wait for.
        follower.lease_look(&renewed.key).await.expect("an answer");
        let began = load.begin();
        if fault == "leader killed" {
            servers[leader].program.kill();
        } else {
            servers[leader].program.stop();
            a_follower_without_its_leader_renews_nothing(&follower, &renewed).await;
        }
        load.grants(20).await;
        eprintln!(
            "{fault}: no grant for {:?} at most; the held lease survived: {}",
            load.longest(began),
            lease.is_trusted()
        );
        survivors.push((fault, lease.is_trusted()));
        if fault == "leader killed" {
            servers[leader].program.start_again();
        } else {
            servers[leader].program.go_on();
        }
        servers[leader].wait_until_it_serves();
        drop(lease);
    }

    // Two of three die: nothing is granted, nothing is trusted for longer than a session. Then they come back.
    load.grants(20).await;
    let lease = held(10).await.expect("it is free");
    let began = load.begin();
    servers[0].program.kill();
    servers[1].program.kill();
    let killed = std::time::Instant::now();
    within(lease.lost()).await;
    let trusted = held_by.store().trusted_for().unwrap_or(SESSION);
    assert!(lease.trusted_until() <= killed + trusted, "it was renewed without a quorum");
    servers[0].program.start_again();
    servers[1].program.start_again();
    load.grants(20).await;
    eprintln!(
        "quorum lost until the held lease was, and two servers started: no grant for {:?} at most",
        load.longest(began)
    );

    let acquisitions = load.stop().await;
    let grants = oracle.assert_exclusive();
    eprintln!("{acquisitions} acquisitions, {grants} grants, 0 violations; held leases: {survivors:?}");
    assert!(acquisitions >= 100, "{acquisitions}");

    a_follower_dies_right_after_a_renewal(&mut servers).await;
}

/// The follower does not know yet that its leader has stopped, and answers what it knows.
async fn a_follower_without_its_leader_renews_nothing(follower: &ZooKeeperStore, claim: &Claim) {
    let soon = Duration::from_millis(300);
    let read = timeout(soon, follower.lease_look(&claim.key)).await.expect("it answers reads");
    assert_eq!(read.expect("an answer").map(|it| it.token), Some(claim.token));
    let renewal = Renewal::new(claim.key.clone(), claim.token, SESSION);
    let renewed = timeout(soon, follower.lease_renew(&[renewal])).await;
    assert!(!matches!(renewed, Ok(Ok(_))), "{renewed:?}");
}

/// The lease must live for as long as it was trusted, though the leader has not received the renewal.
async fn a_follower_dies_right_after_a_renewal(servers: &mut [ZooKeeper]) {
    let mut least = Duration::MAX;
    for round in 0..2 {
        servers.iter().for_each(ZooKeeper::wait_until_it_serves);
        let follower = servers.iter().position(|it| !it.is_leader()).expect("a follower");
        let witness = servers.iter().position(ZooKeeper::is_leader).expect("a leader");
        let cut_off = connect(&servers[follower].host()).await;
        let other = connect(&servers[witness].host()).await;
        let claim = Claim::new(format!("cut off {round}"), Token::random(), "holder", SESSION * 100);
        let granted = cut_off.lease_acquire(&claim).await.expect("an answer");
        let Acquired::Granted(grant) = granted else { panic!("{granted:?}") };
        let trusted = grant.ttl.expect("a session");
        // In the middle of the pauses between two signs of life.
        sleep(SESSION / 2 + Duration::from_millis(70 * round)).await;
        let renewed = Instant::now();
        let renewal = Renewal::new(claim.key.clone(), claim.token, trusted);
        assert_eq!(cut_off.lease_renew(&[renewal]).await.expect("an answer"), [Answer::Done]);
        servers[follower].program.kill();
        while within(other.lease_look(&claim.key)).await.expect("an answer").is_some() {
            sleep(Duration::from_millis(10)).await;
        }
        let lived = renewed.elapsed();
        assert!(lived >= trusted, "it lived for {lived:?} and was trusted for {trusted:?}");
        least = least.min(lived);
        servers[follower].program.start_again();
    }
    eprintln!(
        "a follower died right after a renewal: the lease lived for {least:?} at least, the session is {SESSION:?}"
    );
}

async fn connect(hosts: &str) -> ZooKeeperStore {
    within(store_on(hosts, "/locks", SESSION, Layout::Curator)).await
}

/// Tasks that take leases all the time.
struct Load {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
    acquisitions: Arc<AtomicU64>,
    times: Arc<Mutex<Vec<Instant>>>,
}

impl Load {
    fn start(stores: &[ZooKeeperStore], oracle: &Oracle) -> Self {
        let (stop, acquisitions, times) = (Arc::default(), Arc::default(), Arc::default());
        let mut load = Self { tasks: JoinSet::new(), stop, acquisitions, times };
        for (number, store) in stores.iter().enumerate() {
            for task in 0..4 {
                let leases = Leases::builder(oracle.watch(store.clone())).ttl(SESSION).build().expect("valid settings");
                let key = KEYS[(number + task) % KEYS.len()];
                let (stop, count, times) = (load.stop.clone(), load.acquisitions.clone(), load.times.clone());
                load.tasks.spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let Ok(lease) = leases.lease(key).wait(SESSION).acquire().await else { continue };
                        count.fetch_add(1, Ordering::Relaxed);
                        times.lock().expect("no panic").push(Instant::now());
                        sleep(Duration::from_millis(5)).await;
                        // It may be lost.
                        drop(lease.release().await);
                    }
                });
            }
        }
        load
    }

    /// Waits until there were so many acquisitions more.
    async fn grants(&self, more: u64) {
        let until = self.acquisitions.load(Ordering::Relaxed) + more;
        within(async {
            while self.acquisitions.load(Ordering::Relaxed) < until {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }

    /// Forgets the times of the acquisitions so far.
    fn begin(&self) -> Instant {
        self.times.lock().expect("no panic").clear();
        Instant::now()
    }

    /// The longest time without an acquisition since then.
    fn longest(&self, mut last: Instant) -> Duration {
        let times = self.times.lock().expect("no panic").clone();
        let mut longest = Duration::ZERO;
        for time in times {
            longest = longest.max(time - last);
            last = time;
        }
        longest
    }

    async fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        within(async { while self.tasks.join_next().await.is_some_and(|it| it.is_ok()) {} }).await;
        self.acquisitions.load(Ordering::Relaxed)
    }
}
