//! Amounts and stocks that are refused.

use lockkit::{Error, Stock};
use support::{TestDb, on_every_database};

use super::{segments, stock};

on_every_database! {
    async fn a_stock_that_nobody_filled_is_sold_out_and_stays_unmade<S>(db: TestDb<S>) {
        let stock = stock(&db);
        assert_eq!(stock.left().await.unwrap(), 0);
        let refused = stock.take(3).await.unwrap_err();
        assert!(matches!(refused, Error::SoldOut { wanted: 3, left: 0, .. }), "{refused:?}");
        stock.rebalance().await.unwrap();
        assert_eq!(segments(&db).await, Some(0));
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
