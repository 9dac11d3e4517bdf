//! `lockkit` behind `PgBouncer` in transaction mode.
//!
//! Each test has several pools, as several processes would, that share two sessions of the server.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use lockkit::idempotent::Attempt;
use lockkit::store::ShedLockTable;
use lockkit::testing::conformance;
use lockkit::{Error, Idempotent, Leases, NamedLock, RowLock, Stock, Versioned, VersionedRow, Wait};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::raw_sql;
use support::{PgBouncer, Postgres, Proxy, TestDb, assert_answers_cost, on_databases};
use tokio::task::JoinSet;

/// How often each process does its work.
const ROUNDS: usize = 30;

const PROCESSES: i64 = 4;

const PATIENCE: Duration = Duration::from_secs(60);

/// A pool as another process has it.
async fn process(pooler: &PgBouncer) -> PgPool {
    PgPoolOptions::new().max_connections(3).connect(pooler.url()).await.unwrap()
}

fn start(db: &TestDb<Postgres>) -> PgBouncer {
    PgBouncer::with_sessions(&db.url, "transaction", 2)
}

#[derive(Debug, sqlx::FromRow, Versioned)]
#[versioned(table = "item", key = "id")]
struct Item {
    id: i64,
    name: String,
    version: i64,
}

async fn items(db: &TestDb<Postgres>) {
    db.execute("CREATE TABLE item (id BIGINT PRIMARY KEY, name TEXT NOT NULL, version BIGINT NOT NULL)").await;
    for id in 0..=PROCESSES {
        db.execute(&format!("INSERT INTO item VALUES ({id}, 'one', 1)")).await;
    }
}

