//! Leases that one task of a process hands to the next without asking the database.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
    time::Duration,
};

use lockkit::{Error, Fence, Lease, Leases, Released, store::LeaseStore};
use support::{JoinSet, Server, TestDb, on_every_database, on_every_server, spawn};
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{sleep, timeout},
};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// A task that waits for the lease. It is in the queue when this returns: a request joins it with its first poll.
async fn waiting<S: LeaseStore>(leases: &Leases<S>) -> JoinHandle<Lease<S>> {
    let request = leases.lease("k").wait(Duration::from_secs(60));
    let (joined, has_joined) = oneshot::channel();
    let waiting = spawn(async move {
        let mut acquiring = pin!(request.acquire());
        let first = poll_fn(|context| Poll::Ready(acquiring.as_mut().poll(context))).await;
        assert!(first.is_pending());
        joined.send(()).expect("the test waits");
        acquiring.await.expect("a lease")
    });
    has_joined.await.expect("a poll");
    waiting
}

/// A handle to a lease of the key that was handed on, and the lease of the next holder.
async fn stale_and_next<S: LeaseStore>(leases: &Leases<S>) -> (Lease<S>, Lease<S>) {
    let mut next = None;
    let stale = leases.lease("k").run(async |lease| {
        next = Some(waiting(leases).await);
        Ok::<_, Error>(lease)
    });
    let stale = stale.await.expect("a body");
    let next = next.expect("the body ran").await.expect("a task");
    assert_eq!(next.fence().get(), stale.fence().get() + 1, "it was handed on");
    (stale, next)
}

