//! Transactions that the database ended: what follows in them changes nothing, and frees no lease.

use std::time::Duration;

use lockkit::{Error, Leases, NamedLock, RowLock, Stock};
use sqlx::{Connection, SqlitePool, sqlite::SqlitePoolOptions};
use support::{Deadlock, Server, TestDb, on_databases, on_every_database};
use tokio::time::timeout;

on_databases! {
    [postgres, mariadb, mysql]
    async fn the_refused_commit_of_a_deadlock_victim_frees_no_lease<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 0), (2, 0)").await;
        let leases = Leases::new(db.pool.clone());
        let others = Leases::new(db.pool_of(2).await);
        let Deadlock { victim, survivor, .. } = Deadlock::<S>::of(&db.pool).await;
        let run = leases.lease("k").run(async |lease| {
            let before = others.show("k").await?.unwrap();
            let share = lease.share();
            let refused = lease.commit(victim).await.unwrap_err();
            assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
            survivor.rollback().await?;
            assert!(share.is_trusted());
            let after = others.show("k").await?.expect("the lease is still held");
            assert_eq!(after.fence, before.fence);
            assert!(others.lease("k").try_acquire().await?.is_none());
            Ok::<_, Error>(())
        });
        run.await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn what_follows_a_deadlock_victim_is_never_committed<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 0), (2, 0)").await;
        for end in ["commit", "rollback", "drop"] {
            let Deadlock { mut victim, survivor, .. } = Deadlock::<S>::of(&db.pool).await;
            survivor.commit().await.unwrap();
            // PostgreSQL refuses them.
            for id in 3..5 {
                let _ = S::execute(&mut victim, &format!("INSERT INTO t VALUES ({id}, 0)")).await;
            }
            match end {
                "commit" => {
                    let refused = victim.commit().await.unwrap_err();
                    assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
                }
                "rollback" => victim.rollback().await.unwrap(),
                _ => drop(victim),
            }
            db.assert_nothing_left().await;
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(2), "after {end}");
        }
    }
}

on_databases! {
    [sqlite, mariadb, mysql]
    async fn the_refused_commit_of_a_transaction_that_ended_by_itself_frees_no_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let others = Leases::new(db.pool.clone());
        // What a deadlock does to its victim, and SQLite's `INSERT OR ROLLBACK`, or a full disk, to the transaction.
        let run = leases.lease("k").run(async |lease| {
            let mut ended = lockkit::begin(&db.pool).await?;
            S::execute(&mut ended, "ROLLBACK").await.unwrap();
            let refused = lease.share().commit(ended).await.unwrap_err();
            assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
            assert!(lease.is_trusted());
            assert!(others.lease("k").try_acquire().await?.is_none());

            let mut ended = db.pool.begin().await.unwrap();
            S::execute(&mut ended, "ROLLBACK").await.unwrap();
            let refused = lease.share().commit(ended).await.unwrap_err();
            assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
            assert!(lease.is_trusted());
            assert!(others.lease("k").try_acquire().await?.is_none());
            Ok::<_, Error>(())
        });
        run.await.unwrap();
    }
}

on_databases! {
    [postgres]
    async fn a_lease_commit_after_a_failed_statement_is_refused_as_any_commit<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut tx, "SELECT 1 / 0").await.unwrap_err();
        let refused = lease.share().commit(tx).await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");

        let mut tx = db.pool.begin().await.unwrap();
        S::execute(&mut tx, "SELECT 1 / 0").await.unwrap_err();
        let refused = lease.share().commit(tx).await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
        assert!(lease.is_trusted());
        lease.release().await.unwrap();
    }

    async fn a_commit_after_the_servers_idle_timeout_is_known_to_have_failed<S>(db: TestDb<S>) {
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let pid = S::fetch_i64(&mut tx, "SELECT pg_backend_pid()").await.unwrap().unwrap();
        S::execute(&mut tx, "SET idle_in_transaction_session_timeout = '20ms'").await.unwrap();
        while db.fetch_i64(&format!("SELECT 1 FROM pg_stat_activity WHERE pid = {pid}")).await.is_some() {}
        let refused = tx.commit().await.unwrap_err();
        assert!(matches!(refused, Error::TransactionEnded { .. }), "{refused:?}");
    }
}

