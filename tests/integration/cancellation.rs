//! Every public future, dropped after every poll: nothing stays locked, no transaction stays open, and the pool is whole.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use lockkit::{Error, Lease, Leases, NamedLock, Policy, RowLock, SessionLock, VersionedRow};
use sqlx::{Connection, Pool};
use support::{Backend, Server, TestDb, on_every_database, on_every_server};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

/// The connections of the pool under test.
const CONNECTIONS: u32 = 3;

/// A future that is not woken for this long waits for somebody else.
const BLOCKED: Duration = Duration::from_millis(200);

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// When to drop a future.
#[derive(Clone, Copy, Debug)]
enum When {
    /// As soon as it waits: what it waits for is on its way.
    Asleep,
    /// When it has been woken, before it hears what for.
    Woken,
}

/// What became of a future that was to be dropped.
enum Ended<T> {
    /// It was ready before.
    Completed(T),
    Dropped,
    /// It waited for somebody else before, and was dropped then.
    Blocked,
}

/// Polls a future up to `polls` times, and drops it.
async fn drop_after_polls<F: Future>(polls: u32, when: When, future: F) -> Ended<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    let ended = poll_fn(|context| {
        if polled == polls {
            return Poll::Ready(Ended::Dropped);
        }
        polled += 1;
        match (future.as_mut().poll(context), when) {
            (Poll::Ready(output), _) => Poll::Ready(Ended::Completed(output)),
            (Poll::Pending, When::Asleep) if polled == polls => Poll::Ready(Ended::Dropped),
            (Poll::Pending, _) => Poll::Pending,
        }
    });
    timeout(BLOCKED, ended).await.unwrap_or(Ended::Blocked)
}

/// The futures of one test: a database, and the pool that they run on.
struct Bench<S: Backend> {
    db: TestDb<S>,
    pool: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
}

impl<S: Backend> Bench<S> {
    async fn new(db: TestDb<S>) -> Self {
        db.execute(
            "CREATE TABLE item (id BIGINT NOT NULL PRIMARY KEY, stock BIGINT NOT NULL, version BIGINT NOT NULL)",
        )
        .await;
        db.execute("INSERT INTO item VALUES (1, 10, 1)").await;
        db.execute("CREATE TABLE t (n INT)").await;
        let pool = db.pool_of(CONNECTIONS).await;
        Self { leases: Leases::new(pool.clone()), pool, db }
    }

    /// Drops the future that `make` makes after each of its polls, and looks for what is left each time.
    ///
    /// `make` also returns what is kept while the future runs; `after` gets it back, to give up before the look.
    async fn drop_everywhere<Fut, Kept, T, After>(
        &self,
        name: &str,
        make: impl AsyncFnMut() -> (Fut, Kept),
        after: impl FnMut(Kept, bool) -> After,
    ) where
        Fut: Future<Output = Result<T, Error>>,
        After: Future<Output = ()>,
    {
        self.drop_when(&[When::Asleep, When::Woken], name, make, after).await;
    }

    async fn drop_when<Fut, Kept, T, After>(
        &self,
        whens: &[When],
        name: &str,
        mut make: impl AsyncFnMut() -> (Fut, Kept),
        mut after: impl FnMut(Kept, bool) -> After,
    ) where
        Fut: Future<Output = Result<T, Error>>,
        After: Future<Output = ()>,
    {
        let mut points = 0;
        for &when in whens {
            for polls in 0.. {
                let (future, kept) = make().await;
                let ended = drop_after_polls(polls, when, future).await;
                let last = !matches!(ended, Ended::Dropped);
                let at = format!("{name} on {}, dropped {when:?} after {polls} polls", S::NAME);
                let completed = match ended {
                    Ended::Completed(Ok(granted)) => {
                        drop(granted);
                        true
                    }
                    Ended::Completed(Err(err)) => panic!("{at}: {err}"),
                    Ended::Dropped | Ended::Blocked => false,
                };
                after(kept, completed).await;
                self.nothing_is_left(&at).await;
                points += 1;
                if last {
                    break;
                }
                assert!(polls < 200, "{at}: it never ends");
            }
        }
        println!("{name} on {}: dropped at {points} points", S::NAME);
    }

