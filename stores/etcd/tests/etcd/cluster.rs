//! Three members: the leader dies, the quorum is lost, a member is stopped.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit::{Leases, testing::Oracle};
use lockkit_etcd::{EtcdStore, TakeOver, etcd_client::GetOptions};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::{sleep, timeout};

use crate::server::{PATIENCE, client_at, keys, shared, store_at, until};

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

    // Longer than the sessions of the workers live. This leader may then revoke leases that are kept alive.
    let leader = cluster.leader().expect("a leader");
    let fault = Instant::now();
    cluster.members[leader].stop();
    sleep(SECONDS(6)).await;
    cluster.members[leader].go_on();
    grants.more(100).await;
    println!("leader stopped for 6 s: longest pause {:?}", grants.longest_pause(fault));

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

/// Revokes the etcd lease of a holder that keeps it alive, as a leader does that was stopped. With `extended`, the
/// holder has extended its lease to that ttl before. Returns how many holders there were too many.
async fn heirs_of_a_revoked_lease(key: &str, take_over: TakeOver, extended: Option<Duration>) -> usize {
    let oracle = Oracle::new();
    let leases = async || {
        let builder = EtcdStore::builder([shared()]).session_ttl(SECONDS(4)).take_over(take_over);
        let store = builder.connect().await.unwrap();
        Leases::builder(oracle.watch(store)).ttl(SECONDS(3)).wait(PATIENCE).build().unwrap()
    };
    let (holders, heirs, triers) = (leases().await, leases().await, leases().await);
    let lease = holders.lease(key).acquire().await.unwrap();
    if let Some(ttl) = extended {
        until("it is extended", async || lease.extend(ttl).await.is_ok()).await;
    }
    let waiting = tokio::spawn({
        let (heirs, key) = (heirs.clone(), key.to_owned());
        async move { heirs.lease(key).acquire().await.unwrap() }
    });
    let mut client = client_at(shared()).await;
    let path = format!("lockkit/lock/{key}/");
    until("the heir waits", async || keys(&mut client, &*path).await == 2).await;
    let options = GetOptions::new().with_prefix();
    let held = client.get(&*path, Some(options)).await.unwrap();
    let held = held.kvs().iter().min_by_key(|it| it.create_revision()).unwrap().lease();
    client.lease_revoke(held).await.unwrap();
    // A request that only tries is not quicker.
    until("the heir or another has it", async || {
        // A busy machine may not answer in time.
        drop(triers.lease(key).try_acquire().await);
        waiting.is_finished()
    })
    .await;
    drop(waiting.await.unwrap());
    timeout(PATIENCE, lease.lost()).await.expect("the holder learns it");
    oracle.violations().len()
}

#[tokio::test]
async fn a_lease_that_is_revoked_while_it_is_trusted_gets_no_second_holder() {
    let (with, extended, without) = tokio::join!(
        heirs_of_a_revoked_lease("revoked-1", TakeOver::AfterTtl, None),
        // The holder learns it after a third of that, which is longer than the first ttl.
        heirs_of_a_revoked_lease("revoked-2", TakeOver::AfterTtl, Some(SECONDS(12))),
        heirs_of_a_revoked_lease("revoked-3", TakeOver::AtOnce, None),
    );
    println!(
        "too many holders of a revoked lease: {with}, of an extended one {extended}, and without the wait {without}"
    );
    assert_eq!((with, extended), (0, 0));
    assert!(without > 0, "the test sees two holders");
}