on_every_database! {
    async fn tasks_of_two_processes_never_hold_a_lease_together_and_its_fences_rise<S>(db: TestDb<S>) {
        let processes = [Leases::new(db.pool.clone()), Leases::new(db.pool.clone())];
        let inside = Arc::new(AtomicU32::new(0));
        let fences: Arc<Mutex<Vec<Fence>>> = Arc::default();
        let mut tasks = JoinSet::new();
        for task in 0..12 {
            let (leases, inside, fences) = (processes[task % 2].clone(), inside.clone(), fences.clone());
            tasks.spawn(async move {
                for _ in 0..25 {
                    let lease = leases.lease("k").wait(Duration::from_secs(60)).acquire().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                    tokio::task::yield_now().await;
                    fences.lock().unwrap().push(lease.fence());
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let fences = fences.lock().unwrap().clone();
        assert_eq!(fences.len(), 300);
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
        let handed = fences.windows(2).filter(|it| it[1].get() == it[0].get() + 1).count();
        assert!(handed > 100, "{handed} of 300 were handed on");
        assert_eq!(processes[0].show("k").await.unwrap(), None);
    }

    async fn a_holder_whose_lease_was_handed_on_cannot_commit<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let (stale, next) = stale_and_next(&leases).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        assert!(stale.verify(&mut tx).await.unwrap_err().is_lost());
        assert!(stale.guard(&mut *tx).await.unwrap_err().is_lost());
        assert!(stale.share().commit(tx).await.unwrap_err().is_lost());
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        assert!(stale.extend(Duration::from_secs(60)).await.unwrap_err().is_lost());
        assert_eq!(stale.release().await.unwrap(), Released::AlreadyLost);

        // Nothing of that has touched the lease of the next one.
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, next.fence());
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        next.verify(&mut tx).await.unwrap();
        next.guard(&mut *tx).await.unwrap();
        next.commit(tx).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(2));
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    async fn a_commit_hands_the_lease_on_with_the_next_fence<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let first = leases.lease("k").acquire().await.unwrap();
        let (waits, fence) = (waiting(&leases).await, first.fence().get());
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        first.commit(tx).await.unwrap();
        let next = waits.await.unwrap();
        assert_eq!(next.fence().get(), fence + 1, "the store was not asked");
        let held = leases.show("k").await.unwrap().unwrap();
        assert_eq!((held.fence, held.renewals), (next.fence(), 1), "the transaction renewed it");

        // Nobody waits: this commit releases the lease.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        next.commit(tx).await.unwrap();
        assert_eq!(leases.show("k").await.unwrap(), None);
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(2));
    }

    async fn commits_of_two_processes_under_one_lease_lose_no_update<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        db.execute("INSERT INTO t VALUES (0)").await;
        let processes = [Leases::new(db.pool.clone()), Leases::new(db.pool.clone())];
        let fences: Arc<Mutex<Vec<Fence>>> = Arc::default();
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let (leases, pool, fences) = (processes[task % 2].clone(), db.pool.clone(), fences.clone());
            tasks.spawn(async move {
                for turn in 0..10 {
                    let lease = leases.lease("k").wait(Duration::from_secs(60)).acquire().await.unwrap();
                    let fence = lease.fence();
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    let read = S::fetch_i64(&mut tx, "SELECT n FROM t").await.unwrap().unwrap();
                    S::execute(&mut tx, &format!("UPDATE t SET n = {}", read + 1)).await.unwrap();
                    if turn % 5 == 4 {
                        // Given up: its commit is dropped, or was never sent.
                        drop(tx);
                        drop(lease);
                        continue;
                    }
                    lease.commit(tx).await.unwrap();
                    fences.lock().unwrap().push(fence);
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(64));
        let mut fences = fences.lock().unwrap().clone();
        fences.sort_unstable();
        let handed = fences.windows(2).filter(|it| it[1].get() == it[0].get() + 1).count();
        assert!(fences.is_sorted_by(|a, b| a < b) && handed > 20, "{handed} of 64 were handed on: {fences:?}");
    }

    async fn a_commit_with_a_stolen_lease_is_refused_and_hands_nothing_on<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let first = leases.lease("k").acquire().await.unwrap();
        let (waits, fence) = (waiting(&leases).await, first.fence());
        Leases::new(db.pool.clone()).steal("k").await.unwrap().unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        assert!(first.commit(tx).await.unwrap_err().is_lost());
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        let next = timeout(Duration::from_secs(20), waits).await.unwrap().unwrap();
        assert!(next.fence().get() > fence.get() + 1, "it was granted by the store");
    }

    async fn a_dropped_commit_leaves_the_lease_to_the_next_and_not_to_two<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let leases = Leases::new(db.pool.clone());
        let others = Leases::new(db.pool.clone());
        for polls in 1..12 {
            let first = leases.lease("k").wait(Duration::from_secs(20)).acquire().await.unwrap();
            let waits = waiting(&leases).await;
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            S::execute(&mut tx, &format!("INSERT INTO t VALUES ({polls})")).await.unwrap();
            let mut commit = Box::pin(first.commit(tx));
            let mut polled = 0;
            let dropped = poll_fn(|context| {
                let done = commit.as_mut().poll(context).is_ready();
                polled += 1;
                if done || polled == polls { Poll::Ready(!done) } else { Poll::Pending }
            });
            let dropped = dropped.await;
            drop(commit);
            let next = timeout(Duration::from_secs(20), waits).await.expect("the next one gets it").unwrap();
            assert!(others.lease("k").try_acquire().await.unwrap().is_none(), "dropped: {dropped}");
            assert!(next.is_trusted());
            assert_eq!(next.release().await.unwrap(), Released::WhileHeld);
            if !dropped {
                return;
            }
        }
    }

    async fn a_guarded_transaction_of_the_holder_before_is_refused_after_one_of_the_next<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let (stale, next) = stale_and_next(&leases).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        next.guard(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let domain = leases.store().profile().fence_domain;
        // As one would whose check was made a moment too early.
        let refused = lockkit::guard(&mut *tx, domain, "k", stale.fence()).await;
        assert!(matches!(refused, Err(Error::Fenced { .. })), "{refused:?}");
    }

    async fn an_heir_in_another_process_has_a_higher_fence_than_all_that_were_handed_on<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).ttl(Duration::from_secs(3)).build().unwrap();
        let (_, next) = stale_and_next(&leases).await;
        let thief = Leases::new(db.pool.clone());
        thief.steal("k").await.unwrap().unwrap();
        let heir = thief.lease("k").acquire().await.unwrap();
        assert!(heir.fence() > next.fence());
        timeout(Duration::from_secs(10), next.lost()).await.expect("the holder learns it");
    }
}

on_every_server! {
    async fn a_lease_that_a_transaction_has_verified_is_not_handed_on_before_its_end<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let first = leases.lease("k").acquire().await.unwrap();
        let next = waiting(&leases).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        first.verify(&mut tx).await.unwrap();
        let releasing = spawn(first.release());
        sleep(MILLIS(300)).await;
        assert!(!next.is_finished(), "the next one holds it while the transaction of the first is open");
        tx.commit().await.unwrap();
        assert_eq!(releasing.await.unwrap().unwrap(), Released::WhileHeld);
        assert!(timeout(Duration::from_secs(10), next).await.unwrap().unwrap().is_trusted());
    }
}
