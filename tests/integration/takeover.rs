//! How soon the lease of killed processes is taken over.

use std::time::{Duration, Instant};

use lockkit::{Lease, LeaseRequest, Leases};
use rustix::process::Signal;
use sqlx::Pool;
use support::{Backend, Process, Server, Sqlite, TestDb, on_every_database};
use support::{draws::Stock, spawn};
use tokio::time::sleep;

/// The ttl of the worker's leases.
const TTL: Duration = Duration::from_secs(1);
/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(1);
/// How much later than the end of the ttl somebody else has the lease, at most: 0.1 s and one poll (0.25 s), and what a
/// busy machine takes.
const LATE: Duration = Duration::from_millis(1200);

fn worker<S: Backend>(db: &TestDb<S>, work: &[&str]) -> Process {
    Process::start(env!("CARGO_BIN_EXE_test-worker"), &[&[S::NAME, &*db.url], work].concat())
}

type Store<S> = Pool<<S as Server>::DB>;

/// Kills a process that holds what `way` names, and two that wait for it longer than somebody here does. Returns how
/// much later than the last of their leases ended it is granted here.
async fn lateness<S: Backend>(
    db: &TestDb<S>,
    way: &str,
    request: fn(&Leases<Store<S>>) -> LeaseRequest<Store<S>>,
) -> Duration {
    let mut holders = vec![worker(db, &["keep", way])];
    holders[0].says("asking").await;
    holders[0].says("holding").await;
    for _ in 0..2 {
        let mut waiter = worker(db, &["keep", way]);
        waiter.says("asking").await;
        holders.push(waiter);
    }
    // Whoever waits queues by now.
    sleep(TTL / 2).await;
    let leases = Leases::builder(db.pool_of(4).await).ttl(TTL).build().unwrap();
    let waiting: tokio::task::JoinHandle<Lease<_>> = spawn({
        let request = request(&leases).wait(PATIENCE);
        async move { request.acquire().await.unwrap() }
    });
    sleep(TTL / 2).await;
    for holder in &holders {
        holder.signal(Signal::STOP);
    }
    for holder in &holders {
        holder.signal(Signal::KILL);
    }
    let killed = Instant::now();
    let lease = waiting.await.unwrap();
    let taken = killed.elapsed();
    lease.release().await.unwrap();
    // Nothing of what they held can end later than a ttl after they were killed.
    let late = taken.saturating_sub(TTL);
    println!("{}: {way} is taken over {taken:.0?} after the processes were killed", S::NAME);
    late
}

on_every_database! {
    async fn the_lease_of_killed_processes_is_taken_over_when_it_ends<S>(db: TestDb<S>) {
        let late = lateness(&db, "lease", |leases| leases.lease("item:1")).await;
        assert!(late < LATE, "{late:?} late");
    }

    async fn a_fair_queue_of_killed_processes_keeps_nobody_out_for_longer_than_the_ttl<S>(db: TestDb<S>) {
        let late = lateness(&db, "fair", |leases| leases.lease("item:1").fair()).await;
        assert!(late < LATE, "{late:?} late");
    }

    async fn a_permit_of_a_killed_process_is_taken_over_when_it_ends<S>(db: TestDb<S>) {
        let late = lateness(&db, "permit", |leases| leases.semaphore("item:1", 1)).await;
        assert!(late < LATE, "{late:?} late");
    }

    async fn killed_writers_keep_nobody_out_for_longer_than_the_ttl<S>(db: TestDb<S>) {
        let late = lateness(&db, "write", |leases| leases.rw("item:1").write()).await;
        assert!(late < LATE, "{late:?} late");
    }
}

/// `SQLite` has one lock for all writers, and its own wait for it starves beside others that write all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_free_lease_is_granted_beside_processes_that_write_all_the_time() {
    let Some(db) = TestDb::<Sqlite>::unless_left_out().await else { return };
    Stock::fill(&db, 1).await;
    let mut writers: Vec<_> = (0..4).map(|_| worker(&db, &["write"])).collect();
    for writer in &mut writers {
        writer.says("writing").await;
    }
    let leases = Leases::new(db.pool.clone());
    let started = Instant::now();
    for round in 0..12 {
        // The writers get going again.
        sleep(Duration::from_millis(50)).await;
        let lease = leases.lease("k").try_acquire().await.unwrap();
        let lease = lease.unwrap_or_else(|| panic!("refused in round {round}, though nobody holds it"));
        lease.release().await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(20), "round {round} took until {:?}", started.elapsed());
    }
    println!("12 leases beside 4 processes that write: {:?}", started.elapsed());
}
