//! Processes with several runtimes, some of which end.

use std::thread;
use std::time::Duration;

use lockkit::Leases;
use lockkit::testing::{Failure, MemoryStore, Operation};
use support::{TestDb, on_databases, on_every_database, spawn};
use tokio::runtime;
use tokio::time::sleep;

const TTL: Duration = Duration::from_millis(1500);

on_every_database! {
    async fn leases_outlive_the_runtime_that_first_kept_one<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(TTL).build().unwrap();
        let elsewhere = leases.clone();
        let other = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let first = other.spawn(async move { elsewhere.lease("first").acquire().await }).await.unwrap().unwrap();
        let here = leases.lease("here").acquire().await.unwrap();
        thread::spawn(move || drop(other)).join().unwrap();

        sleep(TTL * 3).await;
        assert!(here.is_trusted(), "it is renewed on the runtime that is left");
        assert!(first.is_trusted(), "and so is that of the runtime that has ended");
        first.release().await.unwrap();
        here.release().await.unwrap();
    }

    async fn a_lease_of_a_runtime_that_ends_is_released_on_another<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(300)).build().unwrap();
        let here = leases.lease("here").acquire().await.unwrap();
        let elsewhere = leases.clone();
        let other = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let acquired = other.spawn(async move {
            let lease = elsewhere.lease("k").acquire().await.unwrap();
            spawn(async move {
                let _lease = lease;
                std::future::pending::<()>().await;
            });
        });
        acquired.await.unwrap();
        thread::spawn(move || drop(other)).join().unwrap();
        leases.lease("k").wait(Duration::from_secs(30)).acquire().await.unwrap().release().await.unwrap();
        here.release().await.unwrap();
    }
}

/// The number of locks that listening waiters share in this database.
const WAITERS_LOCKS: &str = "SELECT COUNT(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database
    WHERE datname = current_database() AND locktype = 'advisory' AND mode = 'ShareLock' AND granted";

on_databases! { [postgres]
    async fn releases_are_heard_though_the_runtime_that_first_listened_has_ended<S>(db: TestDb<S>) {
        let holder = Leases::new(db.pool.clone());
        let listening = Leases::builder(db.pool_of(3).await).listen().build().unwrap();
        let held = holder.lease("k").acquire().await.unwrap();
        let elsewhere = listening.clone();
        let other = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        other.spawn(async move { elsewhere.lease("k").acquire().await });
        while db.fetch_i64(WAITERS_LOCKS).await != Some(1) {
            sleep(Duration::from_millis(5)).await;
        }
        thread::spawn(move || drop(other)).join().unwrap();

        let waiting = spawn(listening.lease("k").wait(Duration::from_secs(30)).acquire());
        // Until the lease is listened for again. A wait that fails is no reason to look for ever.
        while db.fetch_i64(WAITERS_LOCKS).await != Some(1) && !waiting.is_finished() {
            sleep(Duration::from_millis(5)).await;
        }
        held.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}

fn runtime() -> runtime::Runtime {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_a_runtime_that_ends_is_released_on_another() {
    let store = MemoryStore::new();
    let (leases, others) = (Leases::new(store.client()), Leases::new(store));
    let _here = leases.lease("here").acquire().await.unwrap();
    let other = runtime();
    // It is granted, and the answer takes longer than the runtime lives.
    leases.store().faults().script(Operation::Acquire, [Failure::Slow(Duration::from_secs(4))]);
    other.spawn(leases.lease("k").acquire());
    while others.show("k").await.unwrap().is_none() {
        sleep(Duration::from_millis(10)).await;
    }
    other.shutdown_background();
    others.lease("k").acquire().await.unwrap().release().await.unwrap();
}

/// How many files this process has open.
#[cfg(target_os = "linux")]
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runtimes_that_have_ended_are_forgotten() {
    const RUNTIMES: usize = 400;

    let leases = Leases::new(MemoryStore::new());
    let lease = leases.lease("k").acquire().await.unwrap();
    let before = open_files();
    for _ in 0..RUNTIMES {
        let lease = lease.share();
        let extending = move || runtime().block_on(async { lease.extend(Duration::from_secs(31)).await });
        thread::spawn(extending).join().unwrap().unwrap();
    }
    // Other tests of this process open some as well. A runtime has more than one.
    assert!(open_files() < before + RUNTIMES, "{before} before, {} after", open_files());
}
