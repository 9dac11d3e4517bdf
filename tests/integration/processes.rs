//! Locks between processes: many that draw at once, holders that are stopped for too long, and holders that are killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lockkit::{Error, Fault, Leases, NamedLock, Released, RowLock, SessionLock, Wait};
use rustix::process::Signal;
use support::draws::{Stock, Strategy, Tally};
use support::{Backend, Process, Server, Sqlite, TestDb, on_every_database, on_every_server, passes, spawn};
use tokio::sync::oneshot;
use tokio::time::sleep;

/// The ttl of the worker's leases.
const TTL: Duration = Duration::from_secs(1);
/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(1);

fn worker<S: Backend>(db: &TestDb<S>, work: &[&str]) -> Process {
    Process::start(env!("CARGO_BIN_EXE_test-worker"), &[&[S::NAME, &*db.url], work].concat())
}

/// Draws with 8 processes of 4 tasks each, and checks that everything adds up.
macro_rules! draw_in_processes {
    ($db:expr, $strategy:expr, $draws:expr) => {{
        let (db, strategy, draws): (_, Strategy, u64) = (&$db, $strategy, $draws);
        let before = 8 * 4 * draws / 2;
        Stock::fill(db, before).await;
        let work = ["draw", &strategy.to_string(), "4", &draws.to_string()];
        let mut workers: Vec<_> = (0..8).map(|_| worker(db, &work)).collect();
        for worker in &mut workers {
            worker.says("ready").await;
        }
        let started = Instant::now();
        for worker in &mut workers {
            worker.go().await;
        }
        let mut tally = Tally::default();
        for worker in &mut workers {
            let line = worker.hear().await;
            let numbers: Vec<u64> = line.split(' ').map(|it| it.parse().expect("a number")).collect();
            let [won, sold_out, gave_up] = *numbers else { panic!("{line}") };
            tally += Tally { won, sold_out, gave_up };
        }
        println!("8 processes, {strategy} on {}: {tally:?} in {:.1?}", S::NAME, started.elapsed());
        let stock = Stock::look(db, before).await;
        assert_eq!(tally.draws(), 8 * 4 * draws);
        (tally, stock)
    }};
}

