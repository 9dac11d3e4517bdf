//! Pieces that are taken within a transaction of the caller.

use lockkit::{Error, NamedLock, Stock, Wait};
use support::{JoinSet, Server, TestDb, on_databases, on_every_database, on_every_server};

use super::{MILLIS, PATIENCE, stock};

on_every_database! {
    async fn transactions_exhaust_a_stock_exactly<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(160).await.unwrap();
        let mut tasks = JoinSet::new();
        for _ in 0..32 {
            let (stock, pool) = (stock.clone(), db.pool.clone());
            tasks.spawn(async move {
                let mut won = 0;
                loop {
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    match stock.take_in(&mut *tx, 1).await {
                        Ok(_) => tx.commit().await.unwrap(),
                        Err(Error::SoldOut { left: 0, .. }) => return won,
                        // InnoDB may keep the lock of a segment that was passed over.
                        Err(err) if lockkit::is_retryable(&err) && S::NAME != "PostgreSQL" => continue,
                        Err(err) => panic!("{err:?}"),
                    }
                    won += 1;
                }
            });
        }
        assert_eq!(tasks.join_all().await.into_iter().sum::<u64>(), 160);
        assert_eq!(stock.left().await.unwrap(), 0);
    }

    async fn what_a_transaction_took_is_back_when_it_rolls_back<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(20).await.unwrap();
        for amount in [1, 2, 13] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            stock.take_in(&mut *tx, amount).await.unwrap();
            tx.rollback().await.unwrap();
            assert_eq!(stock.left().await.unwrap(), 20);
        }
        // In one of sqlx as well, and more than once.
        let mut tx = db.pool.begin().await.unwrap();
        stock.take_in(&mut *tx, 1).await.unwrap();
        stock.take_in(&mut *tx, 19).await.unwrap();
        let refused = stock.take_in(&mut *tx, 1).await.unwrap_err();
        assert!(matches!(refused, Error::SoldOut { left: 0, .. }), "{refused:?}");
        tx.commit().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 0);
        db.assert_nothing_left().await;
    }

    async fn a_sold_out_stock_does_not_spoil_the_transaction<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (n INT)").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = stock(&db).take_in(&mut *tx, 1).await.unwrap_err();
        assert!(matches!(refused, Error::SoldOut { .. }), "{refused:?}");
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t").await, Some(1));
    }

    async fn taking_in_a_transaction_without_one_is_refused<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(1).await.unwrap();
        let mut conn = db.pool.acquire().await.unwrap();
        let refused = stock.take_in(&mut *conn, 1).await;
        assert!(matches!(refused, Err(Error::InvalidOption { option: "take_in", .. })), "{refused:?}");
        assert_eq!(stock.left().await.unwrap(), 1);
    }

    async fn transactions_that_gather_large_amounts_do_not_deadlock<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(10_000).await.unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..16 {
            let (stock, pool) = (stock.clone(), db.pool.clone());
            tasks.spawn(async move {
                for round in 0..8 {
                    // The transaction of a taker is the caller's, who would hear of a deadlock.
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    let amount = [1, 60, 15, 31][(task + round) % 4];
                    stock.take_in(&mut *tx, amount).await.unwrap();
                    tx.commit().await.unwrap();
                    if task == 0 {
                        stock.rebalance().await.unwrap();
                    }
                }
            });
        }
        tasks.join_all().await;
        // Each amount was wanted as often as the others.
        assert_eq!(stock.left().await.unwrap(), 10_000 - 32 * (1 + 60 + 15 + 31));
        db.assert_nothing_left().await;
    }

    async fn transactions_that_take_from_two_stocks_in_opposite_orders_do_not_deadlock<S>(db: TestDb<S>) {
        let stock = |name: &str| Stock::new(db.pool.clone(), name).segments(32).wait(PATIENCE);
        for name in ["a", "b"] {
            stock(name).put(32_000).await.unwrap();
        }
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let names = if task % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
            let (first, second, pool) = (stock(names[0]), stock(names[1]), db.pool.clone());
            tasks.spawn(async move {
                for _ in 0..20 {
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    first.take_in(&mut *tx, 1).await.unwrap();
                    second.take_in(&mut *tx, 1).await.unwrap();
                    tx.commit().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        for name in ["a", "b"] {
            assert_eq!(stock(name).left().await.unwrap(), 32_000 - 160);
        }
    }
}

on_every_server! {
    async fn a_transaction_passes_over_a_locked_segment_and_leaves_those_it_does_not_need_to_others<S>(db: TestDb<S>) {
        let stock = stock(&db).wait(Wait::Never);
        stock.put(100).await.unwrap();
        // A segment has ten.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        stock.take_in(&mut *tx, 15).await.unwrap();
        stock.take(10).await.expect("eight segments are unlocked and full");
        tx.rollback().await.unwrap();

        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, "UPDATE lockkit_stock SET quantity = quantity WHERE segment = 0").await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        stock.take_in(&mut *tx, 10).await.expect("other segments are unlocked and full");
        tx.rollback().await.unwrap();
        holder.rollback().await.unwrap();
    }

    async fn a_stock_that_was_filled_after_a_transaction_first_read_is_not_called_sold_out<S>(db: TestDb<S>) {
        let stock = stock(&db);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("k").lock(&mut *tx).await.unwrap();
        assert_eq!(S::fetch_i64(&mut tx, "SELECT COUNT(*) FROM lockkit_stock").await.unwrap(), Some(0));
        stock.put(20).await.unwrap();
        stock.take_in(&mut *tx, 15).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 5);
    }
}

on_databases! {
    [sqlite]

    async fn taking_in_a_plain_transaction_keeps_to_the_wait_of_the_stock<S>(db: TestDb<S>) {
        let stock = Stock::new(db.pool.clone(), "s").wait(MILLIS(50));
        stock.put(5).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        stock.take_in(&mut *tx, 1).await.unwrap();
        let mut other = db.pool.begin().await.unwrap();
        sqlx::query("PRAGMA busy_timeout = 600000").execute(&mut *other).await.unwrap();
        let taking = tokio::time::timeout(PATIENCE, stock.take_in(&mut *other, 1)).await;
        let refused = taking.expect("it waits as long as the connection does").unwrap_err();
        assert!(matches!(refused, Error::Contended { waited, .. } if waited >= MILLIS(50)), "{refused}");
        let bound: i64 = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(&mut *other).await.unwrap();
        assert_eq!(bound, 600_000);
        tx.rollback().await.unwrap();
    }
}
