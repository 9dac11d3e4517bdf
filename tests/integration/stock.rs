//! Segmented stock: never more given out than there is, and never called sold out too early.

use std::time::Duration;

use lockkit::{Error, NamedLock, Stock, Wait};
use support::{Backend, Server, TestDb, on_databases, on_every_database, on_every_server};
use tokio::task::JoinSet;
use tokio::time::sleep;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Longer than any of these tests waits.
const PATIENCE: Duration = Duration::from_mins(1);

/// A stock with ten segments, made by the first `put`.
fn stock<S: Backend>(db: &TestDb<S>) -> Stock<S::DB> {
    Stock::new(db.pool.clone(), "sku:42").segments(10).wait(PATIENCE)
}

async fn segments<S: Backend>(db: &TestDb<S>) -> Option<i64> {
    db.fetch_i64("SELECT COUNT(*) FROM lockkit_stock WHERE name = 'sku:42'").await
}

/// Has segment 3 locked until it ends.
async fn lock_a_segment<S: Backend>(db: &TestDb<S>) -> lockkit::Tx<S::DB> {
    let mut tx = lockkit::begin(&db.pool).await.unwrap();
    S::execute(&mut tx, "UPDATE lockkit_stock SET quantity = quantity WHERE segment = 3").await.unwrap();
    tx
}