on_databases! {
    [mariadb, mysql]
    async fn the_session_is_not_left_without_autocommit_by_a_runtime_that_ends<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        for end in ["commit", "rollback", "drop"] {
            // Of this runtime, so that it outlives the other one.
            drop(pool.acquire().await.unwrap());
            let other = pool.clone();
            let ended = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let tx = lockkit::begin(&other).await.unwrap();
                    match end {
                        "commit" => tx.commit().await.unwrap(),
                        "rollback" => tx.rollback().await.unwrap(),
                        _ => drop(tx),
                    }
                });
            });
            tokio::task::spawn_blocking(|| ended.join().unwrap()).await.unwrap();
            let mut conn = pool.acquire().await.unwrap();
            let autocommit = S::fetch_i64(&mut conn, "SELECT @@autocommit + 0").await.unwrap();
            assert_eq!(autocommit, Some(1), "after {end}");
        }
    }

    async fn the_session_is_as_before_after_every_kind_of_end<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        for autocommit in [1, 0] {
            S::execute(&mut pool.acquire().await.unwrap(), &format!("SET autocommit = {autocommit}")).await.unwrap();
            for end in ["commit", "rollback", "drop", "ended", "lease", "named", "named, dropped half-way"] {
                let lease = Leases::new(db.pool.clone()).lease("k").acquire().await.unwrap();
                let used = S::fetch_i64(&mut pool.acquire().await.unwrap(), "SELECT CONNECTION_ID()").await.unwrap();
                let mut tx = lockkit::begin(&pool).await.unwrap();
                match end {
                    "commit" => tx.commit().await.unwrap(),
                    "rollback" => tx.rollback().await.unwrap(),
                    "drop" => drop(tx),
                    "ended" => {
                        S::execute(&mut tx, "ROLLBACK").await.unwrap();
                        tx.commit().await.unwrap_err();
                    }
                    "named" => {
                        NamedLock::new("k").lock(&mut *tx).await.unwrap();
                        tx.commit().await.unwrap();
                    }
                    "named, dropped half-way" => {
                        let mut holder = lockkit::begin(&db.pool).await.unwrap();
                        NamedLock::new("k").lock(&mut *holder).await.unwrap();
                        let waiting = NamedLock::new("k").lock(&mut *tx);
                        assert!(timeout(Duration::from_millis(200), waiting).await.is_err());
                        holder.rollback().await.unwrap();
                        drop(tx);
                    }
                    _ => lease.commit(tx).await.unwrap(),
                }
                let mut conn = pool.acquire().await.unwrap();
                if end != "named, dropped half-way" {
                    let now = S::fetch_i64(&mut conn, "SELECT CONNECTION_ID()").await.unwrap();
                    assert_eq!(now, used, "the connection was closed after {end}");
                }
                let session = "SELECT CONCAT_WS(' ', @@autocommit + 0, @lockkit_read_committed, @lockkit_wait,
                                                IF(@@innodb_lock_wait_timeout = 50, NULL, @@innodb_lock_wait_timeout))";
                let session = S::fetch_text(&mut conn, session).await.unwrap().unwrap();
                // A new connection, because a statement was on its way on the old one.
                let expected = if end == "named, dropped half-way" { 1 } else { autocommit };
                assert_eq!(session, expected.to_string(), "after {end}");
            }
        }
    }
}

on_databases! {
    [postgres, mariadb, mysql]
    async fn a_refused_commit_on_a_connection_of_ones_own_locks_no_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        let mut theirs = db.pool.begin().await.unwrap();
        S::execute(&mut theirs, "DELETE FROM lockkit_lease WHERE name = 'b'").await.unwrap();
        let mut conn = db.connect().await;
        let bound =
            if S::NAME == "PostgreSQL" { "SET lock_timeout = '200ms'" } else { "SET innodb_lock_wait_timeout = 1" };
        S::execute(&mut conn, bound).await.unwrap();
        let tx = Connection::begin(&mut conn).await.unwrap();

        both.commit(tx).await.unwrap_err();

        theirs.rollback().await.unwrap();
        // The connection is not used again, and goes on living.
        let others = Leases::new(db.pool_of(1).await);
        drop(others.lease("a").wait(Duration::from_secs(10)).acquire().await.unwrap());
        drop(conn);
    }
}

on_every_database! {
    /// sqlx rolls back the outer transaction when it could not begin a nested one. SQLite's worker thread does so
    /// later.
    async fn a_transaction_whose_nested_one_could_not_begin_takes_no_lock_and_is_not_committed<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_outer (id BIGINT PRIMARY KEY)").await;
        db.execute("INSERT INTO t_outer VALUES (1)").await;
        let stock = Stock::new(db.pool.clone(), "sku");
        stock.put(5).await.unwrap();
        for then in ["commit", "row", "name", "stock"] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            S::execute(&mut tx, "INSERT INTO t_outer VALUES (2)").await.unwrap();
            assert!(Connection::begin_with(&mut *tx, "BEGIN").await.is_err());
            let refused = match then {
                "row" => RowLock::table("t_outer").by("id", 1_i64).lock(&mut tx).await.map(drop),
                "name" => NamedLock::new("name").lock(&mut tx).await,
                "stock" => stock.take_in(&mut tx, 1).await.map(drop),
                _ => Ok(()),
            };
            assert_eq!(then == "commit", refused.is_ok(), "{then}: {refused:?}");
            let committed = tx.commit().await;
            assert!(committed.is_err(), "{then}: nothing was committed");
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t_outer").await, Some(1), "{then}");
            db.assert_nothing_left().await;
        }
        assert_eq!(stock.left().await.unwrap(), 5);
    }
}

