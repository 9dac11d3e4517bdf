//! Transactions that end well, and those that the database ended.

use std::time::Duration;

use lockkit::{Error, Fault, is_retryable};
use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use support::{Deadlock, Server, TestDb, on_databases, on_every_database};

on_every_database! {
    async fn what_is_committed_is_there_and_what_is_dropped_is_not<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        tx.commit().await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        tx.rollback().await.unwrap();

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (3)").await.unwrap();
        drop(tx);
        db.assert_nothing_left().await;
        assert_eq!(db.fetch_i64("SELECT SUM(n) FROM t").await, Some(1));
    }

    async fn connections_are_used_again_after_every_kind_of_end<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let pool = db.pool_of(1).await;
        for round in 0..12 {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            S::execute(&mut tx, &format!("INSERT INTO t VALUES ({round})")).await.unwrap();
            match round % 3 {
                0 => tx.commit().await.unwrap(),
                1 => tx.rollback().await.unwrap(),
                _ => drop(tx),
            }
            // The next user of the connection is in no transaction.
            let mut conn = pool.acquire().await.unwrap();
            assert!(!sqlx::Connection::is_in_transaction(&*conn));
            S::execute(&mut conn, "INSERT INTO t VALUES (100)").await.unwrap();
            drop(conn);
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t WHERE n = 100").await, Some(round + 1));
        }
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t WHERE n < 100").await, Some(4));
    }

    async fn nested_transactions_are_savepoints<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        let mut inner = sqlx::Connection::begin(&mut *tx).await.unwrap();
        S::execute(&mut inner, "INSERT INTO t VALUES (2)").await.unwrap();
        inner.rollback().await.unwrap();
        let mut inner = sqlx::Connection::begin(&mut *tx).await.unwrap();
        S::execute(&mut inner, "INSERT INTO t VALUES (4)").await.unwrap();
        inner.commit().await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT SUM(n) FROM t").await, Some(5));
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [postgres]
    async fn a_commit_after_a_swallowed_error_is_refused<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT PRIMARY KEY)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.expect_err("a duplicate");
        let refused = tx.commit().await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
        assert!(!refused.is_transient());
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        db.assert_nothing_left().await;
    }

    async fn reads_after_a_lock_see_what_is_committed_whatever_the_default_isolation<S>(db: TestDb<S>) {
        let name = db.fetch_text("SELECT current_database()").await.unwrap();
        db.execute(&format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")).await;
        let pool = db.pool_of(1).await;
        let mut tx = lockkit::begin(&pool).await.unwrap();
        let isolation = S::fetch_text(&mut tx, "SELECT current_setting('transaction_isolation')").await.unwrap();
        assert_eq!(isolation.as_deref(), Some("read committed"));
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_grant_whose_commit_fails_is_no_grant() {
    // Outside WAL a reader can keep a writer from committing.
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteConnectOptions::new()
        .filename(folder.path().join("t.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Delete)
        .busy_timeout(Duration::from_millis(100));
    let pool = SqlitePool::connect_with(options).await.unwrap();
    lockkit::migrate(&pool).await.unwrap();
    let mut reader = pool.begin().await.unwrap();
    sqlx::query("SELECT COUNT(*) FROM lockkit_lease").fetch_one(&mut *reader).await.unwrap();

    let leases = lockkit::Leases::new(pool.clone());
    let refused = leases.lease("k").try_acquire().await.unwrap_err();
    assert!(matches!(refused, Error::Database { fault: Fault::Contended, .. }), "{refused:?}");
    reader.rollback().await.unwrap();
    assert_eq!(leases.show("k").await.unwrap(), None);
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
}

on_databases! {
    [mariadb, mysql]
    async fn a_victim_in_a_session_without_autocommit_may_not_commit_either<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "SET autocommit = 0").await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1, 1)").await.unwrap();
        // What a deadlock does to its victim.
        S::execute(&mut tx, "ROLLBACK").await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2, 2)").await.unwrap();
        let refused = tx.commit().await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
    }

    async fn an_implicit_commit_is_not_taken_for_a_transaction<S>(db: TestDb<S>) {
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "CREATE TABLE made (n INT)").await.unwrap();
        let refused = tx.commit().await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [postgres, mariadb, mysql]
    async fn a_deadlock_victim_may_not_commit_and_is_worth_another_attempt<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 0), (2, 0)").await;
        let Deadlock { mut victim, error, survivor } = Deadlock::<S>::of(&db.pool).await;
        assert!(error.is_transient() && is_retryable(&error));

        // A lease does not make up for it, in a transaction of sqlx either.
        let leases = lockkit::Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut ended = db.pool.begin().await.unwrap();
        S::execute(&mut ended, "ROLLBACK").await.unwrap();
        let refused = lease.commit(ended).await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");

        // MySQL and MariaDB would run this outside of any transaction; PostgreSQL refuses it.
        let _ = S::execute(&mut victim, "SELECT 1").await;
        let refused = victim.commit().await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
        survivor.commit().await.unwrap();
        db.assert_nothing_left().await;
    }
}
