//! Every public future, dropped after every poll: nothing stays locked, no transaction stays open, and the pool is whole.
//!
//! `tests/source` fails when a public async function has no line here that begins with its name.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lockkit::testing::drop_at_every_await_of;
use lockkit::{
    Error, Lease, LeaseRequest, Leases, MultiLease, NamedLock, Policy, RowLock, SessionLock, Stock, VersionedRow,
    with_lock,
};
use sqlx::Pool;
use support::{Backend, Server, TestDb, on_every_database, on_every_server};
use tokio::task::yield_now;

/// The connections of the pool under test.
const CONNECTIONS: u32 = 3;

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// Of all tests of this process.
static FUTURES: AtomicU32 = AtomicU32::new(0);
static POINTS: AtomicU32 = AtomicU32::new(0);

/// The futures of one test: a database, and the pool that they run on.
struct Bench<S: Backend> {
    db: TestDb<S>,
    pool: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
}

type Made<S> = Lease<Pool<<S as Server>::DB>>;
type Request<S> = LeaseRequest<Pool<<S as Server>::DB>>;
type MadeAll<S> = MultiLease<Pool<<S as Server>::DB>>;

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

    /// Drops the future that `make` makes after each of its polls, until it is ready, and looks for what is left each time.
    ///
    /// `make` also returns what is kept while the future runs; `after` gets it back, to give up before the look.
    async fn drop_everywhere<Fut, Kept, T>(
        &self,
        name: &str,
        make: impl AsyncFnMut() -> (Fut, Kept),
        after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        self.drop_until(name, true, make, after).await;
    }

    /// As [`drop_everywhere`](Self::drop_everywhere), for a future that waits for somebody else in the end.
    async fn drop_blocked<Fut, Kept, T>(
        &self,
        name: &str,
        make: impl AsyncFnMut() -> (Fut, Kept),
        after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        self.drop_until(name, false, make, after).await;
    }

    async fn drop_until<Fut, Kept, T>(
        &self,
        name: &str,
        completes: bool,
        mut make: impl AsyncFnMut() -> (Fut, Kept),
        mut after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        let kept = RefCell::new(None);
        #[expect(clippy::async_yields_async, reason = "it is to be dropped, not awaited")]
        let prepare = async || {
            let (future, keep) = make().await;
            kept.replace(Some(keep));
            async move { drop(future.await.unwrap_or_else(|err| panic!("{name} on {}: {err}", S::NAME))) }
        };
        let look = async |completed| {
            let keep = kept.take().expect("made together with the future");
            after(keep, completed).await;
            self.db.assert_nothing_left().await;
        };
        let mut dropping = drop_at_every_await_of(prepare).named(format!("{name} on {}", S::NAME));
        if completes {
            dropping = dropping.blocked_after(PATIENCE);
        }
        // Making tables takes MySQL a quarter of a second each time.
        if name.ends_with("migrate") {
            dropping = dropping.asleep_only();
        }
        let drops = dropping.then(look).checking(&self.pool).await;
        assert_eq!(drops.completed, completes, "{name} on {}", S::NAME);
        let futures = FUTURES.fetch_add(1, Ordering::Relaxed) + 1;
        let points = POINTS.fetch_add(drops.points, Ordering::Relaxed) + drops.points;
        let (here, on) = (drops.points, S::NAME);
        println!("{name} on {on}: dropped at {here} points; so far {futures} futures at {points} points, nothing left");
    }

    async fn lease(&self) -> Made<S> {
        self.leases.lease("k").wait(PATIENCE).acquire().await.expect("acquire the lease")
    }

    async fn both(&self) -> MadeAll<S> {
        self.leases.all(["k", "l"]).wait(PATIENCE).acquire().await.expect("acquire the leases")
    }

    async fn two_rows_written(&self) -> lockkit::Tx<S::DB> {
        let mut tx = lockkit::begin(&self.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        tx
    }

    /// For futures that commit.
    async fn all_or_none(&self, completed: bool) {
        self.db.assert_nothing_left().await;
        let rows = self.db.fetch_i64("SELECT COUNT(*) FROM t").await.unwrap();
        assert!(if completed { rows == 2 } else { rows == 0 || rows == 2 }, "{rows} rows");
        self.db.execute("DELETE FROM t").await;
    }
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "item", key = "id")]
struct Item {
    id: i64,
    stock: i64,
    version: i64,
}

