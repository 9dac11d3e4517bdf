//! Many who want the same thing at once: nothing is sold twice, no update is lost, and no two hold one lease.

use std::env;
use std::time::Instant;

use support::draws::{Draws, Stock, Strategy, Tally};
use support::{Server, TestDb, on_every_database};

const TASKS: u64 = 64;

/// How often each task draws: `LOCKKIT_TEST_DRAWS`, or this.
fn draws(usual: u64) -> u64 {
    match env::var("LOCKKIT_TEST_DRAWS") {
        Ok(draws) => draws.parse().expect("LOCKKIT_TEST_DRAWS is a number"),
        Err(_) => usual,
    }
}

macro_rules! draw_all {
    ($S:ty, $db:expr, $strategy:expr, $draws:expr) => {{
        let (db, strategy, draws) = (&$db, $strategy, $draws);
        // The first draws win, the others find it sold out.
        let before = (TASKS * draws / 2).min(4000);
        Stock::fill(db, before).await;
        let started = Instant::now();
        let tally = Draws::<$S>::new(db.pool.clone()).draw_all(strategy, TASKS, draws).await;
        println!("{strategy} on {}: {tally:?} in {:.1?}", <$S>::NAME, started.elapsed());
        let stock = Stock::look(db, before).await;
        (tally, stock)
    }};
}

fn sold_exactly_what_there_was(tally: Tally, stock: Stock) {
    assert!(stock.adds_up(tally), "{tally:?}, {stock:?}");
    assert_eq!((tally.gave_up, stock.left), (0, 0), "{tally:?}, {stock:?}");
}

on_every_database! {
    async fn row_locks_lose_no_update_and_sell_nothing_twice<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Row, draws(100));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn named_locks_lose_no_update_and_sell_nothing_twice<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Named, draws(100));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn leases_lose_no_update_and_sell_nothing_twice<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Lease, draws(100));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn versions_lose_no_update_and_sell_nothing_twice<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Version, draws(100));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn without_a_lock_updates_are_lost_so_that_the_oracle_is_seen_to_fail<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Naive, 20);
        assert!(!stock.adds_up(tally), "{tally:?}, {stock:?}");
        assert!(tally.won > stock.before - u64::try_from(stock.left).unwrap(), "{tally:?}, {stock:?}");
    }
}
