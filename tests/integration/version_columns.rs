//! What a version column may hold, and what is refused.

use lockkit::{Error, Version, Versioned, VersionedRow};
use support::{Server, TestDb, on_databases, on_every_database};

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t", key = "id")]
struct Row {
    id: i64,
    n: i64,
    version: i64,
}

#[derive(Debug, sqlx::FromRow)]
struct Content {
    n: i64,
}

fn is_database<T: std::fmt::Debug>(result: &Result<T, Error>) {
    assert!(matches!(result, Err(Error::Database { .. })), "{result:?}");
}

on_every_database! {
    async fn a_version_that_is_null_is_an_error<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT NOT NULL, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 5, NULL)").await;
        let row = || VersionedRow::table("t").by("id", 1_i64);
        let mut tx = db.pool.begin().await.unwrap();
        is_database(&row().read::<Content>(&mut *tx).await);
        is_database(&Row::load(&mut *tx, 1).await);
        for expected in [0, 1] {
            is_database(&row().expected(expected).bump(&mut *tx).await);
            is_database(&Row { id: 1, n: 6, version: expected.into() }.save(&mut *tx).await.map(drop));
        }
        tx.commit().await.unwrap();
        is_database(&Row::load(&db.pool, 1).await);
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t WHERE n = 5 AND version IS NULL").await, Some(1));
    }

    async fn a_version_that_is_neither_an_integer_nor_a_timestamp_is_an_error<S>(db: TestDb<S>) {
        let kinds: &[(&str, &str)] = match S::NAME {
            "PostgreSQL" => &[
                ("double precision", "1.5"),
                ("numeric", "1"),
                ("text", "'1'"),
                ("date", "'2026-01-02'"),
                ("interval", "'1 day'"),
            ],
            "SQLite" => &[
                ("REAL", "1"),
                ("INTEGER", "1.5"),
                ("INTEGER", "'abc'"),
                ("TEXT", "'1'"),
                ("TEXT", "'abc'"),
                ("BLOB", "x'3132'"),
            ],
            _ => &[
                ("DOUBLE", "1.5"),
                ("DECIMAL(5, 1)", "1"),
                ("VARCHAR(20)", "'1'"),
                ("DATE", "'2026-01-02'"),
                ("TIME", "'01:02:03'"),
            ],
        };
        let mut tx = db.pool.acquire().await.unwrap();
        for (number, (kind, value)) in kinds.iter().enumerate() {
            let table = format!("t_{number}");
            db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, n BIGINT NOT NULL, version \
                                 {kind})")).await;
            db.execute(&format!("INSERT INTO {table} VALUES (1, 5, {value})")).await;
            let read = VersionedRow::table(&table).by("id", 1_i64).read::<Content>(&mut *tx).await;
            assert!(matches!(read, Err(Error::Database { .. })), "{kind}: {read:?}");
        }
    }
}

on_databases! {
    [mariadb, mysql]
    async fn integers_of_every_width_are_versions<S>(db: TestDb<S>) {
        let mut conn = db.pool.acquire().await.unwrap();
        let kinds = ["TINYINT(1)", "TINYINT", "SMALLINT UNSIGNED", "MEDIUMINT", "INT", "BIGINT UNSIGNED"];
        for (number, kind) in kinds.iter().enumerate() {
            let table = format!("t_{number}");
            db.execute(&format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, n BIGINT NOT NULL, version \
                                 {kind})")).await;
            db.execute(&format!("INSERT INTO {table} VALUES (1, 5, 1)")).await;
            let row = || VersionedRow::table(&table).by("id", 1_i64);
            let read: Versioned<Content> = row().read(&mut *conn).await.unwrap();
            assert_eq!((read.n, &read.version), (5, &Version::Number(1)), "{kind}");
            assert_eq!(row().expected(read.version).bump(&mut *conn).await.unwrap(), Version::Number(2), "{kind}");
        }
    }
}
