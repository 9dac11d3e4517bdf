//! Optimistic writers of one row: turns inside the process, the lock after conflicts, and their bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lockkit::{Error, RetryPolicy, RowLock, VersionedRow, Wait, with_lock};
use sqlx::Pool;
use support::{Backend, Server, TestDb, on_every_database};
use tokio::task::JoinSet;
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

    async fn writers_that_then_lock_do_not_conflict_again<S>(db: TestDb<S>) {
        items(&db).await;
        let pool = db.pool_of(8).await;
        let most = Arc::new(AtomicU32::new(0));
        let mut writers = JoinSet::new();
        for task in 0..24_i32 {
            let (pool, most) = (pool.clone(), most.clone());
            writers.spawn(async move {
                // Rows with keys of different types are not known to be one: as writers in different processes, some of
                // these take no turns with the others.
                let row = || match task % 3 {
                    0 => VersionedRow::table("t_items").by("item_id", 7_i64),
                    1 => VersionedRow::table("t_items").by("item_id", 7_i32),
                    _ => VersionedRow::table("t_items").by("item_id", 7_i16),
                };
                for _ in 0..6 {
                    let write = async |attempt| {
                        most.fetch_max(attempt, Relaxed);
                        let mut tx = lockkit::begin(&pool).await?;
                        let found = row().read::<Item>(&mut *tx).await?;
                        row().expected(found.version).bump(&mut *tx).await?;
                        let add = format!("UPDATE t_items SET stock = {} WHERE item_id = 7", found.row.stock + 1);
                        S::execute(&mut tx, &add).await?;
                        Ok::<_, WriteError>(tx.commit().await?)
                    };
                    RetryPolicy::new().attempts(5).then_lock(2).retry(write).await.unwrap();
                }
            });
        }
        writers.join_all().await;
        assert_eq!(stored(&db).await, (24 * 6, 24 * 6));
        assert!(most.load(Relaxed) <= 3, "the third attempt has the lock: {most:?}");
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

    async fn an_attempt_after_a_conflict_has_the_lock_of_the_row_that_conflicted<S>(db: TestDb<S>) {
        items(&db).await;
        // What retries of a process lock is known by its kind of database, table and key. The other tests have the
        // same, and MariaDB is a MySQL.
        let [row, other]: [i64; 2] = if S::NAME == "MariaDB" { [17, 18] } else { [27, 28] };
        db.execute(&format!("INSERT INTO t_items VALUES ({row}, 0, 1), ({other}, 0, 1)")).await;
        let pool = db.pool_of(4).await;
        let stale = Item::load(&pool, row).await.unwrap();
        Item::load(&pool, row).await.unwrap().save(&pool).await.unwrap();
        let is_locked = async |id: i64| {
            let mut tx = pool.begin().await.unwrap();
            let probe = RowLock::table("t_items").by("item_id", id).wait(Wait::Never).lock(&mut *tx).await;
            tx.rollback().await.unwrap();
            match probe {
                Ok(_) => false,
                Err(err) if err.is_contended() => true,
                Err(err) => panic!("{err:?}"),
            }
        };
        let write = async |attempt| {
            // Not `lockkit::begin`, which locks on SQLite.
            let mut tx = pool.begin().await.unwrap();
            let _other = Item::load(&mut *tx, other).await?;
            let mut item = Item::load(&mut *tx, row).await?;
            if S::NAME != "SQLite" {
                assert!(!is_locked(other).await, "it had no conflict");
            }
            assert_eq!(is_locked(row).await, attempt > 2, "attempt {attempt}");
            if attempt <= 2 {
                item = stale.clone();
            }
            // A dropped transaction may keep its locks for a moment.
            let saved = match item.save(&mut *tx).await {
                Ok(saved) => saved,
                Err(err) => {
                    tx.rollback().await.unwrap();
                    return Err(err);
                }
            };
            saved.commit(tx).await?;
            Ok::<_, Error>(attempt)
        };
        assert_eq!(RetryPolicy::new().then_lock(2).retry(write).await.unwrap(), 3);
        let unlocked = async |attempt| {
            let mut tx = pool.begin().await.unwrap();
            let mut item = Item::load(&mut *tx, row).await?;
            assert!(!is_locked(row).await);
            if attempt == 1 {
                item = stale.clone();
            }
            match item.save(&mut *tx).await {
                Ok(saved) => saved.commit(tx).await,
                Err(err) => {
                    tx.rollback().await.unwrap();
                    Err(err)
                }
            }
        };
        RetryPolicy::new().retry(unlocked).await.unwrap();
        assert_eq!(stored(&db).await.1, 3);
        db.assert_nothing_left().await;
    }

    async fn the_attribute_locks_the_row_in_its_transaction<S>(db: TestDb<S>) {
        #[with_lock(version, on = pool, then_lock = 1, as = attempt, tx = tx)]
        async fn save(pool: &Pool<<S as Server>::DB>, stale: &Item) -> Result<u32, Error> {
            let mut item = Item::load(&mut *tx, 7).await?;
            if attempt == 1 {
                item = stale.clone();
            } else if S::NAME != "SQLite" {
                let mut other = lockkit::begin(pool).await?;
                let probe = RowLock::table("t_items").by("item_id", 7_i64).wait(Wait::Never).lock(&mut *other).await;
                assert!(probe.is_err_and(|err| err.is_contended()));
                other.rollback().await?;
            }
            let _ = item.save(&mut *tx).await?;
            Ok(attempt)
        }

        items(&db).await;
        let stale = Item::load(&db.pool, 7).await.unwrap();
        Item::load(&db.pool, 7).await.unwrap().save(&db.pool).await.unwrap();
        assert_eq!(save(&db.pool, &stale).await.unwrap(), 2);
        assert_eq!(stored(&db).await.1, 2);
        db.assert_nothing_left().await;
    }

    async fn the_deadline_ends_the_wait_for_the_lock<S>(db: TestDb<S>) {
        items(&db).await;
        let pool = db.pool_of(2).await;
        let stale = Item::load(&pool, 7).await.unwrap();
        Item::load(&pool, 7).await.unwrap().save(&pool).await.unwrap();
        let holder = tokio::sync::Mutex::new(None);
        let write = async |attempt| {
            if attempt == 2 {
                let mut tx = lockkit::begin(&db.pool).await?;
                RowLock::table("t_items").by("item_id", 7_i64).lock(&mut *tx).await?;
                *holder.lock().await = Some(tx);
            }
            let mut tx = pool.begin().await.unwrap();
            let mut item = Item::load(&mut *tx, 7).await?;
            if attempt == 1 {
                item = stale.clone();
            }
            item.save(&mut *tx).await?.commit(tx).await
        };
        let (policy, started) = (RetryPolicy::new().then_lock(1).deadline(SECOND), Instant::now());
        let failed = timeout(20 * SECOND, policy.retry(write)).await.expect("it ends").unwrap_err();
        assert!(matches!(failed, Error::RetriesExhausted { .. }), "{failed:?}");
        assert!(started.elapsed() >= SECOND / 2);
        drop(holder);
        db.assert_nothing_left().await;
        assert_eq!(stored(&db).await.1, 1);
    }

    async fn a_row_without_an_index_is_not_locked<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_items (item_id BIGINT, stock BIGINT NOT NULL, version BIGINT NOT NULL)").await;
        db.execute("INSERT INTO t_items VALUES (7, 0, 1), (8, 0, 1)").await;
        let stale = Item::load(&db.pool, 7).await.unwrap();
        Item::load(&db.pool, 7).await.unwrap().save(&db.pool).await.unwrap();
        let write = async |attempt| {
            let mut tx = lockkit::begin(&db.pool).await?;
            let mut item = Item::load(&mut *tx, 7).await?;
            if attempt == 1 {
                item = stale.clone();
            } else if S::NAME != "SQLite" {
                // Would wait for a lock on the row, or on all of them.
                let mut other = lockkit::begin(&db.pool).await?;
                let probe = RowLock::table("t_items").by("item_id", 7_i64).wait(Wait::Never);
                probe.check_plan(lockkit::PlanCheck::Off).lock(&mut *other).await?;
                other.rollback().await?;
            }
            item.save(&mut *tx).await?.commit(tx).await?;
            Ok::<_, Error>(attempt)
        };
        assert_eq!(RetryPolicy::new().then_lock(1).retry(write).await.unwrap(), 2);
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

/// The last attempts write with a statement of their own.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Lock(#[from] Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}