on_every_database! {
    async fn many_takers_of_different_amounts_never_get_more_than_there_is<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(2000).await.unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            let stock = stock.clone();
            tasks.spawn(async move {
                // Some want more than a segment of 200 has.
                let wanted = if task % 16 == 0 { 230 } else { task % 7 + 1 };
                let mut got = 0;
                loop {
                    match stock.take(wanted).await {
                        Ok(taken) => {
                            assert_eq!(taken.amount(), wanted);
                            got += wanted;
                        }
                        Err(Error::SoldOut { wanted: as_told, left, .. }) => {
                            assert!(as_told == wanted && left < wanted, "{wanted} wanted, {left} left");
                            return got;
                        }
                        Err(err) => panic!("{err:?}"),
                    }
                }
            });
        }
        let got: u64 = tasks.join_all().await.into_iter().sum();
        assert_eq!((got, stock.left().await.unwrap()), (2000, 0));
        db.assert_nothing_left().await;
    }

    async fn takers_exhaust_a_stock_exactly_though_a_segment_is_locked_for_a_while<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(640).await.unwrap();
        let holder = lock_a_segment(&db).await;
        let mut tasks = JoinSet::new();
        for _ in 0..64 {
            let stock = stock.clone();
            tasks.spawn(async move {
                for _ in 0..10 {
                    stock.take(1).await.unwrap();
                }
            });
        }
        // Meanwhile all the others run out.
        sleep(MILLIS(300)).await;
        holder.commit().await.unwrap();
        tasks.join_all().await;
        assert_eq!(stock.left().await.unwrap(), 0);
        assert!(matches!(stock.take(1).await, Err(Error::SoldOut { wanted: 1, left: 0, .. })));
        db.assert_nothing_left().await;
    }

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

    async fn large_amounts_are_gathered_from_several_segments<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(100).await.unwrap();
        let taken = stock.take(35).await.unwrap();
        assert_eq!((taken.amount(), taken.segments().map(|(_, it)| it).sum()), (35, 35));
        assert_eq!(taken.segments().count(), 4, "{taken:?}");

        let refused = stock.take(66).await.unwrap_err();
        assert!(matches!(&refused, Error::SoldOut { key, wanted: 66, left: 65, .. } if *key == "sku:42"), "{refused:?}");

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(stock.take_in(&mut *tx, 65).await.unwrap().amount(), 65);
        tx.commit().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 0);
    }

    async fn putting_taking_and_rebalancing_at_once_keep_the_sum<S>(db: TestDb<S>) {
        let mut tasks = JoinSet::new();
        for task in 0..24 {
            let stock = stock(&db).segments(task % 12 + 1);
            tasks.spawn(async move {
                let mut balance = 0;
                for round in 0..10 {
                    match task % 6 {
                        0 => {
                            stock.put(50).await.unwrap();
                            balance += 50;
                        }
                        1 => stock.rebalance().await.unwrap(),
                        _ => match stock.take(round * 3 + 1).await {
                            Ok(taken) => balance -= i64::try_from(taken.amount()).unwrap(),
                            Err(Error::SoldOut { .. }) => {}
                            Err(err) => panic!("{err:?}"),
                        },
                    }
                }
                balance
            });
        }
        let balance: i64 = tasks.join_all().await.into_iter().sum();
        let left = stock(&db).left().await.unwrap();
        assert_eq!(i64::try_from(left), Ok(balance));
        db.assert_nothing_left().await;
    }

    async fn the_first_puts_at_once_make_one_stock<S>(db: TestDb<S>) {
        let mut tasks = JoinSet::new();
        for _ in 0..16 {
            let stock = stock(&db);
            tasks.spawn(async move { stock.put(7).await.unwrap() });
        }
        tasks.join_all().await;
        assert_eq!((stock(&db).left().await.unwrap(), segments(&db).await), (112, Some(10)));
    }

    async fn the_number_of_segments_can_change_at_any_time<S>(db: TestDb<S>) {
        let (ten, three) = (stock(&db), stock(&db).segments(3));
        ten.put(20).await.unwrap();
        for _ in 0..20 {
            three.take(1).await.expect("what is in the other segments can be taken too");
        }
        assert_eq!(segments(&db).await, Some(10));
        three.put(7).await.unwrap();
        assert_eq!(segments(&db).await, Some(3));
        ten.rebalance().await.unwrap();
        assert_eq!((segments(&db).await, ten.left().await.unwrap()), (Some(10), 7));
        ten.take(7).await.unwrap();
        three.rebalance().await.unwrap();
        assert_eq!((segments(&db).await, ten.left().await.unwrap()), (Some(3), 0));
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

    async fn a_stock_that_nobody_filled_is_sold_out_and_stays_unmade<S>(db: TestDb<S>) {
        let stock = stock(&db);
        assert_eq!(stock.left().await.unwrap(), 0);
        let refused = stock.take(3).await.unwrap_err();
        assert!(matches!(refused, Error::SoldOut { wanted: 3, left: 0, .. }), "{refused:?}");
        stock.rebalance().await.unwrap();
        assert_eq!(segments(&db).await, Some(0));
    }

    async fn stocks_of_different_names_do_not_meet<S>(db: TestDb<S>) {
        let names = ["a", "A", "a ", "a'", "é", "ab"];
        for (number, name) in (1..).zip(names) {
            Stock::new(db.pool.clone(), name).segments(number).put(number.into()).await.unwrap();
        }
        Stock::new(db.pool.clone(), "a").take(1).await.unwrap();
        Stock::new(db.pool.clone(), "ab").rebalance().await.unwrap();
        for (number, name) in (1..).zip(names) {
            let left = Stock::new(db.pool.clone(), name).left().await.unwrap();
            assert_eq!(left, if name == "a" { 0 } else { number }, "{name:?}");
        }
    }

    async fn taking_in_a_transaction_without_one_is_refused<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(1).await.unwrap();
        let mut conn = db.pool.acquire().await.unwrap();
        let refused = stock.take_in(&mut *conn, 1).await;
        assert!(matches!(refused, Err(Error::InvalidOption { option: "take_in", .. })), "{refused:?}");
        assert_eq!(stock.left().await.unwrap(), 1);
    }

    async fn amounts_that_cannot_be_meant_are_refused<S>(db: TestDb<S>) {
        const MOST: u64 = i64::MAX as u64;
        let stock = stock(&db);
        for amount in [0, MOST + 1, u64::MAX] {
            let refusals = [stock.put(amount).await, stock.take(amount).await.map(drop)];
            for refused in refusals {
                assert!(matches!(refused, Err(Error::InvalidOption { option: "amount", .. })), "{refused:?}");
            }
        }
        for segments in [0, 1025, u32::MAX] {
            let refused = stock.clone().segments(segments).take(1).await;
            assert!(matches!(refused, Err(Error::InvalidOption { option: "segments", .. })), "{refused:?}");
        }
        let refused = Stock::new(db.pool.clone(), "two\nlines").take(1).await;
        assert!(matches!(refused, Err(Error::InvalidKey { .. })), "{refused:?}");

        stock.put(MOST - 1).await.unwrap();
        let refused = stock.put(2).await;
        assert!(matches!(refused, Err(Error::InvalidOption { option: "put", .. })), "{refused:?}");
        assert_eq!(stock.left().await.unwrap(), MOST - 1);
        stock.put(1).await.unwrap();
        assert_eq!(stock.take(MOST).await.unwrap().amount(), MOST);
        assert_eq!(stock.left().await.unwrap(), 0);
        db.assert_nothing_left().await;
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

    async fn a_wait_for_what_stays_locked_ends_and_takes_nothing<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(20).await.unwrap();
        let holder = lock_a_segment(&db).await;
        for wait in [Wait::Never, Wait::AtMost(MILLIS(50))] {
            let impatient = stock.clone().wait(wait);
            let refusals = [
                impatient.take(19).await.map(drop),
                impatient.put(1).await,
                impatient.rebalance().await,
            ];
            for refused in refusals {
                assert!(matches!(refused, Err(Error::Contended { .. })), "{refused:?}");
            }
        }
        holder.rollback().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 20);
        stock.take(20).await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn without_its_table_a_stock_says_what_to_run<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let stock = stock(&db);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refusals = [
            stock.take_in(&mut *tx, 1).await.map(drop),
            tx.rollback().await.and(stock.take(1).await.map(drop)),
            stock.put(1).await,
            stock.left().await.map(drop),
            stock.rebalance().await,
        ];
        for refused in refusals {
            assert!(matches!(refused, Err(Error::NotMigrated { .. })), "{refused:?}");
        }
        db.assert_nothing_left().await;
    }
}

on_every_server! {
    async fn takers_pass_over_a_segment_that_a_transaction_has_taken_from<S>(db: TestDb<S>) {
        let stock = stock(&db).segments(2).wait(Wait::Never);
        stock.put(10).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        stock.take_in(&mut *tx, 1).await.unwrap();
        stock.take(5).await.expect("the other segment is free");

        // The rest may come back: it is neither there to take nor gone.
        let refused = stock.take(5).await;
        assert!(matches!(refused, Err(Error::Contended { .. })), "{refused:?}");
        tx.rollback().await.unwrap();
        stock.take(5).await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 0);
    }

    async fn a_taker_waits_for_what_a_transaction_gives_back<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(20).await.unwrap();
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        stock.take_in(&mut *tx, 20).await.unwrap();
        let taker = tokio::spawn({
            let stock = stock.clone();
            async move { stock.take(20).await }
        });
        sleep(MILLIS(100)).await;
        tx.rollback().await.unwrap();
        assert_eq!(taker.await.unwrap().unwrap().amount(), 20);
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
