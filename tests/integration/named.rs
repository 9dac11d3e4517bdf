//! Named locks for a transaction.

use std::time::{Duration, Instant};

use lockkit::{Error, NamedLock, Wait};
use support::{Server, TestDb, on_every_database, on_every_server};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

on_every_database! {
    async fn a_name_excludes_others_until_the_transaction_ends<S>(db: TestDb<S>) {
        let name = || NamedLock::new("order:42").wait(Wait::Never);
        for _ in 0..2 {
            // The first round makes the name, the second finds it.
            let mut holder = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *holder).await.unwrap();
            name().lock(&mut *holder).await.expect("taking it again is free");

            let started = Instant::now();
            let mut other = db.pool.begin().await.unwrap();
            let refused = NamedLock::new("order:42").wait(MILLIS(250)).lock(&mut *other).await.unwrap_err();
            assert!(matches!(&refused, Error::Contended { key, .. } if *key == "order:42"), "{refused:?}");
            assert!(started.elapsed() >= MILLIS(250) && started.elapsed() < Duration::from_secs(4));
            other.rollback().await.unwrap();

            holder.commit().await.unwrap();
            let mut next = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *next).await.unwrap();
            next.rollback().await.unwrap();
        }
        db.assert_nothing_left().await;
    }

    async fn one_order_per_user_holds_with_many_callers<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE orders (user_id BIGINT)").await;
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..64_i64 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                let user = task % 8;
                let mut tx = lockkit::begin(&pool).await.unwrap();
                NamedLock::new(format!("order:{user}")).lock(&mut *tx).await.unwrap();
                let count = format!("SELECT COUNT(*) FROM orders WHERE user_id = {user}");
                if S::fetch_i64(&mut tx, &count).await.unwrap() == Some(0) {
                    S::execute(&mut tx, &format!("INSERT INTO orders VALUES ({user})")).await.unwrap();
                }
                tx.commit().await.unwrap();
            });
        }
        tasks.join_all().await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM orders").await, Some(8));
    }

    async fn a_named_lock_outside_a_transaction_is_refused<S>(db: TestDb<S>) {
        let mut conn = db.pool.acquire().await.unwrap();
        let refused = NamedLock::new("k").lock(&mut *conn).await;
        assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{refused:?}");
    }
}

on_every_server! {
    async fn different_names_do_not_wait_for_each_other<S>(db: TestDb<S>) {
        let long = "x".repeat(255);
        let mut held = Vec::new();
        for name in ["a", "A", "a ", "é", "e\u{301}", "'; --", &long, &long[..254]] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            NamedLock::new(name)
                .wait(MILLIS(2000))
                .lock(&mut *tx)
                .await
                .unwrap_or_else(|err| panic!("{name:?}: {err}"));
            held.push(tx);
        }
        for tx in held {
            tx.commit().await.unwrap();
        }
    }

    async fn names_that_do_not_exist_yet_do_not_deadlock<S>(db: TestDb<S>) {
        // In transactions of sqlx too, whose isolation on MySQL and MariaDB takes gap locks.
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..8 {
            let pool = db.pool.clone();
            tasks.spawn(async move {
                for round in 0..25 {
                    let mut tx = pool.begin().await.unwrap();
                    NamedLock::new(format!("new:{round}:{task}")).lock(&mut *tx).await.unwrap();
                    NamedLock::new(format!("zzz:{round}:{task}")).lock(&mut *tx).await.unwrap();
                    tx.commit().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
    }

    async fn a_new_name_that_somebody_else_has_just_made_is_not_waited_for_beyond_the_bound<S>(db: TestDb<S>) {
        for round in 0..20 {
            let lock = || NamedLock::new(format!("new:{round}")).wait(Wait::Never);
            let (mut one, mut two) =
                (lockkit::begin(&db.pool).await.unwrap(), lockkit::begin(&db.pool).await.unwrap());
            let started = Instant::now();
            let (first, second) = tokio::join!(lock().lock(&mut *one), lock().lock(&mut *two));
            assert!(started.elapsed() < Duration::from_secs(5));
            assert!(first.is_ok() != second.is_ok() || (first.is_err() && second.is_err()), "{first:?} {second:?}");
            // Not rolled back by hand: one of them may still be waiting on the server.
            drop((one, two));
        }
        db.assert_nothing_left().await;
    }

    async fn what_the_last_holder_committed_is_seen_after_the_lock<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1)").await;
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").lock(&mut *holder).await.unwrap();
        let pool = db.pool.clone();
        let waiter = tokio::spawn(async move {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            // A read before the lock must not fix what is read after it.
            S::fetch_i64(&mut tx, "SELECT n FROM t").await.unwrap();
            NamedLock::new("k").wait(Duration::from_secs(20)).lock(&mut *tx).await.unwrap();
            let seen = S::fetch_i64(&mut tx, "SELECT n FROM t").await.unwrap();
            tx.commit().await.unwrap();
            seen
        });
        tokio::time::sleep(MILLIS(100)).await;
        S::execute(&mut holder, "UPDATE t SET n = 2").await.unwrap();
        holder.commit().await.unwrap();
        assert_eq!(waiter.await.unwrap(), Some(2));
    }
}
