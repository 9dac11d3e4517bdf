//! Input that cannot work gets the error that names it, and nothing is left locked.

use std::time::Duration;

use lockkit::{Error, Fault, Leases, NamedLock, RetryPolicy, RowLock, VersionedRow, Wait};
use support::{Server, TestDb, on_every_database};

const DAY: Duration = Duration::from_hours(24);

on_every_database! {
    async fn bad_keys_are_refused_by_every_operation<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        for bad in ["", "a\0b", "a\nb", "\u{1b}[31m", &"x".repeat(256), &"é".repeat(128)] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let errors = [
                leases.lease(bad).acquire().await.unwrap_err(),
                leases.lease(bad).try_acquire().await.unwrap_err(),
                leases.lease(bad).run(|_| async { Ok::<_, Error>(()) }).await.unwrap_err(),
                leases.show(bad).await.unwrap_err(),
                leases.steal(bad).await.unwrap_err(),
                NamedLock::new(bad).lock(&mut *tx).await.unwrap_err(),
            ];
            for err in errors {
                assert!(matches!(err, Error::InvalidKey { .. }), "{bad:?}: {err:?}");
                assert!(!err.to_string().contains(['\0', '\n', '\u{1b}']), "{err}");
            }
            tx.commit().await.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_lease").await, Some(0));
        db.assert_nothing_left().await;
    }

    async fn bad_durations_and_counts_are_refused_with_the_name_of_the_option<S>(db: TestDb<S>) {
        let option = |result: Result<(), Error>| match result {
            Err(Error::InvalidOption { option, .. }) => option,
            other => panic!("{other:?}"),
        };
        let leases = Leases::new(db.pool.clone());
        let lease = || leases.lease("k");
        assert_eq!(option(lease().ttl(Duration::ZERO).acquire().await.map(drop)), "ttl");
        assert_eq!(option(lease().ttl(Duration::from_nanos(1)).acquire().await.map(drop)), "ttl");
        assert_eq!(option(lease().ttl(Duration::MAX).try_acquire().await.map(drop)), "ttl");
        assert_eq!(option(lease().ttl(366 * DAY).try_acquire().await.map(drop)), "ttl");
        assert_eq!(option(lease().wait(Duration::MAX).acquire().await.map(drop)), "wait");

        let builder = || Leases::builder(db.pool.clone());
        assert_eq!(option(builder().ttl(Duration::ZERO).build().map(drop)), "ttl");
        assert_eq!(option(builder().wait(Duration::MAX).build().map(drop)), "wait");
        assert_eq!(option(builder().renew_every(Duration::ZERO).build().map(drop)), "renew_every");
        assert_eq!(option(builder().renew_every(Duration::from_secs(30)).build().map(drop)), "renew_every");
        assert_eq!(option(builder().sweep_every(Duration::ZERO).build().map(drop)), "sweep_every");
        assert_eq!(option(builder().holder("").build().map(drop)), "holder");
        assert_eq!(option(builder().holder("a\nb").build().map(drop)), "holder");

        let held = lease().acquire().await.unwrap();
        assert_eq!(option(held.extend(Duration::ZERO).await), "ttl");
        assert!(held.is_trusted());

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let absurd = Wait::AtMost(Duration::MAX);
        let row = RowLock::table("lockkit_lease").by("name", "k").wait(absurd);
        assert_eq!(option(row.lock(&mut *tx).await.map(drop)), "wait");
        assert_eq!(option(NamedLock::new("k").wait(absurd).lock(&mut *tx).await), "wait");
        let nothing = RowLock::table("lockkit_lease").by_any("name", Vec::<String>::new());
        assert_eq!(option(nothing.lock(&mut *tx).await.map(drop)), "by_any");
        assert_eq!(option(RowLock::table("lockkit_lease").lock(&mut *tx).await.map(drop)), "by");
        tx.rollback().await.unwrap();

        let never = async |_| Err::<(), _>(lockkit::Key::new("").unwrap_err());
        assert_eq!(option(RetryPolicy::new().attempts(0).retry(never).await), "attempts");
        assert_eq!(option(RetryPolicy::new().deadline(Duration::ZERO).retry(never).await), "deadline");
        assert_eq!(option(RetryPolicy::new().deadline(Duration::MAX).retry(never).await), "deadline");

        // The longest and shortest that are meant to work do.
        drop(leases.lease("long").ttl(365 * DAY).wait(Duration::ZERO).acquire().await.unwrap());
        drop(leases.lease("short").ttl(Duration::from_millis(50)).acquire().await.unwrap());
    }

    async fn identifiers_that_could_leave_their_quotes_are_refused<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, version BIGINT)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for bad in ["", "t\"", "t`", "t'", "t;", "a.b.c", "t t", "tâble", "t\0", "1t", "t--", &"t".repeat(64)] {
            let errors = [
                RowLock::table(bad).by("id", 1_i64).lock(&mut *tx).await.unwrap_err(),
                RowLock::table("t").by(bad, 1_i64).lock(&mut *tx).await.unwrap_err(),
                RowLock::table("t").by("id", 1_i64).order_by(bad).lock(&mut *tx).await.unwrap_err(),
                VersionedRow::table(bad).by("id", 1_i64).expected(1).bump(&mut *tx).await.unwrap_err(),
                VersionedRow::table("t").by(bad, 1_i64).expected(1).bump(&mut *tx).await.unwrap_err(),
                VersionedRow::table("t").by("id", 1_i64).version(bad).expected(1).bump(&mut *tx).await.unwrap_err(),
            ];
            for err in errors {
                assert!(matches!(err, Error::InvalidIdentifier { .. }), "{bad:?}: {err:?}");
            }
        }
        // Words that SQL reserves are names like any other.
        S::execute(&mut tx, "SELECT 1").await.unwrap();
        tx.rollback().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn values_are_bound_and_never_read_as_sql<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (name VARCHAR(60) PRIMARY KEY, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES ('x', 1)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let injected = RowLock::table("t").by("name", "x' OR '1'='1").lock(&mut *tx).await;
        assert!(matches!(injected, Err(Error::NoSuchRow { .. })), "{injected:?}");
        tx.rollback().await.unwrap();
    }

    async fn a_table_or_column_that_is_missing_is_a_database_error_with_its_name<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY)").await;
        for lock in [RowLock::table("nowhere").by("id", 1_i64), RowLock::table("t").by("nothing", 1_i64)] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let err = lock.lock(&mut *tx).await.unwrap_err();
            assert!(matches!(&err, Error::Database { fault: Fault::NoTable, key: Some(_), .. }), "{err:?}");
            tx.rollback().await.unwrap();
        }
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let err = VersionedRow::table("t").by("id", 1_i64).expected(1).bump(&mut *tx).await.unwrap_err();
        assert!(matches!(&err, Error::Database { fault: Fault::NoTable, .. }), "{err:?}");
        tx.rollback().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_database_that_may_not_be_written_says_so<S>(db: TestDb<S>) {
        let read_only = match S::NAME {
            "PostgreSQL" => "SET default_transaction_read_only = on",
            "SQLite" => "PRAGMA query_only = on",
            _ => "SET SESSION TRANSACTION READ ONLY",
        };
        let pool = db.pool_of(1).await;
        let mut conn = pool.acquire().await.unwrap();
        S::execute(&mut conn, read_only).await.unwrap();
        drop(conn);
        let leases = Leases::new(pool.clone());
        let refused = leases.lease("k").try_acquire().await.unwrap_err();
        assert!(matches!(refused, Error::Database { fault: Fault::ReadOnly, .. }), "{refused:?}");
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    async fn a_closed_pool_is_an_error_and_not_a_hang<S>(db: TestDb<S>) {
        let pool = db.pool_of(2).await;
        let leases = Leases::new(pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        pool.close().await;
        let unavailable = |err: Error| {
            assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
        };
        unavailable(leases.lease("other").acquire().await.unwrap_err());
        unavailable(leases.lease("other").try_acquire().await.unwrap_err());
        unavailable(lockkit::begin(&pool).await.unwrap_err());
        unavailable(lease.release().await.unwrap_err());
    }
}