    async fn nothing_is_left(&self, at: &str) {
        let deadline = Instant::now() + PATIENCE / 4;
        let left = loop {
            let mut left = self.db.leftovers().await;
            let held = "SELECT COUNT(*) FROM lockkit_lease WHERE token IS NOT NULL";
            let held = self.db.fetch_i64(held).await.unwrap_or_default();
            if held > 0 {
                left.push(format!("{held} leases are held"));
            }
            if left.is_empty() || Instant::now() > deadline {
                break left;
            }
            sleep(Duration::from_millis(5)).await;
        };
        assert!(left.is_empty(), "{at}: left after {:?}:\n{}", PATIENCE / 4, left.join("\n"));

        let whole = async {
            let mut connections = Vec::new();
            for _ in 0..CONNECTIONS {
                connections.push(self.pool.acquire().await.unwrap_or_else(|err| panic!("{at}: acquire: {err}")));
            }
            for conn in &mut connections {
                conn.ping().await.unwrap_or_else(|err| panic!("{at}: ping: {err}"));
            }
        };
        timeout(PATIENCE, whole).await.unwrap_or_else(|_| panic!("{at}: the pool is not whole"));
    }

    async fn lease(&self) -> Lease<Pool<S::DB>> {
        self.leases.lease("k").wait(PATIENCE).acquire().await.expect("acquire the lease")
    }
}

/// For futures that keep nothing and need nothing afterwards.
async fn nothing((): (), _completed: bool) {}

on_every_database! {
    async fn transactions_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;

        bench.drop_everywhere("begin", async || (lockkit::begin(pool), ()), nothing).await;

        let written = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
            S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
            tx
        };
        let all_or_none = async |(): (), completed: bool| {
            let deadline = Instant::now() + PATIENCE;
            while !db.leftovers().await.is_empty() {
                assert!(Instant::now() < deadline, "{}", db.leftovers().await.join("\n"));
            }
            let rows = db.fetch_i64("SELECT COUNT(*) FROM t").await.unwrap();
            assert!(if completed { rows == 2 } else { rows == 0 || rows == 2 }, "{rows} rows");
            db.execute("DELETE FROM t").await;
        };
        bench.drop_everywhere("Tx::commit", async || (written().await.commit(), ()), all_or_none).await;

        let none = async |(): (), _: bool| {
            let rows = db.fetch_i64("SELECT COUNT(*) FROM t").await;
            assert_eq!(rows, Some(0));
        };
        bench.drop_everywhere("Tx::rollback", async || (written().await.rollback(), ()), none).await;
    }

    async fn requests_for_leases_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;
        let request = || leases.lease("k").wait(PATIENCE);

        bench.drop_everywhere("LeaseRequest::acquire", async || (request().acquire(), ()), nothing).await;
        bench.drop_everywhere("LeaseRequest::try_acquire", async || (request().try_acquire(), ()), nothing).await;

        let run = async || {
            let body = async |lease: Lease<Pool<<S as Server>::DB>>| {
                let mut tx = lockkit::begin(pool).await?;
                lease.verify(&mut tx).await?;
                yield_now().await;
                tx.commit().await
            };
            (Box::pin(request().run(body)), ())
        };
        bench.drop_everywhere("LeaseRequest::run", run, nothing).await;

        // Somebody else holds it, and releases it after the drop: it must not be granted to who is gone.
        let others = Leases::new(db.pool.clone());
        let blocked = async || {
            let other = others.lease("k").acquire().await.unwrap();
            (request().acquire(), other)
        };
        let release = async |other: Lease<_>, _: bool| {
            other.release().await.unwrap();
        };
        bench.drop_everywhere("LeaseRequest::acquire of a held lease", blocked, release).await;
    }

    async fn what_a_holder_asks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, leases } = &bench;

        let verify = async || {
            let lease = bench.lease().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { lease.verify(&mut tx).await }, ())
        };
        bench.drop_everywhere("Lease::verify", verify, nothing).await;

        let commit = async || {
            let lease = bench.lease().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
            S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
            (lease.commit(tx), ())
        };
        let all_or_none = async |(): (), completed: bool| {
            let deadline = Instant::now() + PATIENCE;
            while !db.leftovers().await.is_empty() {
                assert!(Instant::now() < deadline, "{}", db.leftovers().await.join("\n"));
            }
            let rows = db.fetch_i64("SELECT COUNT(*) FROM t").await.unwrap();
            assert!(if completed { rows == 2 } else { rows == 0 || rows == 2 }, "{rows} rows");
            db.execute("DELETE FROM t").await;
        };
        bench.drop_everywhere("Lease::commit", commit, all_or_none).await;

        let extend = async || {
            let lease = bench.lease().await;
            (async move { lease.extend(PATIENCE).await }, ())
        };
        bench.drop_everywhere("Lease::extend", extend, nothing).await;
        bench.drop_everywhere("Lease::release", async || (bench.lease().await.release(), ()), nothing).await;

        let lost = async || {
            let lease = bench.lease().await;
            (async move { Ok(lease.lost().await) }, ())
        };
        bench.drop_everywhere("Lease::lost", lost, nothing).await;

        // What operators ask, of a lease that is held.
        let release = async |lease: Lease<_>, _: bool| {
            lease.release().await.unwrap();
        };
        bench.drop_everywhere("Leases::show", async || (leases.show("k"), bench.lease().await), release).await;
        bench.drop_everywhere("Leases::list", async || (leases.list("k"), bench.lease().await), release).await;
        bench.drop_everywhere("Leases::steal", async || (leases.steal("k"), bench.lease().await), release).await;
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

        let fetch_row = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { row().fetch_one::<(i64, i64, i64)>(&mut *tx).await }, ())
        };
        bench.drop_everywhere("RowLock::fetch_one", fetch_row, nothing).await;

        let lock_name = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { name().lock(&mut *tx).await }, ())
        };
        bench.drop_everywhere("NamedLock::lock", lock_name, nothing).await;

        // Somebody else holds the lock, and gives it back after the drop: it must not stay with who is gone.
        let blocked_row = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            row().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                row().lock(&mut *tx).await
            };
            (blocked, other)
        };
        let give_back = async |other: lockkit::Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
        bench.drop_everywhere("RowLock::lock of a locked row", blocked_row, give_back).await;

        let blocked_name = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                name().lock(&mut *tx).await
            };
            (blocked, other)
        };
        bench.drop_everywhere("NamedLock::lock of a locked name", blocked_name, give_back).await;
    }

    async fn versions_and_retries_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, .. } = &bench;
        let item = || VersionedRow::table("item").by("id", 1_i64);

        let read = async || {
            let mut conn = pool.acquire().await.unwrap();
            (async move { item().read::<(i64, i64, i64)>(&mut *conn).await }, ())
        };
        bench.drop_everywhere("VersionedRow::read", read, nothing).await;

        let bump = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            (async move { item().expect(version).bump(&mut *tx).await }, ())
        };
        bench.drop_everywhere("VersionedRow::bump", bump, nothing).await;

        let retry = async || {
            let attempt = async |number| {
                let mut tx = lockkit::begin(pool).await?;
                let version = item().read::<()>(&mut *tx).await?.version;
                // The first attempt makes a conflict of its own.
                item().expect(version.clone()).bump(&mut *tx).await?;
                if number == 1 {
                    item().expect(version).bump(&mut *tx).await?;
                }
                tx.commit().await
            };
            (Policy::new().attempts(3).retry(attempt), ())
        };
        bench.drop_everywhere("Policy::retry", retry, nothing).await;
    }

    async fn migrations_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, leases } = &bench;
        let migrate = async || {
            for table in ["lockkit_lease", "lockkit_named", "_lockkit_migrations"] {
                db.execute(&format!("DROP TABLE IF EXISTS {table}")).await;
            }
            (lockkit::migrate(pool), ())
        };
        let again = async |(): (), _: bool| {
            lockkit::migrate(pool).await.expect("run it again");
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        };
        // Making tables takes MySQL a quarter of a second each time.
        bench.drop_when(&[When::Asleep], "migrate", migrate, again).await;
    }
}

