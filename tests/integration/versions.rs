//! Optimistic versions: integers, timestamps of every precision, and conflicts.

use lockkit::{Error, OrConflict, RetryPolicy, Version, Versioned, VersionedRow};
use sqlx::Connection;
use support::{JoinSet, Server, TestDb, on_every_database};

#[derive(Debug, sqlx::FromRow)]
struct Item {
    stock: i64,
}

on_every_database! {
    async fn a_version_moves_on_once_for_each_bump<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_items (item_id BIGINT PRIMARY KEY, stock BIGINT, version INT)").await;
        db.execute("INSERT INTO t_items VALUES (7, 5, 1), (8, 6, 1)").await;
        let item = || VersionedRow::table("t_items").by("item_id", 7_i64).version("version");

        let mut conn = db.pool.acquire().await.unwrap();
        let found: Versioned<Item> = item().read(&mut *conn).await.unwrap();
        assert_eq!((found.stock, &found.version), (5, &Version::Number(1)));

        assert_eq!(item().expected(found.version.clone()).bump(&mut *conn).await.unwrap(), Version::Number(2));
        let conflict = item().expected(found.version).bump(&mut *conn).await.unwrap_err();
        let Error::Conflict { table: Some(table), expected, found, .. } = &conflict else { panic!("{conflict:?}") };
        assert_eq!(
            (table.as_str(), expected, found),
            ("t_items", &Some(Version::Number(1)), &Some(Version::Number(2)))
        );
        assert!(conflict.is_conflict());
        assert_eq!(db.fetch_i64("SELECT version FROM t_items WHERE item_id = 8").await, Some(1));

        db.execute("DELETE FROM t_items WHERE item_id = 7").await;
        let gone = item().expected(2).bump(&mut *conn).await.unwrap_err();
        assert!(matches!(gone, Error::Conflict { found: None, .. }), "{gone:?}");
        assert!(matches!(item().read::<Item>(&mut *conn).await, Err(Error::NoSuchRow { .. })));
        assert!(matches!(item().bump(&mut *conn).await, Err(Error::InvalidOption { option: "expected", .. })));
    }

    async fn timestamps_serve_as_versions_at_every_precision<S>(db: TestDb<S>) {
        let kinds: &[&str] = match S::NAME {
            "PostgreSQL" => &[
                "timestamptz",
                "timestamptz(4)",
                "timestamptz(3)",
                "timestamptz(2)",
                "timestamptz(1)",
                "timestamptz(0)",
                "timestamp",
                "timestamp(0)",
            ],
            "SQLite" => &["TEXT", "TIMESTAMP"],
            _ => &[
                "DATETIME(6)",
                "DATETIME(5)",
                "DATETIME(3)",
                "DATETIME(2)",
                "DATETIME(1)",
                "DATETIME",
                "TIMESTAMP(6) NULL",
                "TIMESTAMP NULL",
            ],
        };
        for (number, kind) in kinds.iter().enumerate() {
            let table = format!("t_{number}");
            db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, stock BIGINT, changed {kind})")).await;
            db.execute(&format!("INSERT INTO {table} VALUES (1, 5, '2026-01-02 03:04:05')")).await;
            let row = || VersionedRow::table(&table).by("id", 1_i64).version("changed");
            let mut conn = lockkit::begin(&db.pool).await.unwrap();
            let first: Versioned<Item> = row().read(&mut *conn).await.unwrap();
            assert!(matches!(first.version, Version::Timestamp(_)), "{kind}: {:?}", first.version);

            // Faster than the clock of most precisions: every bump is a new version all the same.
            let mut seen = vec![first.version.clone()];
            for _ in 0..50 {
                let next = row().expected(seen.last().unwrap().clone()).bump(&mut *conn).await;
                let next = next.unwrap_or_else(|err| panic!("{kind}: {err}"));
                let read: Versioned<Item> = row().read(&mut *conn).await.unwrap();
                assert_eq!(read.version, next, "{kind}");
                assert!(!seen.contains(&read.version), "{kind}: {next} again");
                seen.push(read.version);
            }
            let conflict = row().expected(first.version).bump(&mut *conn).await.unwrap_err();
            assert!(conflict.is_conflict(), "{kind}: {conflict:?}");
            conn.rollback().await.unwrap();
        }
    }

    async fn a_write_of_ones_own_that_changes_no_row_is_a_conflict<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 1)").await;
        let write = "UPDATE t SET version = version + 1 WHERE id = 1 AND version = 1";
        sqlx::query(write).execute(&db.pool).await.unwrap().or_conflict().unwrap();
        let conflict = sqlx::query(write).execute(&db.pool).await.unwrap().or_conflict().unwrap_err();
        assert!(conflict.is_conflict());
        // Rows that match but do not change are matched all the same.
        sqlx::query("UPDATE t SET version = 2 WHERE id = 1").execute(&db.pool).await.unwrap().or_conflict().unwrap();
    }

    async fn a_version_that_may_be_rolled_back_is_not_handed_out<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, stock BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 5, 1)").await;
        let row = || VersionedRow::table("t").by("id", 1_i64);

        // Outside a transaction what was bumped is committed.
        let mut conn = db.pool.acquire().await.unwrap();
        let bumped = row().expected(1).bump(&mut *conn).await.unwrap();
        assert_eq!(bumped.committed(), Some(&Version::Number(2)));

        // Inside one it is good for that transaction only.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = row().expected(2).bump(&mut *tx).await.unwrap();
        assert_eq!(bumped, Version::Number(3));
        assert_eq!(bumped.committed(), None);
        let bumped = row().expected(bumped).bump(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
        let refused = row().expected(bumped).bump(&mut *conn).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "expected", .. }), "{refused:?}");
        assert_eq!(row().read::<Item>(&mut *conn).await.unwrap().version, Version::Number(2));

        // It is final with the commit, whoever began the transaction.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = row().expected(2).bump(&mut *tx).await.unwrap();
        assert_eq!(bumped.commit(tx).await.unwrap(), Version::Number(3));
        let mut tx = conn.begin().await.unwrap();
        let bumped = row().expected(3).bump(&mut *tx).await.unwrap();
        assert_eq!(bumped.commit(tx).await.unwrap(), Version::Number(4));
        assert_eq!(db.fetch_i64("SELECT version FROM t").await, Some(4));
    }

    async fn a_version_of_a_nested_transaction_is_not_handed_out<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, stock BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 5, 1)").await;
        let row = || VersionedRow::table("t").by("id", 1_i64);

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        let bumped = row().expected(1).bump(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        let refused = row().expected(bumped).bump(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "expected", .. }), "{refused:?}");

        let mut nested = (*tx).begin().await.unwrap();
        let bumped = row().expected(1).bump(&mut *nested).await.unwrap();
        nested.rollback().await.unwrap();
        let refused = bumped.commit(tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "commit", .. }), "{refused:?}");
        db.assert_nothing_left().await;

        // A bump before the savepoint is not touched by it.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let bumped = row().expected(1).bump(&mut *tx).await.unwrap();
        let mut nested = (*tx).begin().await.unwrap();
        S::execute(&mut nested, "UPDATE t SET stock = 0 WHERE id = 1").await.unwrap();
        nested.rollback().await.unwrap();
        assert_eq!(bumped.commit(tx).await.unwrap(), Version::Number(2));
        assert_eq!(db.fetch_i64("SELECT stock FROM t").await, Some(5));
    }

    async fn retries_end_a_race_without_a_lost_update<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, stock BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 0, 0)").await;
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                for _ in 0..10 {
                    let attempt = |_| async {
                        let row = || VersionedRow::table("t").by("id", 1_i64);
                        let mut tx = lockkit::begin(&pool).await?;
                        let found: Versioned<Item> = row().read(&mut *tx).await?;
                        row().expected(found.version.clone()).bump(&mut *tx).await?;
                        let write = format!("UPDATE t SET stock = {} WHERE id = 1", found.stock + 1);
                        S::execute(&mut tx, &write).await.unwrap();
                        tx.commit().await
                    };
                    RetryPolicy::new().attempts(1000).retry(attempt).await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT stock FROM t").await, Some(80));
        assert_eq!(db.fetch_i64("SELECT version FROM t").await, Some(80));
    }
}
