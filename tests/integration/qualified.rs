//! Tables that are named with their schema, database or attached file.

use lockkit::{Error, RowLock, Version, VersionedRow};
use sqlx::Connection;
use support::{Server, TestDb, on_databases, on_every_database};

on_databases! {
    [postgres]

    async fn a_table_of_another_schema_is_locked_and_saved_there<S>(db: TestDb<S>) {
        db.execute("CREATE SCHEMA app").await;
        for schema in ["app", "public"] {
            db.execute(&format!("CREATE TABLE {schema}.t_items (id BIGINT, n BIGINT, version BIGINT)")).await;
            db.execute(&format!("INSERT INTO {schema}.t_items VALUES (1, 5, 1)")).await;
        }
        db.execute("CREATE UNIQUE INDEX by_id ON app.t_items (id)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(RowLock::table("app.t_items").by("id", 1_i64).lock(&mut *tx).await.unwrap(), 1);
        let refused = RowLock::table("public.t_items").by("id", 1_i64).lock(&mut *tx).await.unwrap_err();
        assert!(matches!(&refused, Error::FullScan { table, .. } if *table == "public.t_items"), "{refused:?}");
        tx.commit().await.unwrap();

        let mut item = InSchema::load(&db.pool, 1).await.unwrap();
        item.n = 4;
        item.save(&db.pool).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT n FROM app.t_items").await, Some(4));
        assert_eq!(db.fetch_i64("SELECT n FROM public.t_items").await, Some(5));
    }
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "app.t_items", key = "id")]
struct InSchema {
    id: i64,
    n: i64,
    version: i64,
}

on_databases! {
    [mariadb, mysql]

    async fn a_table_of_another_database_is_locked_there<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_items (id BIGINT PRIMARY KEY, n BIGINT, version BIGINT)").await;
        db.execute("CREATE INDEX by_n ON t_items (n)").await;
        db.execute("INSERT INTO t_items VALUES (1, 5, 1), (2, 5, 1), (3, 6, 1)").await;
        let here = db.fetch_text("SELECT DATABASE()").await.unwrap();
        let table = format!("{here}.t_items");
        let mut conn = db.connect().await;
        S::execute(&mut conn, "USE information_schema").await.unwrap();
        let mut tx = conn.begin().await.unwrap();
        assert_eq!(RowLock::table(&table).by("id", 1_i64).lock(&mut *tx).await.unwrap(), 1);
        assert_eq!(RowLock::table(&table).by_any("id", [1_i64, 2]).lock(&mut *tx).await.unwrap(), 2);
        let queue = RowLock::table(&table).order_by("n").limit(1).skip_locked();
        assert_eq!(queue.lock(&mut *tx).await.unwrap(), 1);
        let bumped = VersionedRow::table(&table).by("id", 1_i64).expected(1).bump(&mut *tx).await.unwrap();
        assert_eq!(bumped, Version::Number(2));
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT SUM(version) FROM t_items").await, Some(4));
    }
}

on_databases! {
    [sqlite]

    async fn a_table_of_an_attached_file_is_locked_there<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_items (id BIGINT PRIMARY KEY, n BIGINT, version BIGINT)").await;
        db.execute("INSERT INTO t_items VALUES (1, 5, 1)").await;
        let mut conn = db.pool.acquire().await.unwrap();
        S::execute(&mut conn, "CREATE TEMP TABLE t_items (id BIGINT, n BIGINT, version BIGINT)").await.unwrap();
        S::execute(&mut conn, "INSERT INTO temp.t_items VALUES (1, 9, 1)").await.unwrap();
        let mut tx = conn.begin().await.unwrap();
        let (_, n, _): (i64, i64, i64) =
            RowLock::table("main.t_items").by("id", 1_i64).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(n, 5);
        let refused = RowLock::table("temp.t_items").by("id", 1_i64).lock(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::FullScan { .. }), "{refused:?}");
        let bumped = VersionedRow::table("main.t_items").by("id", 1_i64).expected(1).bump(&mut *tx).await.unwrap();
        assert_eq!(bumped, Version::Number(2));
        tx.commit().await.unwrap();
        drop(conn.close().await);
    }
}

on_every_database! {
    async fn both_parts_of_a_name_are_checked<S>(db: TestDb<S>) {
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        for bad in [".t", "app.", ".", "a.b.c", "app.t\"", "a`p.t", "1app.t", "app.1t", "app .t", "\"app\".t"] {
            let refused = RowLock::table(bad).by("id", 1_i64).lock(&mut *tx).await.unwrap_err();
            assert!(matches!(refused, Error::InvalidIdentifier { .. }), "{bad:?}: {refused:?}");
            let refused = VersionedRow::table(bad).by("id", 1_i64).expected(1).bump(&mut *tx).await.unwrap_err();
            assert!(matches!(refused, Error::InvalidIdentifier { .. }), "{bad:?}: {refused:?}");
        }
        // A column has no schema.
        let refused = RowLock::table("t").by("app.id", 1_i64).lock(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidIdentifier { .. }), "{refused:?}");
        tx.rollback().await.unwrap();
    }
}