on_every_database! {
    async fn processes_with_row_locks_sell_exactly_what_there_is<S>(db: TestDb<S>) {
        let (tally, stock) = draw_in_processes!(db, Strategy::Row, 25);
        assert!(stock.adds_up(tally) && stock.left == 0, "{tally:?}, {stock:?}");
        db.assert_nothing_left().await;
    }

    async fn processes_with_named_locks_sell_exactly_what_there_is<S>(db: TestDb<S>) {
        let (tally, stock) = draw_in_processes!(db, Strategy::Named, 25);
        assert!(stock.adds_up(tally) && stock.left == 0, "{tally:?}, {stock:?}");
        db.assert_nothing_left().await;
    }

    async fn processes_with_leases_sell_exactly_what_there_is<S>(db: TestDb<S>) {
        let (tally, stock) = draw_in_processes!(db, Strategy::Lease, 10);
        assert!(stock.adds_up(tally) && stock.left == 0, "{tally:?}, {stock:?}");
        db.assert_nothing_left().await;
    }

    async fn processes_with_versions_sell_exactly_what_there_is<S>(db: TestDb<S>) {
        let (tally, stock) = draw_in_processes!(db, Strategy::Version, 25);
        assert!(stock.adds_up(tally) && stock.left == 0, "{tally:?}, {stock:?}");
        db.assert_nothing_left().await;
    }

    async fn processes_without_a_lock_lose_updates<S>(db: TestDb<S>) {
        let (tally, stock) = draw_in_processes!(db, Strategy::Naive, 25);
        assert!(!stock.adds_up(tally), "{tally:?}, {stock:?}");
    }

    async fn a_holder_that_was_stopped_past_its_ttl_cannot_commit<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut stale = worker(&db, &["commit"]);
        let fence = stale.hear_fence().await;
        stale.signal(Signal::STOP);

        // It is stopped until somebody else has the lease, however long that takes.
        let leases = Leases::new(db.pool.clone());
        let next = leases.lease("item:1").wait(PATIENCE).acquire().await.unwrap();
        assert!(next.fence().get() > fence);

        stale.signal(Signal::CONT);
        stale.go().await;
        stale.says("lost").await;
        assert_eq!(db.fetch_i64("SELECT wins FROM item").await, Some(0), "its write is absent");
        assert_eq!(next.release().await.unwrap(), Released::WhileHeld);
        db.assert_nothing_left().await;
    }

    async fn the_body_of_a_stopped_process_does_not_take_its_next_step<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut stale = worker(&db, &["run"]);
        let fence = stale.hear_fence().await;
        stale.signal(Signal::STOP);

        let leases = Leases::new(db.pool.clone());
        let next = leases.lease("item:1").wait(PATIENCE).acquire().await.unwrap();
        assert!(next.fence().get() > fence);

        // What makes it go on is there before it wakes up.
        stale.go().await;
        stale.signal(Signal::CONT);
        stale.says("lost").await;
        assert_eq!(db.fetch_i64("SELECT wins FROM item").await, Some(0));
        assert_eq!(next.release().await.unwrap(), Released::WhileHeld);
    }

    async fn a_killed_holders_lease_is_free_after_its_ttl_and_not_before<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut holder = worker(&db, &["hold", "lease"]);
        let fence = holder.hear_fence().await;
        holder.kill().await;

        let leases = Leases::new(db.pool.clone());
        let asked = Instant::now();
        let left = leases.show("item:1").await.unwrap().expect("still held");
        assert_eq!(left.fence.get(), fence);
        let next = leases.lease("item:1").wait(PATIENCE).acquire().await.unwrap();
        let waited = asked.elapsed();
        assert!(next.fence().get() > fence);
        assert!(left.expires_in <= TTL);
        // SQLite's clock counts in milliseconds.
        assert!(waited + Duration::from_millis(2) >= left.expires_in, "after {waited:?}, but it had {left:?}");
        assert!(waited < left.expires_in + Duration::from_secs(10), "only after {waited:?}");

        assert_eq!(db.fetch_i64("SELECT wins FROM item").await, Some(0), "its write is absent");
        assert_eq!(next.release().await.unwrap(), Released::WhileHeld);
        db.assert_nothing_left().await;
    }

    async fn a_process_that_is_stopped_while_its_tasks_pass_a_lease_on_commits_nothing_stale<S>(db: TestDb<S>) {
        passes::create(&db).await;
        let stopped = worker(&db, &["pass", "8"]);
        let leases = Leases::builder(db.pool.clone()).wait(TTL * 3).build().unwrap();
        let mut taken_over = 0;
        for round in 0.. {
            let last = passes::grown(&db, 20).await;
            sleep(Duration::from_millis(round % 7)).await;
            stopped.signal(Signal::STOP);
            let appended = async {
                let lease = leases.lease("item:1").acquire().await?;
                assert!(lease.fence().get() > last);
                passes::append::<S>(&db.pool, lease).await
            };
            match appended.await {
                Ok(()) => taken_over += 1,
                // It was stopped in a transaction that has locked its lease, or all of a SQLite database.
                Err(
                    Error::Contended { .. } | Error::Database { fault: Fault::Unavailable | Fault::Contended, .. },
                ) => {
                    assert!(round < 30, "taken over {taken_over} times");
                }
                Err(err) => panic!("{err:?}"),
            }
            stopped.signal(Signal::CONT);
            if taken_over == 4 {
                break;
            }
        }
        passes::grown(&db, 20).await;
        stopped.kill().await;
        assert!(passes::check(&db).await >= 50, "they were passes");
    }

    async fn a_process_that_is_killed_while_its_tasks_pass_a_lease_on_keeps_it_for_its_ttl_at_most<S>(db: TestDb<S>) {
        passes::create(&db).await;
        let leases = Leases::builder(db.pool.clone()).wait(PATIENCE).build().unwrap();
        for _ in 0..4 {
            let killed = worker(&db, &["pass", "8"]);
            passes::grown(&db, 40).await;
            killed.kill().await;
            let left = leases.show("item:1").await.unwrap().map_or(Duration::ZERO, |it| it.expires_in);
            assert!(left <= TTL);
            let lease = leases.lease("item:1").acquire().await.unwrap();
            let last = db.fetch_i64("SELECT MAX(fence) FROM passes").await;
            assert!(i64::try_from(lease.fence().get()).ok() > last);
            passes::append::<S>(&db.pool, lease).await.unwrap();
        }
        assert!(passes::check(&db).await >= 50, "they were passes");
        db.assert_nothing_left().await;
    }

    async fn a_killed_holders_row_lock_is_free_at_once<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut holder = worker(&db, &["hold", "row"]);
        holder.says("holding").await;
        holder.kill().await;

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("item").by("id", 1_i64).wait(Wait::AtMost(TTL * 5)).lock(&mut *tx).await.unwrap();
        assert_eq!(S::fetch_i64(&mut tx, "SELECT wins FROM item").await.unwrap(), Some(0), "its write is absent");
        tx.rollback().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_killed_holders_named_lock_is_free_at_once<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut holder = worker(&db, &["hold", "named"]);
        holder.says("holding").await;
        holder.kill().await;

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("item:1").wait(Wait::AtMost(TTL * 5)).lock(&mut *tx).await.unwrap();
        assert_eq!(S::fetch_i64(&mut tx, "SELECT wins FROM item").await.unwrap(), Some(0), "its write is absent");
        tx.rollback().await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_every_server! {
    async fn a_killed_holders_session_lock_is_free_at_once<S>(db: TestDb<S>) {
        let mut holder = worker(&db, &["hold", "session"]);
        holder.says("holding").await;
        assert!(SessionLock::new("item:1").try_acquire(&db.pool).await.unwrap().is_none());
        holder.kill().await;

        let next = SessionLock::new("item:1").wait(Wait::AtMost(TTL * 5)).acquire(&db.pool).await.unwrap();
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_lease_pinned_by_a_stopped_process_is_not_taken_past_its_ttl<S>(db: TestDb<S>) {
        Stock::fill(&db, 1).await;
        let mut holder = worker(&db, &["pin"]);
        let fence = holder.hear_fence().await;
        holder.signal(Signal::STOP);
        sleep(TTL * 2).await;

        let leases = Leases::new(db.pool.clone());
        assert!(leases.lease("item:1").try_acquire().await.unwrap().is_none());

        holder.signal(Signal::CONT);
        holder.go().await;
        // Its trust has run out, so it does not commit, although it could: too careful is allowed.
        let said = holder.hear().await;
        let written = db.fetch_i64("SELECT wins FROM item").await;
        assert!(matches!((&*said, written), ("lost", Some(0)) | ("done", Some(99))), "{said}, {written:?}");
        let next = leases.lease("item:1").wait(PATIENCE).acquire().await.unwrap();
        assert!(next.fence().get() > fence);
        assert_eq!(next.release().await.unwrap(), Released::WhileHeld);
        db.assert_nothing_left().await;
    }
}

/// The same as with a stopped process, and always the same: the body is ready to go on before any timer is looked at.
#[tokio::test]
async fn a_body_that_is_woken_after_its_trust_ran_out_does_not_take_its_next_step() {
    let db = TestDb::<Sqlite>::new().await;
    let leases = Leases::new(db.pool.clone());
    let stepped = Arc::new(AtomicBool::new(false));
    let (started, has_started) = oneshot::channel();
    let (go, told_to_go) = oneshot::channel();
    let steps = Arc::clone(&stepped);
    let body = leases.lease("k").ttl(TTL / 10).run(move |_| async move {
        started.send(()).expect("the test waits");
        told_to_go.await.expect("the test says go");
        steps.store(true, Ordering::SeqCst);
        Ok::<_, Error>(())
    });
    let running = spawn(body);
    has_started.await.expect("it starts");

    go.send(()).expect("the body waits");
    thread::sleep(TTL / 2); // As if the process were stopped: nothing else runs on this runtime.

    let ended = running.await.expect("it does not panic");
    assert!(matches!(ended, Err(Error::Lost { .. })), "{ended:?}");
    assert!(!stepped.load(Ordering::SeqCst), "the body went on without its lease");
}
