//! Optimistic writers of one row: turns inside the process, and their bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use lockkit::{Error, RetryPolicy, VersionedRow, with_lock};
use sqlx::Pool;
use support::{Backend, JoinSet, Server, TestDb, on_every_database};
use tokio::time::timeout;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, sqlx::FromRow, lockkit::Versioned)]
#[expect(clippy::struct_field_names, reason = "the columns of the table")]
#[versioned(table = "t_items", key = "item_id")]
struct Item {
    item_id: i64,
    stock: i64,
    version: i64,
}

async fn items<S: Backend>(db: &TestDb<S>) {
    db.execute(
        "CREATE TABLE t_items (item_id BIGINT NOT NULL PRIMARY KEY, stock BIGINT NOT NULL, version BIGINT NOT NULL)",
    )
    .await;
    db.execute("INSERT INTO t_items VALUES (7, 0, 1), (8, 0, 1)").await;
}

/// The stock and the number of saves of all rows.
async fn stored<S: Backend>(db: &TestDb<S>) -> (i64, i64) {
    let number = async |what| db.fetch_i64(what).await.unwrap();
    (
        number("SELECT CAST(SUM(stock) AS DECIMAL(20)) + 0 FROM t_items").await,
        number("SELECT CAST(SUM(version - 1) AS DECIMAL(20)) + 0 FROM t_items").await,
    )
}

on_every_database! {
    async fn sixty_four_writers_of_one_row_take_turns_and_lose_no_update<S>(db: TestDb<S>) {
        #[with_lock(version, attempts = 1000)]
        async fn add_one(pool: &Pool<<S as Server>::DB>, attempts: &AtomicU32) -> Result<(), Error> {
            attempts.fetch_add(1, Relaxed);
            let mut item = Item::load(pool, 7).await?;
            item.stock += 1;
            item.save(pool).await
        }

        items(&db).await;
        let attempts = Arc::new(AtomicU32::new(0));
        let mut writers = JoinSet::new();
        for _ in 0..64 {
            let (pool, attempts) = (db.pool.clone(), attempts.clone());
            writers.spawn(async move {
                for _ in 0..8 {
                    add_one(&pool, &attempts).await.unwrap();
                }
            });
        }
        writers.join_all().await;
        assert_eq!(stored(&db).await, (64 * 8, 64 * 8));
        let attempts = attempts.load(Relaxed);
        assert!(attempts <= 2 * 64 * 8, "{attempts} attempts");
    }

    async fn writers_in_transactions_take_turns_and_lose_no_update<S>(db: TestDb<S>) {
        items(&db).await;
        let pool = db.pool_of(8).await;
        let read = Arc::new(AtomicU32::new(0));
        let mut writers = JoinSet::new();
        for _ in 0..24 {
            let (pool, read) = (pool.clone(), read.clone());
            writers.spawn(async move {
                let row = || VersionedRow::table("t_items").by("item_id", 7_i64);
                for _ in 0..6 {
                    let write = async |_| {
                        let mut tx = lockkit::begin(&pool).await?;
                        let found = row().read::<Item>(&mut *tx).await?;
                        read.fetch_add(1, Relaxed);
                        row().expected(found.version).bump(&mut *tx).await?;
                        let add = format!("UPDATE t_items SET stock = {} WHERE item_id = 7", found.row.stock + 1);
                        S::execute(&mut tx, &add).await?;
                        Ok::<_, WriteError>(tx.commit().await?)
                    };
                    RetryPolicy::new().attempts(1000).retry(write).await.unwrap();
                }
            });
        }
        writers.join_all().await;
        assert_eq!(stored(&db).await, (24 * 6, 24 * 6));
        let read = read.load(Relaxed);
        assert!(read <= 2 * 24 * 6, "{read} reads");
        db.assert_nothing_left().await;
    }

    async fn attempts_end_as_the_policy_says_and_their_writes_are_all_there<S>(db: TestDb<S>) {
        items(&db).await;
        let (saved, most) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU32::new(0)));
        let mut writers = JoinSet::new();
        for _ in 0..64 {
            let (pool, saved, most) = (db.pool.clone(), saved.clone(), most.clone());
            writers.spawn(async move {
                let write = async |attempt| {
                    most.fetch_max(attempt, Relaxed);
                    let mut item = Item::load(&pool, 7).await?;
                    item.stock += 1;
                    item.save(&pool).await
                };
                match RetryPolicy::new().attempts(2).deadline(20 * SECOND).retry(write).await {
                    Ok(()) => drop(saved.fetch_add(1, Relaxed)),
                    Err(Error::RetriesExhausted { attempts: 2, .. }) => {}
                    Err(err) => panic!("{err:?}"),
                }
            });
        }
        writers.join_all().await;
        let saved = saved.load(Relaxed);
        assert!(saved >= 1 && most.load(Relaxed) <= 2);
        assert_eq!(stored(&db).await, (saved, saved));
    }

    async fn writers_of_two_rows_in_opposite_orders_come_to_an_end<S>(db: TestDb<S>) {
        items(&db).await;
        let saves = Arc::new(AtomicI64::new(0));
        let mut writers = JoinSet::new();
        for task in 0..12 {
            let (pool, saves) = (db.pool.clone(), saves.clone());
            let (outer, inner) = if task % 2 == 0 { (7, 8) } else { (8, 7) };
            writers.spawn(async move {
                let policy = RetryPolicy::new().attempts(10_000);
                let add = async |id| {
                    let mut item = Item::load(&pool, id).await?;
                    item.stock += 1;
                    item.save(&pool).await?;
                    saves.fetch_add(1, Relaxed);
                    Ok::<_, Error>(())
                };
                for _ in 0..4 {
                    let both = async |_| {
                        let mut item = Item::load(&pool, outer).await?;
                        policy.retry(async |_| add(inner).await).await?;
                        item.stock += 1;
                        item.save(&pool).await?;
                        saves.fetch_add(1, Relaxed);
                        Ok::<_, Error>(())
                    };
                    Box::pin(policy.retry(both)).await.unwrap();
                }
            });
        }
        timeout(60 * SECOND, writers.join_all()).await.expect("no deadlock");
        let saves = saves.load(Relaxed);
        assert!(saves >= 12 * 4 * 2);
        assert_eq!(stored(&db).await, (saves, saves));
    }
}

/// The error of an attempt that writes with a statement of its own.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Lock(#[from] Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}
