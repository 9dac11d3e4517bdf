//! Many takers at once.

use std::collections::HashSet;

use lockkit::{Error, Wait};
use support::{JoinSet, Server, TestDb, on_databases, on_every_database, on_every_server, spawn};
use tokio::time::{sleep, timeout};

use super::{MILLIS, PATIENCE, lock_a_segment, stock};

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

    async fn takes_one_after_the_other_are_from_several_segments<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(1000).await.unwrap();
        let mut used = HashSet::new();
        for _ in 0..20 {
            used.extend(stock.take(1).await.unwrap().segments().map(|(segment, _)| segment));
        }
        assert!(used.len() > 1, "{used:?}");
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
        let taker = spawn({
            let stock = stock.clone();
            async move { stock.take(20).await }
        });
        sleep(MILLIS(100)).await;
        tx.rollback().await.unwrap();
        assert_eq!(taker.await.unwrap().unwrap().amount(), 20);
    }

    async fn a_taker_waits_only_for_a_segment_that_has_enough<S>(db: TestDb<S>) {
        let stock = stock(&db).segments(2);
        stock.put(2).await.unwrap();
        db.execute("UPDATE lockkit_stock SET quantity = 9 WHERE segment = 1").await;
        let mut holders = Vec::new();
        for segment in [0, 1] {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let lock = format!("UPDATE lockkit_stock SET quantity = quantity WHERE segment = {segment}");
            S::execute(&mut tx, &lock).await.unwrap();
            holders.push(tx);
        }
        let taker = spawn(async move { stock.take(5).await });
        sleep(MILLIS(100)).await;
        // The segment with one piece stays locked.
        holders.pop().unwrap().rollback().await.unwrap();
        let taken = timeout(PATIENCE / 2, taker).await.expect("it has what it waits for").unwrap().unwrap();
        assert_eq!(taken.segments().collect::<Vec<_>>(), [(1, 5)]);
        holders.pop().unwrap().rollback().await.unwrap();
    }
}

on_databases! {
    [sqlite]

    async fn a_sold_out_stock_is_called_so_though_the_database_is_locked<S>(db: TestDb<S>) {
        let stock = stock(&db).wait(Wait::Never);
        stock.put(1).await.unwrap();
        stock.take(1).await.unwrap();
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, "UPDATE lockkit_stock SET quantity = quantity").await.unwrap();
        let refused = stock.take(1).await.unwrap_err();
        assert!(matches!(refused, Error::SoldOut { wanted: 1, left: 0, .. }), "{refused:?}");
        holder.rollback().await.unwrap();
    }
}
