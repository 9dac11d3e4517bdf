//! Transactions, the locks in them, and migrations, dropped at every await.

use lockkit::testing::MemoryStore;
use lockkit::{Fence, Leases, NamedLock, RowLock};
use support::{Server, TestDb, on_every_database};

use super::{Bench, PATIENCE, nothing};

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
        let release = async |other: lockkit::Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
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
        let release = async |other: lockkit::Tx<<S as Server>::DB>, _: bool| other.rollback().await.unwrap();
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
