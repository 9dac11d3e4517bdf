//! Every public future can be spawned, on every database: it is `Send`, and small unless it is seldom needed.
//!
//! `tests/source` fails when a public function that returns a future is not named and called by an [`is_send`] here.

use std::time::Duration;

use lockkit::idempotent::StoresErr;
use lockkit::{
    Error, Idempotent, Leases, NamedLock, RetryPolicy, RowLock, SessionLock, Stock, VersionedRow, VersionedStruct,
};
use support::{TestDb, on_every_database, on_every_server};

/// The size of a future in bytes that a task may have on its stack, or in its box. What sqlx does on a connection is
/// larger with TLS, which the command `lockkit` has, and so all that is built with it: the largest, the deletion of a
/// derived row on MySQL, has 6,816 bytes.
const MOST: usize = 7 * 1024;

/// Of set-up and repair, which may be larger.
const SELDOM: [&str; 2] = ["Stock::put", "Stock::rebalance"];

/// Compiles for a future that is `Send`. The name is that of the function that returns it, for `tests/source`.
fn is_send<T: Send>(function: &str, _: T) {
    let size = size_of::<T>();
    assert!(size <= MOST || SELDOM.contains(&function), "the future of {function} has {size} bytes");
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Refused;

impl From<Error> for Refused {
    fn from(_: Error) -> Self {
        Self
    }
}

fn stores_err() -> StoresErr<Refused> {
    Idempotent::key("k").store_err(|_: &Refused| true)
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t", key = "n")]
struct Item {
    n: i64,
    version: i64,
}

on_every_database! {
    async fn every_public_future_is_send<S>(db: TestDb<S>) {
        // Made, never polled; the leases and transactions that some of them need are real.
        let leases = Leases::new(db.pool.clone());
        let outside = Idempotent::key("k").outside(&leases, async |work| {
            is_send("idempotent::Outside::tx", work.tx());
            Ok::<_, Error>(())
        });
        outside.await.unwrap();
        is_send("migrate", lockkit::migrate(&db.pool));
        is_send("Leases::migrate", leases.migrate());
        is_send("Leases::show", leases.show("k"));
        is_send("Leases::list", leases.list("k"));
        is_send("Leases::expired", leases.expired("k"));
        is_send("Leases::steal", leases.steal("k"));
        is_send("Leases::steal_if", leases.steal_if("k", 1.into()));
        is_send("Leases::close", leases.close());
        is_send("LeaseRequest::acquire", leases.lease("k").acquire());
        is_send("LeaseRequest::try_acquire", leases.lease("k").try_acquire());
        is_send("LeaseRequest::run", leases.lease("k").run(|_| async { Ok::<_, Error>(()) }));
        is_send("LeaseRequest::lead", leases.lease("k").lead(|_| async { Ok::<_, Error>(()) }));
        is_send("LeaseRequest::acquire", leases.any(["k", "l"]).acquire());
        is_send("LeaseRequest::acquire", leases.semaphore("k", 2).take(2).acquire());
        is_send("LeaseRequest::try_acquire", leases.semaphore("k", 2).take(2).try_acquire());
        is_send("LeaseRequest::run", leases.semaphore("k", 2).take(2).run(|_| async { Ok::<_, Error>(()) }));

        is_send("LeaseRequest::acquire", leases.all(["k", "l"]).acquire());
        is_send("LeaseRequest::try_acquire", leases.all(["k", "l"]).try_acquire());
        is_send("LeaseRequest::run", leases.all(["k", "l"]).run(|_| async { Ok::<_, Error>(()) }));

        let (all, more) = (leases.all(["m", "n"]), leases.all(["o", "p"]));
        let (all, more) = (all.acquire().await.unwrap(), more.acquire().await.unwrap());
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        is_send("MultiLease::lost", all.lost());
        is_send("MultiLease::verify", all.verify(&mut tx));
        is_send("MultiLease::guard", all.guard(&mut tx));
        is_send("MultiLease::commit", all.commit(tx));
        is_send("MultiLease::release", more.release());

        let lease = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        is_send("Lease::lost", lease.lost());
        is_send("Lease::extend", lease.extend(Duration::from_secs(1)));
        is_send("Lease::verify", lease.verify(&mut tx));
        is_send("Idempotent::run", Idempotent::key("k").run(&db.pool, async |_| Ok::<_, Error>(())));
        is_send("idempotent::StoresErr::run", stores_err().run(&db.pool, async |_| Ok(())));
        is_send("Idempotent::outside", Idempotent::key("k").outside(&leases, async |_| Ok::<_, Error>(())));
        is_send("idempotent::StoresErr::outside", stores_err().outside(&leases, async |_| Ok(())));
        is_send("RowLock::lock", RowLock::table("t").by("n", 1_i64).lock(&mut *tx));
        is_send("RowLock::fetch_one", RowLock::table("t").by("n", 1_i64).fetch_one::<(i64,)>(&mut *tx));
        is_send("RowLock::fetch_optional", RowLock::table("t").by("n", 1_i64).fetch_optional::<(i64,)>(&mut *tx));
        is_send("RowLock::fetch_all", RowLock::table("t").by("n", 1_i64).fetch_all::<(i64,)>(&mut *tx));
        is_send("NamedLock::lock", NamedLock::new("k").lock(&mut *tx));
        let name = NamedLock::new("k");
        is_send("NamedLock::holder", name.holder(&mut *tx));
        is_send("NamedLock::holder", name.holder(&db.pool));
        is_send("VersionedRow::read", VersionedRow::table("t").by("n", 1_i64).read::<(i64,)>(&mut *tx));
        is_send("VersionedRow::bump", VersionedRow::table("t").by("n", 1_i64).bump(&mut *tx));
        is_send("a derived load", Item::load(&db.pool, 1));
        is_send("a derived load", Item::load(&mut *tx, 1));
        is_send("a derived save", Item { n: 1, version: 1 }.save(&db.pool));
        is_send("a derived save", Item { n: 1, version: 1 }.save(&mut *tx));
        is_send("VersionedStruct::save", VersionedStruct::save(&mut Item { n: 1, version: 1 }, &mut *tx));
        is_send("VersionedRow::delete", VersionedRow::table("t").by("n", 1_i64).delete(&mut *tx));
        is_send("a derived delete", Item { n: 1, version: 1 }.delete(&db.pool));
        is_send("a derived delete", Item { n: 1, version: 1 }.delete(&mut *tx));
        is_send("VersionedStruct::delete", VersionedStruct::delete(&Item { n: 1, version: 1 }, &mut *tx));
        let stock = Stock::new(db.pool.clone(), "k");
        is_send("Stock::take_in", stock.take_in(&mut *tx, 1));
        is_send("guard", lockkit::guard(&mut *tx, "domain", "k", lease.fence()));
        is_send("Lease::guard", lease.guard(&mut *tx));
        is_send("forget_fences", lockkit::forget_fences(&mut *tx, "domain"));
        is_send("forget_fences", lockkit::forget_fences(&db.pool, "domain"));
        is_send("Lease::commit", lease.commit(tx));
        is_send("Stock::put", stock.put(1));
        is_send("Stock::take", stock.take(1));
        is_send("Stock::left", stock.left());
        is_send("Stock::rebalance", stock.rebalance());

        db.execute("CREATE TABLE t (n BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 1)").await;
        let mut item = Item { n: 1, version: 1 };
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send("Saved::save", saved.save(&mut *tx));
        let saved = item.save(&mut *tx).await.unwrap_err();
        assert!(saved.is_conflict());
        drop(tx);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send("Saved::delete", saved.delete(&mut *tx));
        drop(tx);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let saved = item.save(&mut *tx).await.unwrap();
        is_send("Saved::commit", saved.commit(tx));
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = VersionedRow::table("t").by("n", 1_i64).expected(1).bump(&mut *tx).await.unwrap();
        is_send("Bumped::commit", bumped.commit(tx));

        is_send("begin", lockkit::begin(&db.pool));
        is_send("Tx::commit", lockkit::begin(&db.pool).await.unwrap().commit());
        is_send("Tx::rollback", lockkit::begin(&db.pool).await.unwrap().rollback());
        is_send("Lease::release", leases.lease("l").acquire().await.unwrap().release());
        is_send("RetryPolicy::retry", RetryPolicy::new().retry(|_| async { Ok::<_, Error>(()) }));
        is_send(
            "RetryPolicy::retry_if",
            RetryPolicy::new().retry_if(|_: &Error| true, |_| async { Ok::<_, Error>(()) }),
        );
    }
}

on_every_server! {
    async fn every_public_future_of_session_locks_is_send<S>(db: TestDb<S>) {
        is_send("SessionLock::acquire", SessionLock::new("k").acquire(&db.pool));
        is_send("SessionLock::try_acquire", SessionLock::new("k").try_acquire(&db.pool));
        let lock = SessionLock::new("k");
        is_send("SessionLock::holder", lock.holder(&db.pool));
        let session = SessionLock::new("k").acquire(&db.pool).await.unwrap();
        is_send("Session::is_alive", session.is_alive());
        is_send("Session::lost", session.lost());
        is_send("Session::release", session.release());
    }
}
