//! Batches whose answer is lost. Each taker is told what happened.

use lockkit::{Error, Fault, Stock};
use sqlx::{Pool, pool::PoolConnection};
use support::{Backend, Proxy, Server, TestDb, on_databases, on_every_server, spawn};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    MILLIS, PATIENCE, stock,
    together::{narrow, queued},
};

const AMOUNTS: [u64; 6] = [5, 1, 3, 2, 4, 1];
const SUM: u64 = 16;

/// Waits until so many pieces are left.
async fn until_left<S: Backend>(db: &TestDb<S>, left: u64) {
    while stock(db).left().await.unwrap() != left {
        sleep(MILLIS(10)).await;
    }
}

/// A take in the queue.
type Taker = JoinHandle<Result<u64, Error>>;

/// Queues a batch of these amounts, which is sent when the connection is dropped: the pool has no other.
async fn batch<S: Backend>(pool: &Pool<S::DB>, amounts: &[u64]) -> (PoolConnection<S::DB>, Vec<Taker>) {
    let connection = pool.acquire().await.unwrap();
    (connection, queued(&Stock::new(pool.clone(), "sku:42").segments(10), amounts))
}

async fn each_took(takers: Vec<Taker>, amounts: &[u64]) {
    for (taker, amount) in takers.into_iter().zip(amounts) {
        assert_eq!(taker.await.unwrap().unwrap(), *amount);
    }
}

/// Runs a batch through the proxy, so that its note exists.
async fn one_batch<S: Backend>(pool: &Pool<S::DB>) {
    let (connection, takers) = batch::<S>(pool, &[1, 1]).await;
    drop(connection);
    each_took(takers, &[1, 1]).await;
}

