//! Transactions that follow each other on one connection, where the application allows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use lockkit::dialect::reuse_connections;
use lockkit::{Answered, Error, Idempotent, Leases, NamedLock, with_lock};
use sqlx::Pool;
use sqlx::pool::PoolOptions;
use support::{Backend, Proxy, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};

async fn pool<S: Backend>(url: &str, connections: u32) -> Pool<S::DB> {
    let options = PoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(5));
    let pool = options.connect(url).await.unwrap();
    reuse_connections(&pool);
    pool
}

/// Longer than a connection is kept.
async fn a_while() {
    tokio::time::sleep(Duration::from_millis(60)).await;
}

on_every_server! {
    async fn transactions_one_after_the_other_cost_no_pings<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = pool::<S>(proxy.url(), 3).await;
        let mut least = u64::MAX;
        for _ in 0..4 {
            let before = proxy.round_trips();
            for _ in 0..10 {
                lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
            }
            least = least.min(proxy.round_trips() - before);
            a_while().await;
        }
        // BEGIN and COMMIT; on MySQL and MariaDB also whether the transaction is still there. And the first ping.
        let of_each = if S::NAME == "PostgreSQL" { 2 } else { 3 };
        assert!(least <= 10 * of_each + 2, "{least} round trips for 10 transactions on {}", S::NAME);
    }

    async fn a_kept_connection_that_has_died_costs_a_request_no_more_than_time<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = pool::<S>(proxy.url(), 3).await;
        for round in 0..20 {
            for is_before in [false, true] {
                let request = Idempotent::key(format!("k{round}")).run(&pool, async |_| Ok::<_, Error>(round));
                let answer = if is_before { Answered::Before(round) } else { Answered::Now(round) };
                assert_eq!(request.await.unwrap(), answer);
                proxy.reset();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        db.assert_nothing_left().await;
    }

    async fn a_kept_connection_that_has_died_costs_a_transaction_no_more_than_time<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let proxy = Proxy::start(&db.url);
        let pool = pool::<S>(proxy.url(), 3).await;
        for _ in 0..20 {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
            tx.commit().await.unwrap();
            proxy.reset();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(20));
        db.assert_nothing_left().await;
    }

    async fn a_kept_connection_that_died_in_silence_does_not_stop_a_transaction<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let pool = pool::<S>(proxy.url(), 3).await;
        lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
        proxy.half_open();
        lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
    }

    async fn whoever_waits_for_the_pool_is_served_beside_transactions_that_follow_each_other<S>(db: TestDb<S>) {
        let pool = pool::<S>(&db.url, 2).await;
        let rounds = Arc::new(AtomicU32::new(0));
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let (pool, rounds) = (pool.clone(), rounds.clone());
                spawn(async move {
                    loop {
                        lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
                        rounds.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        for _ in 0..50 {
            drop(pool.acquire().await.unwrap());
        }
        assert!(rounds.load(Relaxed) > 0);
        for task in tasks {
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
        db.assert_nothing_left().await;
    }

    async fn the_hooks_of_the_pool_see_one_use_for_several_transactions<S>(db: TestDb<S>) {
        let lent = Arc::new(AtomicU32::new(0));
        let count = lent.clone();
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(3).before_acquire(move |_, _| {
            count.fetch_add(1, Relaxed);
            Box::pin(async { Ok(true) })
        });
        let pool = options.connect(&db.url).await.unwrap();
        let ten = async || {
            let before = lent.load(Relaxed);
            for _ in 0..10 {
                lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
            }
            lent.load(Relaxed) - before
        };
        // It is not called for a new connection.
        assert!(ten().await >= 7, "each, unless the application says otherwise");
        reuse_connections(&pool);
        // One, unless this test stands still for longer than a connection is kept.
        let mut least = 10;
        for _ in 0..10 {
            least = least.min(ten().await);
        }
        assert!(least <= 1, "{least}");
    }
}

on_databases! {
    [mariadb, mysql]
    async fn a_transaction_does_not_have_what_the_last_one_left<S>(db: TestDb<S>) {
        let pool = pool::<S>(&db.url, 3).await;
        for (left, found) in [
            ("SET autocommit = 1", "SELECT @@autocommit + (@lockkit_read_committed <> 1)"),
            ("SET @lockkit_wait = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = 1",
             "SELECT @@innodb_lock_wait_timeout = 1"),
            // The next transaction has begun already, so its isolation level cannot be set.
            ("SET completion_type = 1", "SELECT 0"),
        ] {
            for _ in 0..10 {
                let mut tx = lockkit::begin(&pool).await.unwrap();
                S::execute(&mut tx, left).await.unwrap();
                tx.rollback().await.unwrap();
                let mut tx = lockkit::begin(&pool).await.unwrap();
                assert_eq!(S::fetch_i64(&mut tx, found).await.unwrap(), Some(0), "after {left} on {}", S::NAME);
                tx.commit().await.unwrap();
            }
        }
    }
}

on_every_database! {
    async fn a_pool_gets_its_connections_back_as_it_gave_them<S>(db: TestDb<S>) {
        let settings = match S::NAME {
            "PostgreSQL" => "SELECT pg_current_xact_id_if_assigned() IS NULL AND now() = statement_timestamp()",
            "SQLite" => "SELECT timeout FROM pragma_busy_timeout",
            _ => "SELECT @@autocommit * 1000 + @@innodb_lock_wait_timeout * 10 + (@lockkit_read_committed IS NULL)",
        };
        let pool = pool::<S>(&db.url, 3).await;
        let settings = async || {
            let mut conn = pool.acquire().await.unwrap();
            assert!(!sqlx::Connection::is_in_transaction(&*conn));
            S::fetch_text(&mut conn, &format!("SELECT CAST(({settings}) AS CHAR(20))")).await.unwrap()
        };
        let before = settings().await;
        for round in 0..30 {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            NamedLock::new("k").wait(Duration::from_secs(3)).lock(&mut tx).await.unwrap();
            match round % 3 {
                0 => tx.commit().await.unwrap(),
                1 => tx.rollback().await.unwrap(),
                _ => drop(tx),
            }
            if round % 7 == 0 {
                a_while().await;
                assert_eq!(settings().await, before);
            }
        }
        a_while().await;
        assert_eq!(pool.num_idle(), pool.size() as usize, "on {}", S::NAME);
        assert_eq!(settings().await, before);
        db.assert_nothing_left().await;
    }

    async fn a_look_for_an_answer_leaves_nothing_on_a_kept_connection<S>(db: TestDb<S>) {
        let pool = pool::<S>(&db.url, 3).await;
        let request = async |pool: &Pool<<S as Server>::DB>, key: &str| {
            Idempotent::key(key).run(pool, async |_| Ok::<_, Error>(())).await.unwrap().is_before()
        };
        for round in 0..20 {
            assert!(!request(&pool, &format!("mine {round}")).await);
            assert!(request(&pool, &format!("mine {round}")).await);
            let mut left = db.leftovers().await;
            // A statement is listed for a moment after its answer, and the session of the first request is restored
            // behind its caller. A transaction stays for as long as it is open.
            left.retain(|it| !it.contains(" is in Query "));
            assert_eq!(left, [""; 0], "on {}", S::NAME);
            // What others have stored since is found by the next look.
            assert!(!request(&db.pool, &format!("theirs {round}")).await);
            assert!(request(&pool, &format!("theirs {round}")).await);
        }
    }

    async fn each_transaction_is_whole_and_sees_what_others_have_committed<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id INT PRIMARY KEY, n INT)").await;
        db.execute("INSERT INTO t VALUES (1, 0)").await;
        let pool = pool::<S>(&db.url, 3).await;
        for round in 0..20 {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            assert_eq!(S::fetch_i64(&mut tx, "SELECT n FROM t").await.unwrap(), Some(2 * round));
            if S::NAME == "SQLite" {
                S::execute(&mut tx, "UPDATE t SET n = n + 2").await.unwrap();
            } else {
                // Neither autocommit nor a snapshot of an earlier transaction.
                db.execute("UPDATE t SET n = n + 1").await;
                assert_eq!(S::fetch_i64(&mut tx, "SELECT n FROM t").await.unwrap(), Some(2 * round + 1));
                S::execute(&mut tx, "UPDATE t SET n = n + 1").await.unwrap();
            }
            tx.commit().await.unwrap();
            let mut tx = lockkit::begin(&pool).await.unwrap();
            S::execute(&mut tx, "UPDATE t SET n = 1000").await.unwrap();
            tx.rollback().await.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(40));
    }

    async fn tasks_that_share_a_pool_lose_no_update<S>(db: TestDb<S>) {
        #[with_lock(named, on = pool, key = "row 1", tx = tx, wait = "30s")]
        async fn increment<S: Backend>(pool: &Pool<S::DB>) -> lockkit::Result<()> {
            let n = S::fetch_i64(&mut tx, "SELECT n FROM t WHERE id = 1").await.unwrap().unwrap();
            S::execute(&mut tx, &format!("UPDATE t SET n = {} WHERE id = 1", n + 1)).await.unwrap();
            Ok(())
        }
        db.execute("CREATE TABLE t (id INT PRIMARY KEY, n INT)").await;
        db.execute("INSERT INTO t VALUES (1, 0)").await;
        let pool = pool::<S>(&db.url, 4).await;
        let leases = Leases::new(pool.clone());
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let (pool, leases) = (pool.clone(), leases.clone());
                spawn(async move {
                    for _ in 0..25 {
                        increment::<S>(&pool).await.unwrap();
                        if task % 4 == 0 {
                            leases.lease(format!("k{task}")).acquire().await.unwrap().release().await.unwrap();
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(200));
        db.assert_nothing_left().await;
    }

    async fn a_pool_is_closed_although_a_connection_is_kept<S>(db: TestDb<S>) {
        let pool = pool::<S>(&db.url, 3).await;
        for _ in 0..5 {
            lockkit::begin(&pool).await.unwrap().commit().await.unwrap();
        }
        pool.close().await;
        lockkit::begin(&pool).await.expect_err("it is closed");
    }
}
