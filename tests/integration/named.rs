//! Named locks for a transaction.

use std::time::{Duration, Instant};

use lockkit::{Error, NamedLock, Wait};
use sqlx::mysql::MySqlDatabaseError;
use support::{JoinSet, Server, TestDb, on_every_database, on_every_server, spawn};
use tokio::time::timeout;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Below what the servers wait by themselves.
const PATIENCE: Duration = Duration::from_secs(40);

/// The number or SQLSTATE of an error of the database.
fn code(err: &sqlx::Error) -> String {
    let err = err.as_database_error().unwrap_or_else(|| panic!("{err:?}"));
    let number = err.try_downcast_ref().map(|it: &MySqlDatabaseError| it.number().to_string());
    number.or_else(|| err.code().map(Into::into)).expect("a code")
}

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
        let mut tasks = JoinSet::new();
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

    async fn a_text_for_other_clients_excludes_the_lock_of_the_same_key_within_a_bound<S>(db: TestDb<S>) {
        let key = r"o'reilly \ 'ключ': 42";
        let text = |wait: Wait| NamedLock::new(key).wait(wait).sql::<<S as Server>::DB>().unwrap();
        let (waits, refusals) = match S::NAME {
            "SQLite" => (vec![Wait::DEFAULT], ["5"; 2]), // the bound is the connection's
            "PostgreSQL" => (vec![Wait::Never, MILLIS(300).into()], ["55P03"; 2]),
            "MySQL" => (vec![Wait::Never, MILLIS(300).into()], ["3572", "1205"]),
            _ => (vec![Wait::Never, MILLIS(300).into()], ["1205"; 2]),
        };
        // The first round makes the name, the second finds it.
        for _ in 0..2 {
            let mut foreign = db.pool.begin().await.unwrap();
            S::execute(&mut foreign, &text(Wait::DEFAULT)).await.unwrap();
            S::execute(&mut foreign, &text(Wait::Never)).await.expect("taking it again is free");
            let mut tx = db.pool.begin().await.unwrap();
            let refused = NamedLock::new(key).wait(MILLIS(250)).lock(&mut *tx).await.unwrap_err();
            assert!(refused.is_contended(), "{refused:?}");
            tx.rollback().await.unwrap();
            foreign.commit().await.unwrap();

            let mut holder = lockkit::begin(&db.pool).await.unwrap();
            NamedLock::new(key).wait(Wait::Never).lock(&mut *holder).await.unwrap();
            for (wait, refusal) in waits.iter().zip(refusals) {
                let mut foreign = db.pool.begin().await.unwrap();
                let sent = timeout(PATIENCE, S::execute(&mut foreign, &text(*wait))).await;
                assert_eq!(code(&sent.expect("a bound").unwrap_err()), refusal, "{wait:?}");
                foreign.rollback().await.unwrap();
            }
            holder.commit().await.unwrap();
        }
        let refused = NamedLock::new("").sql::<<S as Server>::DB>();
        assert!(matches!(refused, Err(Error::InvalidKey { .. })), "{refused:?}");
        db.assert_nothing_left().await;
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

    async fn a_text_for_other_clients_waits_for_its_name_alone_and_leaves_the_session_as_it_was<S>(db: TestDb<S>) {
        let bound = if S::NAME == "PostgreSQL" { "SHOW lock_timeout" } else { "SELECT @@innodb_lock_wait_timeout" };
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("a").lock(&mut *holder).await.unwrap();
        let mut foreign = db.pool.begin().await.unwrap();
        let before = S::fetch_text(&mut foreign, bound).await.unwrap();
        for wait in [Wait::Never, MILLIS(1500).into(), Wait::Unbounded] {
            let other = NamedLock::new("b").wait(wait).sql::<<S as Server>::DB>().unwrap();
            S::execute(&mut foreign, &other).await.unwrap();
            assert_eq!(S::fetch_text(&mut foreign, bound).await.unwrap(), before, "{wait:?}");
        }
        let same = NamedLock::new("a").wait(PATIENCE).sql::<<S as Server>::DB>().unwrap();
        let waiting = async {
            S::execute(&mut foreign, &same).await.unwrap();
            foreign.commit().await.unwrap();
        };
        let releasing = async {
            tokio::time::sleep(MILLIS(100)).await;
            holder.commit().await.unwrap();
        };
        tokio::join!(waiting, releasing);
    }

    async fn a_text_for_other_clients_shares_the_lock_on_postgresql_alone<S>(db: TestDb<S>) {
        let shared = NamedLock::new("prices").share().wait(Wait::Never).sql::<<S as Server>::DB>().unwrap();
        let alone = NamedLock::new("prices").wait(Wait::Never).sql::<<S as Server>::DB>().unwrap();
        let (mut one, mut two) = (db.pool.begin().await.unwrap(), db.pool.begin().await.unwrap());
        S::execute(&mut one, &shared).await.unwrap();
        let second = S::execute(&mut two, &shared).await;
        assert_eq!(second.is_ok(), S::NAME == "PostgreSQL", "{second:?}");
        let mut three = db.pool.begin().await.unwrap();
        S::execute(&mut three, &alone).await.unwrap_err();
        for tx in [one, two, three] {
            tx.rollback().await.unwrap();
        }
    }

    async fn of_two_clients_that_lock_in_opposite_orders_by_texts_one_fails<S>(db: TestDb<S>) {
        let lock = |name| NamedLock::new(name).wait(PATIENCE).sql::<<S as Server>::DB>().unwrap();
        let (mut one, mut two) = (db.pool.begin().await.unwrap(), db.pool.begin().await.unwrap());
        S::execute(&mut one, &lock("a")).await.unwrap();
        S::execute(&mut two, &lock("b")).await.unwrap();
        // Each ends with its last statement, as the victim must: the other one waits for that.
        let (first, second) = tokio::join!(
            async {
                let sent = S::execute(&mut one, &lock("b")).await;
                one.rollback().await.unwrap();
                sent
            },
            async {
                let sent = S::execute(&mut two, &lock("a")).await;
                two.rollback().await.unwrap();
                sent
            }
        );
        assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
        let victim = first.and(second).unwrap_err();
        assert_eq!(code(&victim), if S::NAME == "PostgreSQL" { "40P01" } else { "1213" });
    }

    async fn names_that_do_not_exist_yet_do_not_deadlock<S>(db: TestDb<S>) {
        // In transactions of sqlx too, whose isolation on MySQL and MariaDB takes gap locks.
        let mut tasks = JoinSet::new();
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
        let waiter = spawn(async move {
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
