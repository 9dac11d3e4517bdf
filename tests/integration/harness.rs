//! Tests of what the other tests stand on.

use std::path::PathBuf;
use std::time::Duration;

use sqlx::{Connection, Database};
use support::{Proxy, Server, TestDb, on_every_database, on_every_server};
use tokio::time::timeout;

type Conn<S> = <<S as Server>::DB as Database>::Connection;

on_every_database! {
    async fn a_row_that_was_written_can_be_read<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE word (n INT, text VARCHAR(9))").await;

        assert_eq!(db.execute("INSERT INTO word VALUES (1, 'one'), (2, 'two')").await, 2);

        assert_eq!(db.fetch_text("SELECT text FROM word WHERE n = 2").await.as_deref(), Some("two"));
        assert_eq!(db.fetch_text("SELECT text FROM word WHERE n = 3").await, None);
    }

    async fn numbers_of_all_kinds_are_read<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE number (n INT)").await;
        db.execute("INSERT INTO number VALUES (2), (3)").await;

        assert_eq!(db.fetch_i64("SELECT SUM(n) FROM number").await, Some(5));
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM number").await, Some(2));
        assert_eq!(db.fetch_i64("SELECT 1 < 2").await, Some(1));
        assert_eq!(db.fetch_i64("SELECT MAX(n) FROM number WHERE n > 3").await, None);
    }

    async fn each_test_has_a_database_of_its_own<S>(db: TestDb<S>) {
        let other = TestDb::<S>::with_connections(2).await;

        db.execute("CREATE TABLE t (n INT)").await;
        other.execute("CREATE TABLE t (n INT)").await;
    }

    async fn another_pool_is_on_the_same_database<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;

        let other = db.pool_of(1).await;
        let mut conn = other.acquire().await.expect("acquire");
        S::execute(&mut conn, "INSERT INTO t VALUES (1)").await.expect("insert");

        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(1));
    }

    async fn an_open_transaction_is_left_over_until_it_ends<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        db.assert_nothing_left().await;

        let mut tx = db.pool.begin().await.expect("begin");
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.expect("insert");
        assert_ne!(db.leftovers().await, Vec::<String>::new());

        tx.rollback().await.expect("roll back");
        db.assert_nothing_left().await;
    }

    async fn the_version_that_was_tested_is_on_record<S>(db: TestDb<S>) {
        let version = db.fetch_text(S::VERSION).await.expect("a version");

        if let Some(folder) = std::env::var_os("LOCKKIT_VERSIONS") {
            std::fs::write(PathBuf::from(folder).join(S::NAME), version).expect("write the version");
        }
    }
}

on_every_server! {
    async fn a_transaction_that_has_done_nothing_is_left_over_too<S>(db: TestDb<S>) {
        let tx = db.pool.begin().await.expect("begin");
        assert_ne!(db.leftovers().await, Vec::<String>::new());

        drop(tx);
        db.assert_nothing_left().await;
    }

    async fn a_session_lock_is_left_over_until_it_is_released<S>(db: TestDb<S>) {
        let (lock, unlock) = match S::NAME {
            "PostgreSQL" => ("SELECT pg_advisory_lock(1)", "SELECT pg_advisory_unlock(1)"),
            _ => ("SELECT GET_LOCK(DATABASE(), 0)", "SELECT RELEASE_LOCK(DATABASE())"),
        };
        let mut conn = db.connect().await;
        S::execute(&mut conn, lock).await.expect("lock");
        assert_ne!(db.leftovers().await, Vec::<String>::new());

        S::execute(&mut conn, unlock).await.expect("unlock");
        db.assert_nothing_left().await;
    }

    async fn a_statement_on_a_warm_connection_is_one_round_trip<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let mut conn = Conn::<S>::connect(proxy.url()).await.expect("connect");
        let before = proxy.round_trips();

        S::execute(&mut conn, "SELECT 1").await.expect("select");
        assert_eq!(proxy.round_trips() - before, 1);
        S::execute(&mut conn, "SELECT 1").await.expect("select");
        assert_eq!(proxy.round_trips() - before, 2);
    }

    async fn a_stalled_statement_goes_on_afterwards<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let mut conn = Conn::<S>::connect(proxy.url()).await.expect("connect");

        proxy.stall(true);
        let mut statement = Box::pin(S::fetch_i64(&mut conn, "SELECT 1"));
        timeout(Duration::from_millis(100), &mut statement).await.expect_err("no answer while it is stalled");
        proxy.stall(false);
        assert_eq!(statement.await.expect("select"), Some(1));
    }

    async fn a_statement_whose_reply_is_dropped_was_run<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let proxy = Proxy::start(&db.url);
        let mut conn = Conn::<S>::connect(proxy.url()).await.expect("connect");

        proxy.drop_replies(true);
        let insert = S::execute(&mut conn, "INSERT INTO t VALUES (1)");
        timeout(Duration::from_millis(500), insert).await.expect_err("no answer");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
    }

    async fn a_connection_that_was_reset_fails_and_leaves_nothing<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let proxy = Proxy::start(&db.url);
        let mut conn = Conn::<S>::connect(proxy.url()).await.expect("connect");
        S::execute(&mut conn, "BEGIN; INSERT INTO t VALUES (1)").await.expect("begin and insert");

        proxy.reset();

        S::execute(&mut conn, "SELECT 1").await.expect_err("a broken connection");
        db.assert_nothing_left().await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(0));
        Conn::<S>::connect(proxy.url()).await.expect("connect again");
    }
}
