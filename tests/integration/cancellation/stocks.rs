//! Stocks, dropped at every await.

use std::time::Instant;

use lockkit::{Error, Stock};
use support::{Server, TestDb, on_every_database, spawn};
use tokio::task::JoinHandle;

use super::{Bench, PATIENCE};

on_every_database! {
    async fn stocks_can_be_dropped_at_any_point<S>(db: TestDb<S>) {
        let bench = Bench::<S>::new(db).await;
        let Bench { db, pool, .. } = &bench;
        let stock = Stock::new(pool.clone(), "k").segments(4).wait(PATIENCE);
        let others = Stock::new(db.pool.clone(), "k").segments(4).wait(PATIENCE);

        let filled = async || {
            db.execute("DELETE FROM lockkit_stock").await;
            others.put(40).await.unwrap();
            stock.clone()
        };
        // Whatever happened, happened to all of it or to none.
        let all_or_none = |changed: u64, unchanged: u64| {
            let others = others.clone();
            move |completed: bool| {
                let others = others.clone();
                async move {
                    let deadline = Instant::now() + PATIENCE;
                    while !db.leftovers().await.is_empty() {
                        assert!(Instant::now() < deadline, "{}", db.leftovers().await.join("\n"));
                    }
                    let left = others.left().await.unwrap();
                    assert!(left == changed || left == unchanged && !completed, "{left} left, {changed} expected");
                }
            }
        };
        macro_rules! drop_everywhere {
            ($name:expr, $left:literal, |$stock:ident| $work:expr) => {{
                let check = all_or_none($left, 40);
                let make = async || {
                    let $stock = filled().await;
                    (async move { $work }, ())
                };
                bench.drop_everywhere($name, make, |(), completed| check(completed)).await;
            }};
        }
        drop_everywhere!("Stock::put", 47, |it| it.put(7).await);
        drop_everywhere!("Stock::take", 37, |it| it.take(3).await.map(drop));
        drop_everywhere!(("Stock::take", "from several segments"), 15, |it| it.take(25).await.map(drop));
        drop_everywhere!("Stock::left", 40, |it| it.left().await.map(drop));
        drop_everywhere!("Stock::rebalance", 40, |it| it.segments(3).rebalance().await);
        let check = all_or_none(40, 40);
        let take_in = async || {
            let stock = filled().await;
            let mut tx = lockkit::begin(pool).await.unwrap();
            (async move { stock.take_in(&mut *tx, 25).await }, ())
        };
        bench.drop_everywhere("Stock::take_in", take_in, |(), completed| check(completed)).await;

        // Together with others, whose takes succeed in any case.
        let together = async || {
            let stock = filled().await;
            let takers: Vec<_> = (0..3)
                .map(|_| {
                    let stock = stock.clone();
                    spawn(async move { stock.take(1).await.map(drop) })
                })
                .collect();
            (async move { stock.take(3).await }, takers)
        };
        let check = all_or_none(34, 37);
        let others_took = |takers: Vec<JoinHandle<Result<(), Error>>>, completed| {
            let check = check(completed);
            async move {
                for taker in takers {
                    taker.await.unwrap().unwrap();
                }
                check.await;
            }
        };
        bench.drop_everywhere(("Stock::take", "together with others"), together, others_took).await;

        // Somebody else has taken all of it, and gives it back after the drop. The first statement may then still be on
        // its way; who had to wait is gone.
        let blocked = async || {
            let stock = filled().await;
            let mut other = lockkit::begin(&db.pool).await.unwrap();
            others.take_in(&mut *other, 40).await.unwrap();
            (async move { stock.take(3).await }, other)
        };
        let check = all_or_none(37, 40);
        let release = |other: lockkit::Tx<<S as Server>::DB>, completed| {
            let check = check(completed);
            async move {
                other.rollback().await.unwrap();
                check.await;
            }
        };
        bench.drop_blocked(("Stock::take", "of what somebody else took"), blocked, release).await;
    }
}
