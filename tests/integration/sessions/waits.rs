//! Exclusion by session locks, and waits for them.

use std::time::{Duration, Instant};

use lockkit::{Error, SessionLock, Wait};
use support::{JoinSet, Proxy, Server, TestDb, on_databases, on_every_server, spawn};
use tokio::time::{sleep, timeout};

use super::{MILLIS, PATIENCE, acquire, is_held};

on_every_server! {
    async fn a_session_lock_excludes_other_processes_until_it_is_released<S>(db: TestDb<S>) {
        let others = db.pool_of(2).await;
        let leader = acquire(&db.pool, "leader").await;
        assert_eq!(*leader.key(), "leader");
        assert!(leader.is_alive().await);

        assert!(SessionLock::new("leader").try_acquire(&others).await.unwrap().is_none());
        let refused = SessionLock::new("leader").wait(Wait::Never).acquire(&others).await.unwrap_err();
        assert!(matches!(&refused, Error::Contended { key, .. } if *key == "leader"), "{refused:?}");

        leader.release().await.unwrap();
        assert!(!is_held(&others, "leader").await);
        db.assert_nothing_left().await;
    }

    async fn a_wait_ends_at_its_bound_and_not_before<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        // Less than a second, which MySQL cannot wait for; and more than the server is told to wait at once.
        for bound in [MILLIS(1), MILLIS(300), MILLIS(1400)] {
            let started = Instant::now();
            let refused = SessionLock::new("leader").wait(bound).acquire(&db.pool).await.unwrap_err();
            assert!(matches!(refused, Error::Contended { waited, .. } if waited >= bound), "{refused:?}");
            assert!(started.elapsed() >= bound);
        }
        leader.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_waiter_gets_the_lock_when_it_is_released<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        let pool = db.pool.clone();
        let waiting = spawn(async move { SessionLock::new("leader").acquire(&pool).await });
        // Longer than the server is told to wait at once.
        sleep(MILLIS(1300)).await;
        assert!(!waiting.is_finished());
        leader.release().await.unwrap();
        let next = timeout(PATIENCE, waiting).await.expect("it gets the lock").unwrap().unwrap();
        next.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn many_waiters_hold_it_one_at_a_time<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (0)").await;
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                let leader = acquire(&pool, "leader").await;
                // Lost updates would show that two were in here at once.
                let mut conn = pool.acquire().await.unwrap();
                let n = S::fetch_i64(&mut conn, "SELECT n FROM t").await.unwrap().unwrap();
                sleep(MILLIS(20)).await;
                S::execute(&mut conn, &format!("UPDATE t SET n = {}", n + 1)).await.unwrap();
                leader.release().await.unwrap();
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT n FROM t").await, Some(6));
        db.assert_nothing_left().await;
    }

    async fn a_pool_of_one_connection_is_enough<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        for _ in 0..3 {
            acquire(&pool, "leader").await.release().await.unwrap();
            assert!(!is_held(&pool, "leader").await);
        }
        drop(acquire(&pool, "leader").await);
        acquire(&pool, "leader").await.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn what_cannot_work_is_refused_before_anything_is_locked<S>(db: TestDb<S>) {
        let refused = SessionLock::new("").acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidKey { .. }), "{refused:?}");
        let refused = SessionLock::new("k").heartbeat(Duration::ZERO).acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "heartbeat", .. }), "{refused:?}");
        let refused = SessionLock::new("k").wait(Duration::MAX).acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "wait", .. }), "{refused:?}");
    }

    async fn a_wait_for_a_connection_counts_too<S>(db: TestDb<S>) {
        let pool = db.pool_of(1).await;
        let taken = pool.acquire().await.unwrap();
        let refused = SessionLock::new("k").wait(MILLIS(100)).acquire(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::PoolStarved { held: 1, size: 1, .. }), "{refused:?}");
        drop(taken);
        assert!(!is_held(&pool, "k").await);
    }
}

on_databases! {
    [postgres]

    // A bound that a session keeps would make later statements of the pool's users fail.
    async fn the_bound_of_a_wait_does_not_stay_on_the_connection<S>(db: TestDb<S>) {
        let leader = acquire(&db.pool, "leader").await;
        let pool = db.pool_of(1).await;
        SessionLock::new("leader").wait(MILLIS(50)).acquire(&pool).await.unwrap_err();
        let mut conn = pool.acquire().await.unwrap();
        assert_eq!(S::fetch_text(&mut conn, "SHOW lock_timeout").await.unwrap().as_deref(), Some("0"));
        drop(conn);
        leader.release().await.unwrap();
        acquire(&pool, "leader").await.release().await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        assert_eq!(S::fetch_text(&mut conn, "SHOW lock_timeout").await.unwrap().as_deref(), Some("0"));
    }
}

on_databases! {
    [postgres]

    async fn a_server_that_only_pretends_to_lock_is_refused<S>(db: TestDb<S>) {
        let pool = support::pool_of_a_pretender(&db).await;
        for _ in 0..2 {
            let refused = SessionLock::new("leader").wait(Wait::Never).acquire(&pool).await.unwrap_err();
            assert!(matches!(&refused, Error::FeignedLock { key, .. } if *key == "leader"), "{refused:?}");
            assert!(refused.to_string().contains("PostgreSQL"), "names the server: {refused}");
        }
        // Where locks are real, the name is free.
        assert!(!is_held(&db.pool, "leader").await);
    }
}

on_databases! {
    [mariadb, mysql]

    // `STRCMP` of the name and a wait of zero is 1, as a `GET_LOCK` that locks nothing answers.
    async fn a_server_whose_get_lock_locks_nothing_is_refused<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        proxy.replace("GET_LOCK(", "STRCMP  (");
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(proxy.url()).await.unwrap();
        for _ in 0..2 {
            let refused = SessionLock::new("leader").wait(Wait::Never).acquire(&pool).await.unwrap_err();
            assert!(matches!(&refused, Error::FeignedLock { key, .. } if *key == "leader"), "{refused:?}");
        }
        assert!(!is_held(&db.pool, "leader").await);
    }
}