on_every_server! {
    async fn a_batch_that_was_executed_is_known_to_be_though_its_answer_is_lost<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        // The key is among the values that the statement is executed with.
        proxy.hold_replies_to("sku:42");
        drop(connection);
        until_left(&db, 1000 - SUM).await;
        proxy.reset();
        proxy.pass_replies();
        each_took(takers, &AMOUNTS).await;
        assert_eq!(stock(&db).left().await.unwrap(), 1000 - SUM, "taken once");
    }

    async fn a_batch_that_took_for_some_is_known_to_have_taken_for_those<S>(db: TestDb<S>) {
        // A segment has 7: enough for the first two takers. The others take from other segments.
        stock(&db).put(70).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        proxy.hold_replies_to("sku:42");
        drop(connection);
        // MySQL and MariaDB look for a segment that has enough for all first.
        if S::NAME == "PostgreSQL" {
            until_left(&db, 64).await;
        }
        sleep(MILLIS(50)).await;
        proxy.reset();
        proxy.pass_replies();
        each_took(takers, &AMOUNTS).await;
        assert_eq!(stock(&db).left().await.unwrap(), 70 - SUM, "taken once");
    }

    async fn a_batch_that_never_arrived_takes_once<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        proxy.stall(true);
        drop(connection);
        sleep(MILLIS(100)).await;
        proxy.reset();
        proxy.stall(false);
        each_took(takers, &AMOUNTS).await;
        assert_eq!(stock(&db).left().await.unwrap(), 1000 - SUM);
    }

    // A statement is prepared before it is executed: the one that makes the note, then that of the batch.
    async fn a_batch_that_was_prepared_and_never_executed_takes_once<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        for (statement, left) in [("INTO lockkit_stock_batch", 1000 - SUM), ("s.quantity - ", 998 - 2 * SUM)] {
            let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
            proxy.hold_replies_to(statement);
            drop(connection);
            proxy.replies_are_held().await;
            proxy.reset();
            proxy.pass_replies();
            each_took(takers, &AMOUNTS).await;
            assert_eq!(stock(&db).left().await.unwrap(), left, "{statement}");
            // Its note is not that of the next one.
            one_batch::<S>(&pool).await;
            proxy.reset();
        }
    }

    // The server goes on with a statement whose client is gone.
    async fn a_batch_that_is_still_executed_when_its_connection_breaks_is_waited_for<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        one_batch::<S>(&pool).await;
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, "UPDATE lockkit_stock_batch SET used_us = used_us").await.unwrap();

        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        drop(connection);
        sleep(MILLIS(200)).await;
        assert_eq!(stock(&db).left().await.unwrap(), 998);
        proxy.reset();
        sleep(MILLIS(200)).await;
        holder.rollback().await.unwrap();
        each_took(takers, &AMOUNTS).await;
        db.assert_nothing_left().await;
        assert_eq!(stock(&db).left().await.unwrap(), 998 - SUM, "taken once");
    }

    // Longer than one attempt to find out takes.
    async fn of_a_server_that_comes_back_the_outcome_is_known<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        proxy.hold_replies_to("sku:42");
        drop(connection);
        until_left(&db, 1000 - SUM).await;
        proxy.stall(true);
        proxy.reset();
        sleep(MILLIS(3000)).await;
        proxy.pass_replies();
        proxy.stall(false);
        each_took(takers, &AMOUNTS).await;
        assert_eq!(stock(&db).left().await.unwrap(), 1000 - SUM, "taken once");
    }

    async fn a_batch_of_one_has_no_note_and_fails_at_once_when_its_answer_is_lost<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, mut takers) = batch::<S>(&pool, &[7]).await;
        proxy.hold_replies_to("sku:42");
        drop(connection);
        until_left(&db, 993).await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_stock_batch").await, Some(0));
        proxy.reset();
        proxy.pass_replies();
        let lost = takers.remove(0).await.unwrap().unwrap_err();
        assert!(matches!(lost, Error::Database { fault: Fault::Unavailable, .. }), "{lost:?}");
        assert_eq!(stock(&db).left().await.unwrap(), 993, "taken once");
    }

    async fn a_batch_whose_note_is_there_is_one_round_trip<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let mut costs = Vec::new();
        for _ in 0..6 {
            // A connection that goes back to its pool is pinged.
            let before = proxy.round_trips() - proxy.pings();
            one_batch::<S>(&pool).await;
            sleep(MILLIS(30)).await;
            costs.push(proxy.round_trips() - proxy.pings() - before);
        }
        // The first ones prepare the statements, and a message in two pieces looks like one round trip more.
        assert_eq!(costs[2..].iter().min(), Some(&1), "{costs:?}");
    }

    async fn of_a_server_that_stays_away_the_outcome_is_unknown<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        proxy.hold_replies_to("sku:42");
        drop(connection);
        until_left(&db, 1000 - SUM).await;
        proxy.stall(true);
        proxy.reset();
        for taker in takers {
            let unknown = taker.await.unwrap().unwrap_err();
            assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        }
    }

    async fn a_take_from_several_segments_whose_commit_is_not_answered_is_of_unknown_outcome<S>(db: TestDb<S>) {
        stock(&db).put(40).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let stock = Stock::new(pool, "sku:42").segments(10).wait(MILLIS(2000));
        // COMMIT alone, not the READ COMMITTED of the BEGIN.
        proxy.hold_replies_to(if S::NAME == "PostgreSQL" { "COMMIT AND CHAIN" } else { "\u{3}COMMIT" });
        let unknown = timeout(PATIENCE, stock.take(25)).await.expect("it has a bound").unwrap_err();
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        proxy.pass_replies();
        db.assert_nothing_left().await;
    }

    async fn a_take_from_several_segments_that_cannot_begin_has_a_bound<S>(db: TestDb<S>) {
        stock(&db).put(40).await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let stock = Stock::new(pool, "sku:42").segments(10).wait(MILLIS(2000));
        proxy.hold_replies_to("COMMITTED");
        let silent = timeout(PATIENCE, stock.take(25)).await.expect("it has a bound").unwrap_err();
        assert!(matches!(silent, Error::Database { fault: Fault::Unavailable, .. }), "{silent:?}");
        proxy.pass_replies();
        db.assert_nothing_left().await;
        assert_eq!(super::stock(&db).left().await.unwrap(), 40);
    }

    // It waits for a segment when the server falls silent.
    async fn a_take_without_an_answer_does_not_say_that_others_hold_a_segment<S>(db: TestDb<S>) {
        stock(&db).put(40).await.unwrap();
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, "UPDATE lockkit_stock SET quantity = quantity").await.unwrap();
        let proxy = Proxy::start(&db.url);
        let pool = narrow::<S>(proxy.url()).await;
        let stock = Stock::new(pool, "sku:42").segments(10).wait(MILLIS(2000));
        let taking = spawn(async move { stock.take(25).await.map(|it| it.amount()) });
        sleep(MILLIS(800)).await;
        proxy.stall(true);
        let silent = timeout(PATIENCE, taking).await.expect("it has a bound").unwrap().unwrap_err();
        assert!(matches!(silent, Error::Database { fault: Fault::Unavailable, .. }), "{silent:?}");
        holder.rollback().await.unwrap();
    }

    async fn notes_that_were_deleted_are_made_anew_and_old_ones_are_deleted<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let pool = narrow::<S>(&db.url).await;
        one_batch::<S>(&pool).await;
        one_batch::<S>(&pool).await;
        let notes = "SELECT COUNT(*) FROM lockkit_stock_batch";
        assert_eq!(db.fetch_i64(notes).await, Some(1), "a process uses its note again");

        db.execute("DELETE FROM lockkit_stock_batch").await;
        one_batch::<S>(&pool).await;
        assert_eq!((db.fetch_i64(notes).await, stock(&db).left().await.unwrap()), (Some(1), 994));

        db.execute("UPDATE lockkit_stock_batch SET used_us = 1").await;
        let another = narrow::<S>(&db.url).await;
        one_batch::<S>(&another).await;
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_stock_batch WHERE used_us > 1").await, Some(1));
        assert_eq!(db.fetch_i64(notes).await, Some(1), "the old note is gone");
    }
}

on_databases! { [postgres]
    async fn a_batch_whose_answer_cannot_be_read_is_known_to_have_been_executed<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        let proxy = Proxy::start(&db.url);
        proxy.replace("SELECT segment, takers FROM taken", "SELECT segment, NULL   FROM taken");
        let pool = narrow::<S>(proxy.url()).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        drop(connection);
        each_took(takers, &AMOUNTS).await;
        assert_eq!(stock(&db).left().await.unwrap(), 1000 - SUM, "taken once");
    }

    async fn takers_go_on_alone_where_their_note_cannot_be_read<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        db.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$").await;
        let refuses = "BEFORE INSERT ON lockkit_stock_batch FOR EACH ROW EXECUTE FUNCTION nothing()";
        db.execute(&format!("CREATE TRIGGER refuses {refuses}")).await;
        let pool = narrow::<S>(&db.url).await;
        let (connection, takers) = batch::<S>(&pool, &AMOUNTS).await;
        drop(connection);
        timeout(PATIENCE, each_took(takers, &AMOUNTS)).await.expect("they take");
        assert_eq!(stock(&db).left().await.unwrap(), 1000 - SUM);
    }
}