on_every_server! {
    async fn session_locks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let lock = || SessionLock::new("k").wait(PATIENCE);
        let session = async || lock().acquire(pool).await.unwrap();

        bench.drop_everywhere("SessionLock::acquire", async || (lock().acquire(pool), ()), nothing).await;
        bench.drop_everywhere("SessionLock::try_acquire", async || (lock().try_acquire(pool), ()), nothing).await;

        // Somebody else holds it, and releases it after the drop: the server must not grant it to who is gone.
        let blocked = async || (lock().acquire(pool), lock().acquire(&db.pool).await.unwrap());
        let release = async |other: lockkit::Session<_>, _: bool| other.release().await.unwrap();
        bench.drop_everywhere("SessionLock::acquire of a held lock", blocked, release).await;

        let is_alive = async || {
            let session = session().await;
            (async move { Ok(session.is_alive().await) }, ())
        };
        bench.drop_everywhere("Session::is_alive", is_alive, nothing).await;

        // What has been dropped must not spoil what is asked next.
        let asked = async || {
            let session = Arc::new(session().await);
            let asking = Arc::clone(&session);
            (async move { Ok(asking.is_alive().await) }, session)
        };
        let ask_again = async |session: Arc<lockkit::Session<_>>, _: bool| {
            assert!(session.is_alive().await);
        };
        bench.drop_everywhere("Session::is_alive, and again", asked, ask_again).await;

        let lost = async || {
            let session = session().await;
            let lost = async move {
                session.lost().await;
                Ok(())
            };
            (lost, ())
        };
        bench.drop_everywhere("Session::lost", lost, nothing).await;
        bench.drop_everywhere("Session::release", async || (session().await.release(), ()), nothing).await;
    }
}
