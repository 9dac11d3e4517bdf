//! The segments of a stock: how they are made, gathered from, and changed in number.

use lockkit::{Error, Stock};
use support::{JoinSet, TestDb, on_every_database};

use super::{segments, stock};

on_every_database! {
    async fn large_amounts_are_gathered_from_several_segments<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(100).await.unwrap();
        let taken = stock.take(35).await.unwrap();
        assert_eq!((taken.amount(), taken.segments().map(|(_, it)| it).sum()), (35, 35));
        assert_eq!(taken.segments().count(), 4, "{taken:?}");

        let refused = stock.take(66).await.unwrap_err();
        assert!(
            matches!(&refused, Error::SoldOut { key, wanted: 66, left: 65, .. } if *key == "sku:42"),
            "{refused:?}"
        );

        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(stock.take_in(&mut *tx, 65).await.unwrap().amount(), 65);
        tx.commit().await.unwrap();
        assert_eq!(stock.left().await.unwrap(), 0);
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
}