/// For futures that keep nothing and need nothing afterwards.
async fn nothing((): (), _completed: bool) {}

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

    async fn requests_for_leases_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;

        let requests: [(&str, &dyn Fn() -> Request<S>); 5] = [
            ("of a lease", &|| leases.lease("k").wait(PATIENCE)),
            ("fair", &|| leases.lease("k").wait(PATIENCE).fair()),
            ("of a permit", &|| leases.semaphore("k", 2).wait(PATIENCE)),
            ("to read", &|| leases.rw("k").read().wait(PATIENCE)),
            ("to write", &|| leases.rw("k").write().wait(PATIENCE)),
        ];
        for (which, request) in requests {
            let name = format!("LeaseRequest::acquire, {which}");
            bench.drop_everywhere(&name, async || (request().acquire(), ()), nothing).await;
            let name = format!("LeaseRequest::try_acquire, {which}");
            bench.drop_everywhere(&name, async || (request().try_acquire(), ()), nothing).await;
            let run = async || {
                let body = async |lease: Made<S>| {
                    let mut tx = lockkit::begin(pool).await?;
                    lease.verify(&mut tx).await?;
                    yield_now().await;
                    tx.commit().await
                };
                (Box::pin(request().run(body)), ())
            };
            bench.drop_everywhere(&format!("LeaseRequest::run, {which}"), run, nothing).await;
        }

        // Somebody else holds it, and releases it after the drop: it must not be granted to who is gone.
        let others = Leases::new(db.pool.clone());
        let release = async |other: Made<S>, _: bool| {
            other.release().await.unwrap();
        };
        for (which, request) in &requests[..2] {
            let blocked = async || (request().acquire(), others.lease("k").acquire().await.unwrap());
            bench.drop_blocked(&format!("LeaseRequest::acquire, {which} that is held"), blocked, release).await;
        }
        let reader = async || (requests[4].1().acquire(), others.rw("k").read().acquire().await.unwrap());
        bench.drop_blocked("LeaseRequest::acquire, to write while others read", reader, release).await;
        let writer = async || (requests[3].1().acquire(), others.rw("k").write().acquire().await.unwrap());
        bench.drop_blocked("LeaseRequest::acquire, to read while another writes", writer, release).await;
    }

    async fn requests_for_several_leases_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;
        let request = || leases.all(["k", "l", "m"]).wait(PATIENCE);

        bench.drop_everywhere("LeaseRequest::acquire, several keys", async || (request().acquire(), ()), nothing).await;
        bench.drop_everywhere("LeaseRequest::try_acquire, several keys", async || (request().try_acquire(), ()), nothing).await;
        let run = async || {
            let body = async |leases: MadeAll<S>| {
                let mut tx = lockkit::begin(pool).await?;
                leases.verify(&mut tx).await?;
                tx.commit().await
            };
            (Box::pin(request().run(body)), ())
        };
        bench.drop_everywhere("LeaseRequest::run, several keys", run, nothing).await;

        let others = Leases::new(db.pool.clone());
        let blocked = async || (request().acquire(), others.lease("l").acquire().await.unwrap());
        let release = async |other: Made<S>, _: bool| {
            other.release().await.unwrap();
        };
        bench.drop_blocked("LeaseRequest::acquire, several keys, one of which is held", blocked, release).await;
    }

    async fn requests_for_several_permits_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, leases, pool } = &bench;
        let request = || leases.semaphore("k", 4).take(3).wait(PATIENCE);

        bench.drop_everywhere("LeaseRequest::acquire, several permits", async || (request().acquire(), ()), nothing).await;
        bench.drop_everywhere("LeaseRequest::try_acquire, several permits", async || (request().try_acquire(), ()), nothing).await;
        let run = async || {
            let body = async |permits: MadeAll<S>| {
                let mut tx = lockkit::begin(pool).await?;
                permits.verify(&mut tx).await?;
                tx.commit().await
            };
            (Box::pin(request().run(body)), ())
        };
        bench.drop_everywhere("LeaseRequest::run, several permits", run, nothing).await;

        // What it gathers while it waits is given back.
        let others = Leases::new(db.pool.clone());
        let held = async || others.semaphore("k", 4).take(2).acquire().await.unwrap();
        let release = async |other: MadeAll<S>, _: bool| {
            other.release().await.unwrap();
        };
        let blocked = async || (request().acquire(), held().await);
        bench.drop_blocked("LeaseRequest::acquire, several permits, some of which are held", blocked, release).await;
    }

    async fn what_a_holder_asks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, leases, .. } = &bench;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;

        let verify = async || {
            let lease = bench.lease().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { lease.verify(&mut tx).await }, ())
        };
        bench.drop_everywhere("Lease::verify", verify, nothing).await;
        let commit = async || {
            let lease = bench.lease().await;
            (lease.commit(bench.two_rows_written().await), ())
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
        bench.drop_blocked("Lease::lost", lost, nothing).await;

        // What operators ask, of a lease that is held.
        let release = async |lease: Made<S>, _: bool| {
            lease.release().await.unwrap();
        };
        bench.drop_everywhere("Leases::show", async || (leases.show("k"), bench.lease().await), release).await;
        bench.drop_everywhere("Leases::list", async || (leases.list("k"), bench.lease().await), release).await;
        let closing = async || {
            let leases = Leases::new(pool.clone());
            let lease = leases.lease("k").wait(PATIENCE).acquire().await.unwrap();
            (async move { leases.close().await }, lease)
        };
        bench.drop_everywhere("Leases::close", closing, async |lease, _: bool| drop(lease)).await;
        bench.drop_everywhere("Leases::steal", async || (leases.steal("k"), bench.lease().await), release).await;
        let steal_if = async || {
            let lease = bench.lease().await;
            (leases.steal_if("k", lease.fence()), lease)
        };
        bench.drop_everywhere("Leases::steal_if", steal_if, release).await;
    }

    async fn what_a_holder_of_several_asks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { pool, .. } = &bench;
        let all_or_none = async |(): (), completed| bench.all_or_none(completed).await;

        let verify = async || {
            let both = bench.both().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { both.verify(&mut tx).await }, ())
        };
        bench.drop_everywhere("MultiLease::verify", verify, nothing).await;
        let commit = async || {
            let both = bench.both().await;
            (both.commit(bench.two_rows_written().await), ())
        };
        bench.drop_everywhere("MultiLease::commit", commit, all_or_none).await;
        bench.drop_everywhere("MultiLease::release", async || (bench.both().await.release(), ()), nothing).await;
        let lost = async || {
            let both = bench.both().await;
            (async move { Ok(both.lost().await) }, ())
        };
        bench.drop_blocked("MultiLease::lost", lost, nothing).await;
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
        let give_back = async |other: lockkit::Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
        let blocked_row = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            row().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                row().lock(&mut *tx).await
            };
            (blocked, other)
        };
        bench.drop_blocked("RowLock::lock of a locked row", blocked_row, give_back).await;
        let blocked_name = async || {
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *other).await.unwrap();
            let blocked = async move {
                let mut tx = lockkit::begin(pool).await?;
                name().lock(&mut *tx).await
            };
            (blocked, other)
        };
        bench.drop_blocked("NamedLock::lock of a locked name", blocked_name, give_back).await;
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

        let load = async || (Item::load(pool, 1), ());
        bench.drop_everywhere("Versioned::load", load, nothing).await;

        let save = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            (async move { item.save(pool).await.map(drop) }, ())
        };
        bench.drop_everywhere("Versioned::save", save, nothing).await;

        let save_in_tx = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { item.save(&mut *tx).await.map(drop) }, ())
        };
        bench.drop_everywhere("Versioned::save in a transaction", save_in_tx, nothing).await;

        let commit = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let tx = lockkit::begin(pool).await.unwrap();
            let saved = async move {
                let mut tx = tx;
                let saved = item.save(&mut *tx).await?;
                saved.commit(tx).await
            };
            (saved, ())
        };
        bench.drop_everywhere("Saved::commit", commit, nothing).await;

        let save_again = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            let again = async move {
                let mut saved = item.save(&mut *tx).await?;
                saved.stock += 1;
                saved.save(&mut *tx).await.map(drop)
            };
            (again, ())
        };
        bench.drop_everywhere("Saved::save", save_again, nothing).await;

        let delete = async || {
            let item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { item.delete(&mut *tx).await }, ())
        };
        bench.drop_everywhere("Versioned::delete in a transaction", delete, nothing).await;

        let delete_saved = async || {
            let mut item = Item::load(pool, 1).await.unwrap();
            let mut tx = lockkit::begin(pool).await.unwrap();
            let delete = async move {
                let saved = item.save(&mut *tx).await?;
                saved.delete(&mut *tx).await.map(drop)
            };
            (delete, ())
        };
        bench.drop_everywhere("Saved::delete", delete_saved, nothing).await;

        let delete_row = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            (async move { item().expect(version).delete(&mut *tx).await }, ())
        };
        bench.drop_everywhere("VersionedRow::delete", delete_row, nothing).await;

        let commit_bump = async || {
            let mut tx = lockkit::begin(pool).await.unwrap();
            let version = item().read::<()>(&mut *tx).await.unwrap().version;
            let bumped = item().expect(version).bump(&mut *tx).await.unwrap();
            (bumped.commit(tx), ())
        };
        bench.drop_everywhere("Bumped::commit", commit_bump, nothing).await;

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
        let policy = || Policy::new().attempts(3);
        bench.drop_everywhere("Policy::retry", async || (policy().retry(attempt), ()), nothing).await;
        let retry_if = async || (policy().retry_if(Error::is_conflict, attempt), ());
        bench.drop_everywhere("Policy::retry_if", retry_if, nothing).await;
    }

    async fn functions_under_the_attribute_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        type Db = Pool<<S as Server>::DB>;
        type Connection = <<S as Server>::DB as sqlx::Database>::Connection;

        async fn write(conn: &mut Connection) -> Result<(), Error> {
            S::execute(conn, "INSERT INTO t VALUES (1)").await.expect("insert");
            yield_now().await;
            S::execute(conn, "INSERT INTO t VALUES (2)").await.expect("insert");
            Ok(())
        }
        #[with_lock(named, on = pool, key = "k", tx = tx)]
        async fn named(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(row, on = pool, table = "item", by(id = 1_i64), tx = tx)]
        async fn row(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(version, on = pool, attempts = 2, tx = tx)]
        async fn version(pool: &Db) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(lease, on = leases, key = "k", tx = tx)]
        async fn lease(leases: &Leases<Db>) -> Result<(), Error> {
            write(&mut tx).await
        }
        #[with_lock(lease, on = leases, keys = ["k", "l"], tx = tx)]
        async fn leases_of_two(leases: &Leases<Db>) -> Result<(), Error> {
            write(&mut tx).await
        }

        let bench = Bench::<S>::new(db).await;
        let Bench { pool, leases, .. } = &bench;
        let all_or_none = async |(), completed| bench.all_or_none(completed).await;
        bench.drop_everywhere("a function with a named lock", async || (named(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function with a row lock", async || (row(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function with a version", async || (version(pool), ()), all_or_none).await;
        bench.drop_everywhere("a function with a lease", async || (lease(leases), ()), all_or_none).await;
        bench.drop_everywhere("a function with two leases", async || (leases_of_two(leases), ()), all_or_none).await;
    }

    async fn stocks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let stock = Stock::new(pool.clone(), "k").segments(4).wait(PATIENCE);
        let others = Stock::new(db.pool.clone(), "k").segments(4).wait(PATIENCE);

        let filled = async || {
            db.execute("DELETE FROM lockkit_stock").await;
            others.put(40).await.unwrap();
            stock.clone()
        };
        // Whatever happened, happened to all of it or to none.
        let all_or_none = |changed: u64| {
            let others = others.clone();
            move |completed: bool| {
                let others = others.clone();
                async move {
                    let deadline = Instant::now() + PATIENCE;
                    while !db.leftovers().await.is_empty() {
                        assert!(Instant::now() < deadline, "{}", db.leftovers().await.join("\n"));
                    }
                    let left = others.left().await.unwrap();
                    assert!(left == changed || left == 40 && !completed, "{left} left, {changed} expected");
                }
            }
        };
        macro_rules! drop_everywhere {
            ($name:literal, $left:literal, |$stock:ident| $work:expr) => {{
                let check = all_or_none($left);
                let make = async || {
                    let $stock = filled().await;
                    (async move { $work }, ())
                };
                bench.drop_everywhere($name, make, |(), completed| check(completed)).await;
            }};
        }
        drop_everywhere!("Stock::put", 47, |it| it.put(7).await);
        drop_everywhere!("Stock::take", 37, |it| it.take(3).await.map(drop));
        drop_everywhere!("Stock::take from several segments", 15, |it| it.take(25).await.map(drop));
        drop_everywhere!("Stock::left", 40, |it| it.left().await.map(drop));
        drop_everywhere!("Stock::rebalance", 40, |it| it.segments(3).rebalance().await);
        let check = all_or_none(40);
        let take_in = async || {
            let stock = filled().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { stock.take_in(&mut *tx, 25).await }, ())
        };
        bench.drop_everywhere("Stock::take_in", take_in, |(), completed| check(completed)).await;

        // Somebody else has taken all of it, and gives it back after the drop. The first statement may then still be on its
        // way; who had to wait is gone.
        let blocked = async || {
            let stock = filled().await;
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            others.take_in(&mut *other, 40).await.unwrap();
            (async move { stock.take(3).await }, other)
        };
        let check = all_or_none(37);
        let give_back = |other: lockkit::Tx<<S as Server>::DB>, completed| {
            let check = check(completed);
            async move {
                other.rollback().await.unwrap();
                check.await;
            }
        };
        bench.drop_blocked("Stock::take of what somebody else took", blocked, give_back).await;
    }

    async fn migrations_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, leases } = &bench;
        let no_tables = async || {
            for table in ["lockkit_lease", "lockkit_named", "_lockkit_migrations"] {
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

on_every_server! {
    async fn session_locks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        #[with_lock(session, on = pool, key = "k")]
        async fn function(pool: &Pool<<S as Server>::DB>) -> Result<(), Error> {
            yield_now().await;
            Ok(())
        }

        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let lock = || SessionLock::new("k").wait(PATIENCE);
        let session = async || lock().acquire(pool).await.unwrap();

        let holder = async || (async move { lock().holder(pool).await }, ());
        bench.drop_everywhere("SessionLock::holder", holder, nothing).await;
        bench.drop_everywhere("SessionLock::acquire", async || (lock().acquire(pool), ()), nothing).await;
        bench.drop_everywhere("SessionLock::try_acquire", async || (lock().try_acquire(pool), ()), nothing).await;

        // Somebody else holds it, and releases it after the drop: the server must not grant it to who is gone.
        let blocked = async || (lock().acquire(pool), lock().acquire(&db.pool).await.unwrap());
        let release = async |other: lockkit::Session<_>, _: bool| other.release().await.unwrap();
        bench.drop_blocked("SessionLock::acquire of a held lock", blocked, release).await;

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
        bench.drop_blocked("Session::lost", lost, nothing).await;
        bench.drop_everywhere("Session::release", async || (session().await.release(), ()), nothing).await;
        bench.drop_everywhere("a function with a session lock", async || (function(pool), ()), nothing).await;
    }
}
