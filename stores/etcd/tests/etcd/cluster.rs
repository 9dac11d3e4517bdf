//! Three members: the leader dies, the quorum is lost, a member is stopped.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit::{Leases, testing::Oracle};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::sleep;

use crate::server::{PATIENCE, store_at, until};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

/// When leases were granted.
#[derive(Clone, Default)]
struct Grants(Arc<Mutex<Vec<Instant>>>);

impl Grants {
    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The longest time without a grant since then.
    fn longest_pause(&self, since: Instant) -> Duration {
        let grants = self.0.lock().unwrap();
        let times: Vec<_> = [since].into_iter().chain(grants.iter().copied().filter(|it| *it > since)).collect();
        times.windows(2).map(|it| it[1] - it[0]).max().unwrap_or_default()
    }

    /// Waits until there are so many more.
    async fn more(&self, more: usize) {
        let before = self.count();
        until("leases are granted", async || self.count() >= before + more).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exclusion_outlives_every_member() {
    let mut cluster = Etcd::cluster(3);
    let (oracle, grants, is_over) = (Oracle::new(), Grants::default(), Arc::new(AtomicBool::new(false)));
    let endpoints = cluster.endpoints();
    let mut workers = Vec::new();
    let mut keepers = Vec::new();
    for number in 0..4_usize {
        // Each process has another member first.
        let mut endpoints = endpoints.clone();
        endpoints.rotate_left(number % 3);
        let store = store_at(endpoints).await;
        let leases = Leases::builder(oracle.watch(store)).ttl(SECONDS(4)).wait(PATIENCE).build().unwrap();
        for key in ["a", "b"] {
            let (leases, grants, is_over) = (leases.clone(), grants.clone(), is_over.clone());
            workers.push(tokio::spawn(async move {
                let mut errors = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let lease = match leases.lease(key).acquire().await {
                        Ok(lease) => lease,
                        Err(err) => {
                            println!("{err:?}");
                            errors += 1;
                            continue;
                        }
                    };
                    grants.0.lock().unwrap().push(Instant::now());
                    sleep(Duration::from_millis(2)).await;
                    drop(lease.release().await);
                }
                errors
            }));
        }
        keepers.push(leases.lease(format!("kept/{number}")).ttl(SECONDS(20)).acquire().await.unwrap());
    }
    grants.more(50).await;

    let leader = cluster.leader().expect("a leader");
    let fault = Instant::now();
    cluster.members[leader].kill();
    grants.more(50).await;
    println!("leader killed: longest pause {:?}", grants.longest_pause(fault));
    cluster.members[leader].start_again();
    grants.more(50).await;

    let fault = Instant::now();
    cluster.members[0].kill();
    cluster.members[1].kill();
    sleep(SECONDS(2)).await;
    let before = grants.count();
    sleep(Duration::from_millis(500)).await;
    assert_eq!(grants.count(), before, "nothing is granted without a quorum");
    cluster.members[0].start_again();
    cluster.members[1].start_again();
    grants.more(50).await;
    println!("quorum lost for 2.5 s: longest pause {:?}", grants.longest_pause(fault));

    let follower = (0..3).find(|it| Some(*it) != cluster.leader()).expect("a follower");
    let fault = Instant::now();
    cluster.members[follower].stop();
    grants.more(100).await;
    println!("follower stopped: longest pause {:?}", grants.longest_pause(fault));
    cluster.members[follower].go_on();
    grants.more(50).await;

    is_over.store(true, Ordering::Relaxed);
    let mut errors = 0;
    for worker in workers {
        errors += worker.await.unwrap();
    }
    let survived = keepers.iter().filter(|it| it.is_trusted()).count();
    let recorded = oracle.assert_exclusive();
    println!(
        "{} acquisitions, 0 violations, {recorded} recorded, {errors} errors, {survived} of 4 kept",
        grants.count()
    );
    assert_eq!(survived, 4, "held leases survive");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tmp_stopped_leader() {
    let cluster = Etcd::cluster(3);
    for round in 0..3 {
        let leader = cluster.leader().unwrap();
        let mut endpoints = cluster.endpoints();
        endpoints.rotate_left(leader);
        let (oracle, mut kept) = (Oracle::new(), Vec::new());
        for number in 0..3 {
            let leases = Leases::builder(oracle.watch(store_at(&endpoints).await)).ttl(SECONDS(5)).build().unwrap();
            kept.push((leases.lease(format!("k{round}/{number}")).acquire().await.unwrap(), leases));
        }
        let fault = Instant::now();
        cluster.members[leader].stop();
        sleep(SECONDS(10)).await;
        println!(
            "stopped leader {leader}: after 10 s {} of 3 kept, leader {:?}",
            kept.iter().filter(|it| it.0.is_trusted()).count(),
            cluster.leader()
        );
        cluster.members[leader].go_on();
        for _ in 0..10 {
            sleep(Duration::from_millis(300)).await;
            let mut shown = 0;
            for (lease, leases) in &kept {
                shown += u32::from(leases.show(lease.key().as_str()).await.unwrap().is_some());
            }
            println!(
                "{:?} trusted {} there {shown}",
                fault.elapsed(),
                kept.iter().filter(|it| it.0.is_trusted()).count()
            );
        }
    }
}
