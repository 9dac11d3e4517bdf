//! Transactions, the locks in them, and migrations, dropped at every await.

use lockkit::idempotent::{Attempt, Outside};
use lockkit::testing::MemoryStore;
use lockkit::{Error, Fence, Idempotent, Leases, NamedLock, RowLock, Tx};
use support::{Server, TestDb, on_every_database, spawn};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Bench, PATIENCE, nothing};

/// An error that is an answer.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Declined;

impl From<Error> for Declined {
    fn from(err: Error) -> Self {
        panic!("{err:?}")
    }
}

on_every_database! {
    async fn transactions_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;

        bench.drop_everywhere("begin", async || (lockkit::begin(pool), ()), nothing).await;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;
        bench.drop_everywhere("Tx::commit", async || (bench.two_rows_written().await.commit(), ()), all_or_none).await;
        let none = async |(): (), _: bool| {
            let rows = db.fetch_i64("SELECT COUNT(*) FROM t").await;
            assert_eq!(rows, Some(0));
        };
        bench.drop_everywhere("Tx::rollback", async || (bench.two_rows_written().await.rollback(), ()), none).await;
    }

    async fn transactions_on_a_kept_connection_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        lockkit::dialect::reuse_connections(pool);
        let again = async || lockkit::begin(pool).await.unwrap().commit().await.unwrap();

        let begin = async || {
            again().await;
            (lockkit::begin(pool), ())
        };
        bench.drop_everywhere(("begin", "again"), begin, nothing).await;
        let lock_name = async || {
            again().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { NamedLock::new("k").wait(PATIENCE).lock(&mut tx).await }, ())
        };
        bench.drop_everywhere(("NamedLock::lock", "again"), lock_name, nothing).await;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;
        let commit = async || {
            again().await;
            (bench.two_rows_written().await.commit(), ())
        };
        bench.drop_everywhere(("Tx::commit", "again"), commit, all_or_none).await;
        let none = async |(): (), _: bool| {
            let rows = db.fetch_i64("SELECT COUNT(*) FROM t").await;
            assert_eq!(rows, Some(0));
        };
        let rollback = async || {
            again().await;
            (bench.two_rows_written().await.rollback(), ())
        };
        bench.drop_everywhere(("Tx::rollback", "again"), rollback, none).await;
    }

    async fn locks_in_transactions_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let row = || RowLock::table("item").by("id", 1_i64).wait(PATIENCE);
        let name = || NamedLock::new("k").wait(PATIENCE);

        let lock_row = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { row().lock(&mut *tx).await }, ())
        };
        bench.drop_everywhere("RowLock::lock", lock_row, nothing).await;
        let fetch_one = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { row().fetch_one::<(i64, i64, i64)>(&mut *tx).await }, ())
        };
        bench.drop_everywhere("RowLock::fetch_one", fetch_one, nothing).await;
        let fetch_optional = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { row().fetch_optional::<(i64, i64, i64)>(&mut *tx).await }, ())
        };
        bench.drop_everywhere("RowLock::fetch_optional", fetch_optional, nothing).await;
        let fetch_all = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { row().fetch_all::<(i64, i64, i64)>(&mut *tx).await }, ())
        };
        bench.drop_everywhere("RowLock::fetch_all", fetch_all, nothing).await;
        let lock_name = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { name().lock(&mut *tx).await }, ())
        };
        bench.drop_everywhere("NamedLock::lock", lock_name, nothing).await;
        let holder = async || (async move { name().holder(pool).await }, ());
        bench.drop_everywhere("NamedLock::holder", holder, nothing).await;

        // Somebody else holds the lock, and gives it back after the drop: it must not stay with who is gone.
        let release = async |other: Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
        let blocked_row = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            row().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                row().lock(&mut *tx).await
            };
            (blocked, other)
        };
        bench.drop_blocked(("RowLock::lock", "of a locked row"), blocked_row, release).await;
        let blocked_name = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                name().lock(&mut *tx).await
            };
            (blocked, other)
        };
        bench.drop_blocked(("NamedLock::lock", "of a locked name"), blocked_name, release).await;
    }

    async fn idempotent_requests_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let run = async || {
            db.execute("DELETE FROM t").await;
            db.execute("DELETE FROM lockkit_answer").await;
            let run = Idempotent::key("k").wait(PATIENCE).run(pool, async |tx| {
                S::execute(tx, "INSERT INTO t VALUES (1)").await.expect("a statement");
                Ok::<_, Error>(7)
            });
            (run, ())
        };
        let both_or_none = async |(): (), completed: bool| {
            db.assert_nothing_left().await;
            let rows = "SELECT COUNT(*) FROM t";
            let answers = "SELECT COUNT(*) FROM lockkit_answer WHERE made_us IS NOT NULL";
            assert_eq!(db.fetch_i64(&format!("SELECT ({rows}) - ({answers})")).await, Some(0));
            assert!(!completed || db.fetch_i64(answers).await == Some(1));
        };
        bench.drop_everywhere("Idempotent::run", run, both_or_none).await;
        let run = async || {
            db.execute("DELETE FROM lockkit_answer").await;
            let run = Idempotent::key("k").wait(PATIENCE).store_err(|_: &Declined| true).run(pool, async |tx| {
                S::execute(tx, "INSERT INTO t VALUES (1)").await.expect("a statement");
                Err::<(), _>(Declined)
            });
            (async { run.await.map_err(|_| Error::conflict()) }, ())
        };
        let none_is_written = async |(): (), completed: bool| {
            db.assert_nothing_left().await;
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
            let answers = db.fetch_i64("SELECT COUNT(*) FROM lockkit_answer WHERE made_us IS NOT NULL").await;
            assert!(!completed || answers == Some(1));
        };
        db.execute("DELETE FROM t").await;
        bench.drop_everywhere("idempotent::StoresErr::run", run, none_is_written).await;

        // Another request has the key, and fails after the drop.
        let blocked = async || {
            let (has_begun, begun) = oneshot::channel();
            let (go, gone) = oneshot::channel::<()>();
            let there = db.pool.clone();
            let other = spawn(async move {
                let body = async |_: &mut Tx<_>| {
                    has_begun.send(()).expect("a test that waits");
                    gone.await.expect("a test that lets it go");
                    Err::<(), _>(Error::conflict())
                };
                Idempotent::key("blocked").run(&there, body).await.expect_err("its own error")
            });
            begun.await.expect("a request that begins");
            let run = Idempotent::key("blocked").wait(PATIENCE).run(pool, async |_| Ok::<_, Error>(()));
            (run, (go, other))
        };
        let go_on = async |(go, other): (oneshot::Sender<()>, JoinHandle<Error>), _: bool| {
            go.send(()).expect("a request that waits");
            assert!(other.await.expect("a request").is_conflict());
        };
        bench.drop_blocked(("Idempotent::run", "of a key that another request has"), blocked, go_on).await;
    }

    async fn requests_for_work_outside_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, leases } = &bench;
        let count = async |of: &str| db.fetch_i64(&format!("SELECT COUNT(*) FROM {of}")).await.unwrap();
        let (mut first_attempts, mut later_attempts) = (0, 0);
        let mut key = 0;
        // On a busy machine a request may end before it is dropped often enough.
        for repeats in std::iter::once(false).chain(std::iter::repeat_n(true, 20)) {
            if later_attempts > 0 {
                break;
            }
            // With a new key for each drop, or with the one that the drops before have begun.
            let name = if repeats { "of a key that has begun" } else { "of a new key" };
            let outside = async || {
                db.execute("DELETE FROM t").await;
                db.execute("DELETE FROM lockkit_answer WHERE answer IS NOT NULL").await;
                key += i32::from(!repeats);
                let is_first = std::rc::Rc::new(std::cell::Cell::new(None));
                let (request, seen) = (Idempotent::key(format!("k:{key}")).wait(PATIENCE), is_first.clone());
                let outside = request.outside(leases, async move |work| {
                    seen.set(Some(work.attempt() == Attempt::First));
                    let mut elsewhere = pool.acquire().await.expect("a connection");
                    S::execute(&mut elsewhere, "UPDATE item SET stock = 1").await.expect("work");
                    drop(elsewhere);
                    S::execute(work.tx().await?, "INSERT INTO t VALUES (1)").await.expect("a statement");
                    Ok::<_, Error>(7)
                });
                (outside, is_first)
            };
            let after = async |is_first: std::rc::Rc<std::cell::Cell<Option<bool>>>, completed: bool| {
                db.assert_nothing_left().await;
                let begun = count("lockkit_answer WHERE made_us IS NOT NULL").await;
                let answers = count("lockkit_answer WHERE answer IS NOT NULL").await;
                assert_eq!(count("t").await, answers);
                assert!(!completed || answers == 1);
                match is_first.get() {
                    Some(true) => first_attempts += 1,
                    Some(false) => later_attempts += 1,
                    None => {}
                }
                assert!(is_first.get().is_none() || begun > 0, "its body ran");
            };
            bench.drop_everywhere(("Idempotent::outside", name), outside, after).await;
        }
        assert!(first_attempts > 0 && later_attempts > 0);

        let (nothing_is_written, mut keys) = (async || assert_eq!(count("t").await, 0), 0..);
        db.execute("DELETE FROM t").await;
        let mut request = || Idempotent::key(format!("err:{}", keys.next().expect("without an end"))).wait(PATIENCE);
        let declined = async || {
            let outside = request().store_err(|_: &Declined| true).outside(leases, async |work| {
                S::execute(work.tx().await?, "INSERT INTO t VALUES (1)").await.expect("a statement");
                Err::<(), _>(Declined)
            });
            (async { outside.await.map_err(|_| Error::conflict()) }, ())
        };
        let after = async |(): (), _: bool| nothing_is_written().await;
        bench.drop_everywhere("idempotent::StoresErr::outside", declined, after).await;
        let tx = async || {
            let outside = request().outside(leases, async |work| {
                S::execute(work.tx().await?, "INSERT INTO t VALUES (1)").await.expect("a statement");
                Err::<(), _>(Error::conflict())
            });
            (async { Ok(outside.await.unwrap_err()) }, ())
        };
        bench.drop_everywhere("idempotent::Outside::tx", tx, after).await;

        // Another request has the key, and fails after the drop.
        let blocked = async || {
            let (has_begun, begun) = oneshot::channel();
            let (go, gone) = oneshot::channel::<()>();
            let there = leases.clone();
            let other = spawn(async move {
                let body = async |_: &mut Outside<_>| {
                    has_begun.send(()).expect("a test that waits");
                    gone.await.expect("a test that lets it go");
                    Err::<(), _>(Error::conflict())
                };
                Idempotent::key("blocked").outside(&there, body).await.expect_err("its own error")
            });
            begun.await.expect("a request that begins");
            let outside = Idempotent::key("blocked").wait(PATIENCE).outside(leases, async |_| Ok::<_, Error>(()));
            (outside, (go, other))
        };
        let go_on = async |(go, other): (oneshot::Sender<()>, JoinHandle<Error>), _: bool| {
            go.send(()).expect("a request that waits");
            assert!(other.await.expect("a request").is_conflict());
        };
        bench.drop_blocked(("Idempotent::outside", "of a key that another request has"), blocked, go_on).await;
    }

    async fn guards_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let fence = Fence::from(7);
        // The same fence is admitted again, whatever the transaction that was dropped had locked.
        let again = async |(): (), _: bool| {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            lockkit::guard(&mut *tx, "domain", "k", fence).await.unwrap();
            tx.rollback().await.unwrap();
        };
        let guard = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { lockkit::guard(&mut *tx, "domain", "k", fence).await }, ())
        };
        bench.drop_everywhere("guard", guard, again).await;
        let elsewhere = Leases::new(MemoryStore::new());
        let lease = elsewhere.lease("k").acquire().await.unwrap();
        let guard = async || {
            let (mut tx, lease) = (lockkit::begin(pool).await.unwrap(), lease.share());
            (async move { lease.guard(&mut *tx).await }, ())
        };
        bench.drop_everywhere("Lease::guard", guard, nothing).await;
        let several = elsewhere.all(["a", "b"]).acquire().await.unwrap();
        let guard = async || {
            let (mut tx, several) = (lockkit::begin(pool).await.unwrap(), &several);
            (async move { several.guard(&mut *tx).await }, ())
        };
        bench.drop_everywhere("MultiLease::guard", guard, nothing).await;
        let forget = async || (lockkit::forget_fences(pool, "domain"), ());
        bench.drop_everywhere("forget_fences", forget, again).await;

        let blocked = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            lockkit::guard(&mut *other, "domain", "k", fence).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                lockkit::guard(&mut *tx, "domain", "k", fence).await
            };
            (blocked, other)
        };
        let release = async |other: Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
        bench.drop_blocked(("guard", "of a locked row"), blocked, release).await;
    }

    async fn migrations_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, leases } = &bench;
        let no_tables = async || {
            for table in ["lockkit_lease", "lockkit_named", "lockkit_fence", "_lockkit_migrations"] {
                db.execute(&format!("DROP TABLE IF EXISTS {table}")).await;
            }
        };
        let again = async |(): (), _: bool| {
            lockkit::migrate(pool).await.expect("run it again");
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        };
        let migrate = async || {
            no_tables().await;
            (lockkit::migrate(pool), ())
        };
        bench.drop_everywhere("migrate", migrate, again).await;
        let migrate = async || {
            no_tables().await;
            (leases.migrate(), ())
        };
        bench.drop_everywhere("Leases::migrate", migrate, again).await;
    }
}
