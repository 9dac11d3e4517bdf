//! Many takers at once.

use lockkit::{Error, Wait};
use support::{TestDb, on_every_database, on_every_server};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{MILLIS, lock_a_segment, stock};

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
        let taker = tokio::spawn({
            let stock = stock.clone();
            async move { stock.take(20).await }
        });
        sleep(MILLIS(100)).await;
        tx.rollback().await.unwrap();
        assert_eq!(taker.await.unwrap().unwrap().amount(), 20);
    }
}