on_databases! {
    // With autocommit off, what follows the rollback of sqlx begins a transaction that sqlx does not count.
    [mariadb, mysql]
    async fn what_follows_a_nested_transaction_that_could_not_begin_is_never_committed<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_outer (id BIGINT PRIMARY KEY)").await;
        let leases = Leases::builder(db.pool.clone()).renew_every(Duration::from_millis(50)).build().unwrap();
        for end in ["commit", "rollback", "drop", "lease", "lost lease"] {
            let lease = leases.lease("k").acquire().await.unwrap();
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            assert!(Connection::begin_with(&mut *tx, "BEGIN").await.is_err());
            S::execute(&mut tx, "INSERT INTO t_outer VALUES (1)").await.unwrap();
            match end {
                "commit" => assert!(tx.commit().await.is_err()),
                "rollback" => tx.rollback().await.unwrap(),
                "drop" => drop(tx),
                "lease" => assert!(lease.commit(tx).await.is_err()),
                _ => {
                    leases.steal("k").await.unwrap();
                    lease.lost().await;
                    assert!(lease.commit(tx).await.unwrap_err().is_lost());
                }
            }
            db.assert_nothing_left().await;
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t_outer").await, Some(0), "after {end}");
        }
    }
}

/// A database in memory is lost with its connection.
async fn in_memory() -> SqlitePool {
    let pool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
    sqlx::raw_sql("CREATE TABLE t (id INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").execute(&pool).await.unwrap();
    pool
}

async fn rows(pool: &SqlitePool) -> i64 {
    sqlx::query_scalar("SELECT COUNT(*) FROM t").fetch_one(pool).await.unwrap()
}

#[tokio::test]
async fn a_connection_whose_transaction_has_ended_by_itself_is_kept() {
    let pool = in_memory().await;
    for end in ["commit", "rollback", "drop", "nested"] {
        let mut tx = lockkit::begin(&pool).await.unwrap();
        sqlx::query("INSERT INTO t VALUES (2)").execute(&mut *tx).await.unwrap();
        let fail = "INSERT OR ROLLBACK INTO t VALUES (1)";
        if end == "nested" {
            let mut nested = Connection::begin(&mut *tx).await.unwrap();
            assert!(sqlx::query(fail).execute(&mut *nested).await.is_err());
            std::mem::forget(nested);
        } else {
            assert!(sqlx::query(fail).execute(&mut *tx).await.is_err());
        }
        match end {
            "commit" => assert!(matches!(tx.commit().await, Err(Error::TransactionEnded { .. }))),
            "rollback" => tx.rollback().await.unwrap(),
            _ => drop(tx),
        }
        assert_eq!(rows(&pool).await, 1, "{end}");
    }
}

/// What is begun next on the connection of an end that was dropped is committed or rolled back as it says.
#[tokio::test]
async fn an_end_that_is_dropped_leaves_the_next_transactions_of_its_connection_alone() {
    let pool = in_memory().await;
    for (number, end) in ["commit", "rollback"].repeat(10).into_iter().enumerate() {
        let limit = Duration::from_micros(number as u64 * 10);
        let mut tx = lockkit::begin(&pool).await.unwrap();
        sqlx::query("DELETE FROM t").execute(&mut *tx).await.unwrap();
        match end {
            "commit" => drop(timeout(limit, tx.commit()).await),
            _ => drop(timeout(limit, tx.rollback()).await),
        }
        let before = rows(&pool).await;
        let mut next = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO t VALUES (7)").execute(&mut *next).await.unwrap();
        drop(next);
        assert_eq!(rows(&pool).await, before, "{end} after {limit:?}");

        let mut next = lockkit::begin(&pool).await.unwrap();
        sqlx::query("INSERT INTO t VALUES (8)").execute(&mut *next).await.unwrap();
        next.commit().await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        sqlx::query("ROLLBACK").execute(&mut *conn).await.unwrap_err();
        drop(conn);
        assert_eq!(rows(&pool).await, before + 1, "{end} after {limit:?}");
        sqlx::query("DELETE FROM t WHERE id = 8").execute(&pool).await.unwrap();
    }
}
