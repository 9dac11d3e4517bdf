//! Transactions that were dropped a moment ago: nothing is locked, committed or expected as if they were still open.

use lockkit::{Error, Leases, NamedLock, RowLock, Stock, Version, VersionedRow};
use sqlx::Connection;
use support::{Backend, Server, TestDb, on_every_database};

/// What is wrong right after the drop is wrong in some rounds only.
const ROUNDS: i64 = 50;

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t", key = "id")]
struct Row {
    id: i64,
    n: i64,
    version: i64,
}

async fn row<S: Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT NOT NULL, version BIGINT NOT NULL)").await;
    db.execute("INSERT INTO t VALUES (1, 0, 1)").await;
}

fn refused<T: std::fmt::Debug>(option: &str, result: &Result<T, Error>) {
    assert!(matches!(result, Err(Error::InvalidOption { option: of, .. }) if *of == option), "{result:?}");
}

on_every_database! {
    async fn a_commit_right_after_a_nested_transaction_was_dropped_commits<S>(db: TestDb<S>) {
        row(&db).await;
        let leases = Leases::new(db.pool.clone());
        for round in 1..=ROUNDS {
            let lease = leases.lease("k").acquire().await.unwrap();
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            S::execute(&mut tx, "UPDATE t SET n = n + 1").await.unwrap();
            let mut nested = (*tx).begin().await.unwrap();
            S::execute(&mut nested, "UPDATE t SET n = n + 1000").await.unwrap();
            drop(nested);
            match round % 3 {
                0 => tx.commit().await.unwrap(),
                1 => lease.commit(tx).await.unwrap(),
                _ => {
                    let bumped = VersionedRow::table("t").by("id", 2_i64).expected(1);
                    let conflict = bumped.bump(&mut *tx).await.unwrap_err();
                    assert!(conflict.is_conflict(), "{conflict:?}");
                    let nested = (*tx).begin().await.unwrap();
                    drop(nested);
                    tx.commit().await.unwrap();
                }
            }
            assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(round));
        }
    }

    async fn a_lock_right_after_its_transaction_was_dropped_is_refused<S>(db: TestDb<S>) {
        row(&db).await;
        let stock = Stock::new(db.pool.clone(), "sku");
        stock.put(1000).await.unwrap();
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut conn = db.pool.acquire().await.unwrap();
        for _ in 0..ROUNDS {
            drop(conn.begin().await.unwrap());
            refused("row lock", &RowLock::table("t").by("id", 1_i64).lock(&mut *conn).await);
            drop(conn.begin().await.unwrap());
            refused("named lock", &NamedLock::new("n").lock(&mut *conn).await);
            drop(conn.begin().await.unwrap());
            refused("take_in", &stock.take_in(&mut *conn, 1).await);
            drop(conn.begin().await.unwrap());
            refused("verify", &lease.verify(&mut conn).await);
        }
        assert_eq!(stock.left().await.unwrap(), 1000);
        lease.release().await.unwrap();
    }

    async fn a_version_of_a_transaction_that_was_just_dropped_overwrites_nobody<S>(db: TestDb<S>) {
        row(&db).await;
        let row = || VersionedRow::table("t").by("id", 1_i64);
        let mut conn = db.pool.acquire().await.unwrap();
        let mut others = db.pool.acquire().await.unwrap();
        for version in 1..=4 * ROUNDS {
            let mut tx = conn.begin().await.unwrap();
            let bumped = row().expected(version).bump(&mut *tx).await.unwrap();
            drop(tx);
            if version % 2 == 0 {
                refused("expected", &row().expected(bumped).bump(&mut *conn).await);
                // On a server the rollback is sent with the next statement.
                S::execute(&mut conn, "SELECT 1").await.unwrap();
                assert_eq!(row().expected(version).bump(&mut *others).await.unwrap(), Version::Number(version + 1));
            } else {
                if S::NAME != "SQLite" {
                    S::execute(&mut conn, "SELECT 1").await.unwrap();
                }
                assert_eq!(row().expected(version).bump(&mut *others).await.unwrap(), Version::Number(version + 1));
                refused("expected", &row().expected(bumped).bump(&mut *conn).await);
            }
        }
        assert_eq!(db.fetch_i64("SELECT version FROM t").await, Some(4 * ROUNDS + 1));
    }

    async fn a_struct_saved_in_a_transaction_that_was_just_dropped_is_not_saved_on<S>(db: TestDb<S>) {
        row(&db).await;
        let mut conn = db.pool.acquire().await.unwrap();
        let mut row = Row::load(&db.pool, 1).await.unwrap();
        for round in 0..ROUNDS {
            row.n = round;
            let mut tx = conn.begin().await.unwrap();
            let saved = row.save(&mut *tx).await.unwrap();
            drop(tx);
            refused("expected", &saved.save(&mut *conn).await);
        }
        let _ = row.save(&mut *conn).await.unwrap();
        assert_eq!((row.version, db.fetch_i64("SELECT version FROM t").await), (2, Some(2)));
    }
}