on_databases! {
    [postgres]

    async fn leases_are_taken_committed_and_released<S>(db: TestDb<S>) {
        // Settings in which a literal could mean something else, or be refused.
        let name = db.fetch_text("SELECT current_database()").await.unwrap();
        for setting in ["backslash_quote", "standard_conforming_strings"] {
            db.execute(&format!("ALTER DATABASE {name} SET {setting} = off")).await;
        }
        let pooler = start(&db);
        let mut processes = JoinSet::new();
        for number in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                let leases = Leases::builder(pool.clone()).wait(PATIENCE).build().unwrap();
                for round in 0..ROUNDS {
                    leases.lease("all").acquire().await.unwrap().release().await.unwrap();
                    let lease = leases.lease(format!("it's \\ {number}")).acquire().await.unwrap();
                    lease.extend(PATIENCE).await.unwrap();
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    lease.verify(&mut tx).await.unwrap();
                    lease.commit(tx).await.unwrap();
                    let both = leases.all([format!("a{number}"), format!("b{number}")]).acquire().await.unwrap();
                    assert_eq!(leases.list(&format!("a{number}")).await.unwrap().len(), 1, "round {round}");
                    both.release().await.unwrap();
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
    }

    async fn shedlocks_table_behind_it_keeps_every_promise_of_a_store<S>(db: TestDb<S>) {
        db.execute(
            "CREATE TABLE shedlock (name VARCHAR(64) NOT NULL PRIMARY KEY, lock_until TIMESTAMP NOT NULL,
                 locked_at TIMESTAMP NOT NULL, locked_by VARCHAR(255) NOT NULL)",
        )
        .await;
        let pooler = start(&db);
        let pool = process(&pooler).await;
        conformance::run(async || ShedLockTable::new(pool.clone())).await;
    }

    async fn a_pool_behind_it_keeps_every_promise_of_a_store<S>(db: TestDb<S>) {
        let pooler = start(&db);
        let pool = process(&pooler).await;
        conformance::run(async || pool.clone()).await;
    }

    async fn rows_and_names_are_locked<S>(db: TestDb<S>) {
        items(&db).await;
        let pooler = start(&db);
        let mut processes = JoinSet::new();
        for _ in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                for round in 0..ROUNDS {
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    let wait = if round % 2 == 0 { Wait::Unbounded } else { Wait::AtMost(PATIENCE) };
                    NamedLock::new("n").wait(wait).lock(&mut *tx).await.unwrap();
                    let row: Item =
                        RowLock::table("item").by("id", 0_i64).wait(wait).fetch_one(&mut *tx).await.unwrap();
                    let next = row.version + 1;
                    raw_sql(sqlx::AssertSqlSafe(format!("UPDATE item SET version = {next} WHERE id = 0")))
                        .execute(&mut *tx)
                        .await
                        .unwrap();
                    tx.commit().await.unwrap();
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
        let rounds = PROCESSES * i64::try_from(ROUNDS).unwrap();
        assert_eq!(db.fetch_i64("SELECT version FROM item WHERE id = 0").await, Some(1 + rounds));
    }

    async fn versions_are_read_and_written<S>(db: TestDb<S>) {
        items(&db).await;
        let pooler = start(&db);
        let mut processes = JoinSet::new();
        for number in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                for _ in 0..ROUNDS {
                    let mut item = Item::load(&pool, number).await.unwrap();
                    item.name = "two".to_owned();
                    item.save(&pool).await.unwrap();
                    let row = || VersionedRow::table("item").by("id", number);
                    let read = row().read::<Item>(&mut *pool.acquire().await.unwrap()).await.unwrap();
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    let bumped = row().expected(read.version).bump(&mut *tx).await.unwrap();
                    bumped.commit(tx).await.unwrap();
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
        let versions = format!("SELECT SUM(version) FROM item WHERE id < {PROCESSES} AND name = 'two'");
        let saves = 2 * PROCESSES * i64::try_from(ROUNDS).unwrap();
        assert_eq!(db.fetch_i64(&versions).await, Some(PROCESSES + saves));
    }

    async fn jobs_are_taken_from_a_queue_and_deleted<S>(db: TestDb<S>) {
        items(&db).await;
        db.execute("CREATE INDEX ones ON item (version) WHERE name = 'one'").await;
        let pooler = start(&db);
        let mut processes = JoinSet::new();
        for _ in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                let mut taken = 0;
                loop {
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    let first = RowLock::table("public.item").order_by("id").skip_locked();
                    let Some(job) = first.fetch_optional::<Item>(&mut tx).await.unwrap() else { break taken };
                    let of_its_kind =
                        RowLock::table("item").by("name", "one").order_by("version").limit(1).skip_locked();
                    of_its_kind.lock(&mut tx).await.unwrap();
                    job.delete(&mut tx).await.unwrap();
                    tx.commit().await.unwrap();
                    taken += 1;
                }
            });
        }
        let taken = processes.join_all().await.into_iter().sum::<i64>();
        assert!((1..=PROCESSES + 1).contains(&taken), "{taken} were taken");
        let left = db.fetch_i64("SELECT COUNT(*) FROM item").await.unwrap();
        assert_eq!(taken + left, PROCESSES + 1);
    }

    async fn a_stock_is_taken_from<S>(db: TestDb<S>) {
        let pooler = start(&db);
        let wanted = 2 * PROCESSES.unsigned_abs() * ROUNDS as u64;
        Stock::new(process(&pooler).await, "k").put(wanted + 1).await.unwrap();
        let mut processes = JoinSet::new();
        for _ in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                let stock = Stock::new(pool.clone(), "k");
                for _ in 0..ROUNDS {
                    stock.take(1).await.unwrap();
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    stock.take_in(&mut *tx, 1).await.unwrap();
                    tx.commit().await.unwrap();
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT SUM(quantity)::bigint FROM lockkit_stock").await, Some(1));
    }

    async fn answers_are_stored_once<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE charges (name TEXT)").await;
        let pooler = start(&db);
        let (inside, outside) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut processes = JoinSet::new();
        for _ in 0..PROCESSES {
            let pool = process(&pooler).await;
            let (inside, outside) = (Arc::clone(&inside), Arc::clone(&outside));
            processes.spawn(async move {
                let leases = Leases::builder(pool.clone()).wait(PATIENCE).build().unwrap();
                let mut answers = Vec::new();
                for round in 0..ROUNDS {
                    // The second look has an answer where the first had none, as a rule.
                    let paid = Idempotent::key(format!("it's \\ {round}")).request(&round).wait(PATIENCE);
                    let paid = paid.run(&pool, async |tx| {
                        raw_sql("INSERT INTO charges VALUES ('x')").execute(&mut **tx).await.unwrap();
                        Ok::<_, Error>((inside.fetch_add(1, Relaxed), "it's \\".to_owned()))
                    });
                    let paid = paid.await.unwrap().into_inner();
                    let mailed = Idempotent::key(format!("mail \\ {round}")).wait(PATIENCE);
                    let mailed = mailed.outside(&leases, async |work| {
                        assert_eq!(work.attempt(), Attempt::First);
                        raw_sql("INSERT INTO charges VALUES ('y')").execute(&mut **work.tx().await?).await.unwrap();
                        Ok::<_, Error>(outside.fetch_add(1, Relaxed))
                    });
                    answers.push((round, paid, mailed.await.unwrap().into_inner()));
                }
                answers
            });
        }
        let answers: HashSet<_> = processes.join_all().await.into_iter().flatten().collect();
        assert_eq!(answers.len(), ROUNDS, "one answer for each key");
        assert_eq!((inside.load(Relaxed), outside.load(Relaxed)), (ROUNDS as u64, ROUNDS as u64));
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM charges").await, Some(2 * i64::try_from(ROUNDS).unwrap()));
    }

    async fn requests_with_a_stored_answer_cost_what_the_table_says<S>(db: TestDb<S>) {
        let pooler = start(&db);
        assert_answers_cost::<sqlx::Postgres>(&Proxy::start(pooler.url()), [6, 1, 16, 1]).await;
    }

    async fn migrations_are_applied<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let pooler = start(&db);
        let mut processes = JoinSet::new();
        for _ in 0..PROCESSES {
            let pool = process(&pooler).await;
            processes.spawn(async move {
                for _ in 0..ROUNDS {
                    lockkit::migrate(&pool).await.unwrap();
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _lockkit_migrations").await, Some(7));
    }

    async fn nothing_is_prepared_by_name<S>(db: TestDb<S>) {
        let pooler = PgBouncer::with_sessions(&db.url, "transaction", 1);
        let pool = process(&pooler).await;
        let leases = Leases::new(pool.clone());
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        Stock::new(pool.clone(), "k").put(3).await.unwrap();

        let row = raw_sql("SELECT count(*) FROM pg_prepared_statements").fetch_one(&pool).await.unwrap();
        assert_eq!(sqlx::Row::get::<i64, _>(&row, 0), 0);
    }

    async fn a_prepared_statement_that_is_gone_is_no_error_outside_a_transaction<S>(db: TestDb<S>) {
        items(&db).await;
        let pool = PgPoolOptions::new().max_connections(1).connect(&db.url).await.unwrap();
        let leases = Leases::new(pool.clone());
        for _ in 0..2 {
            leases.show("k").await.unwrap();
            Item::load(&pool, 1).await.unwrap();
            // As another session of the server has none of them.
            raw_sql("DEALLOCATE ALL").execute(&pool).await.unwrap();
        }
    }
}
