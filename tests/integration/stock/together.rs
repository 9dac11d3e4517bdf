//! Takes that arrive together and become one statement.

use std::time::Duration;

use lockkit::{Error, Stock, Wait};
use sqlx::pool::PoolOptions;
use support::{Backend, JoinSet, Server, TestDb, on_every_database, spawn};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{MILLIS, PATIENCE, stock};

/// A pool of one connection. While the test has it, takes queue.
pub(super) async fn narrow<S: Backend>(url: &str) -> sqlx::Pool<S::DB> {
    // No ping: the next statement on a connection is that of a take.
    PoolOptions::<<S as Server>::DB>::new().max_connections(1).test_before_acquire(false).connect(url).await.unwrap()
}

/// Queues takes of these amounts, in their order. The take before them has the lane and is dropped, so that they all
/// are one batch as soon as there is a connection.
pub(super) fn queued<DB: lockkit::dialect::StockOps>(
    stock: &Stock<DB>,
    amounts: &[u64],
) -> Vec<JoinHandle<Result<u64, Error>>> {
    // A take is in the queue as soon as it was polled.
    let take = |amount| {
        let stock = stock.clone();
        let mut taking = Box::pin(async move { stock.take(amount).await.map(|it| it.amount()) });
        assert!(poll_once(taking.as_mut()).is_none(), "there is no connection");
        taking
    };
    let first = take(1);
    let takers = amounts.iter().map(|amount| spawn(take(*amount))).collect();
    drop(first);
    takers
}

/// Counts the updates of segments from now on, by a trigger. On MySQL and MariaDB it also hides the number that the
/// server returns with the answer.
async fn count_updates<S: Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE updates (n INT)").await;
    if S::NAME == "PostgreSQL" {
        db.execute(
            "CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql
             AS $$ BEGIN INSERT INTO updates VALUES (1); RETURN NULL; END $$",
        )
        .await;
        db.execute("CREATE TRIGGER counts AFTER UPDATE ON lockkit_stock FOR EACH ROW EXECUTE FUNCTION counted()").await;
    } else {
        let body = "INSERT INTO updates VALUES (1)";
        let body = if S::NAME == "SQLite" { format!("BEGIN {body}; END") } else { body.to_owned() };
        db.execute(&format!("CREATE TRIGGER counts AFTER UPDATE ON lockkit_stock FOR EACH ROW {body}")).await;
    }
}

async fn updates<S: Backend>(db: &TestDb<S>) -> i64 {
    db.fetch_i64("SELECT COUNT(*) FROM updates").await.unwrap()
}

on_every_database! {
    async fn takes_that_arrive_together_are_few_statements<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(10_000).await.unwrap();
        count_updates(&db).await;
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            // Handles of their own: all of one pool and key are combined.
            let stock = Stock::new(db.pool.clone(), "sku:42").segments(10).wait(PATIENCE);
            tasks.spawn(async move {
                for round in 0..10 {
                    let amount = (task + round) % 5 + 1;
                    assert_eq!(stock.take(amount).await.unwrap().amount(), amount);
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(stock.left().await.unwrap(), 10_000 - 64 * 10 * 3);
        let updates = updates(&db).await;
        println!("{}: 640 takes in {updates} updates", S::NAME);
        assert!(updates <= 640 / 5, "{updates} updates on {}", S::NAME);
        db.assert_nothing_left().await;
    }

    async fn a_batch_is_one_update_and_each_taker_gets_its_amount<S>(db: TestDb<S>) {
        let direct = stock(&db);
        direct.put(1000).await.unwrap();
        count_updates(&db).await;
        let pool = narrow::<S>(&db.url).await;
        let amounts = [5, 1, 3, 2, 4, 1];
        let connection = pool.acquire().await.unwrap();
        let takers = queued(&Stock::new(pool.clone(), "sku:42").segments(10), &amounts);
        connection.close().await.unwrap();
        for (taker, amount) in takers.into_iter().zip(amounts) {
            assert_eq!(taker.await.unwrap().unwrap(), amount);
        }
        assert_eq!((direct.left().await.unwrap(), updates(&db).await), (1000 - 16, 1));
    }

    async fn takes_that_were_dropped_in_the_queue_have_taken_nothing<S>(db: TestDb<S>) {
        let direct = stock(&db);
        direct.put(1000).await.unwrap();
        let pool = narrow::<S>(&db.url).await;
        let connection = pool.acquire().await.unwrap();
        let mut takers = queued(&Stock::new(pool.clone(), "sku:42").segments(10), &[100, 1, 200, 2]);
        for dropped in [2, 0] {
            let dropped = takers.remove(dropped);
            dropped.abort();
            assert!(dropped.await.unwrap_err().is_cancelled());
        }
        connection.close().await.unwrap();
        for taker in takers {
            taker.await.unwrap().unwrap();
        }
        assert_eq!(direct.left().await.unwrap(), 997);
    }

    async fn a_large_take_is_served_and_keeps_no_small_one_from_being_served<S>(db: TestDb<S>) {
        let direct = stock(&db);
        direct.put(100).await.unwrap();
        let pool = narrow::<S>(&db.url).await;
        let narrow = Stock::new(pool.clone(), "sku:42").segments(10);
        // A segment has ten. 60 must be gathered, 500 are not there.
        let connection = pool.acquire().await.unwrap();
        let takers = queued(&narrow, &[3, 60, 4, 500, 5, 6]);
        connection.close().await.unwrap();
        let mut got = Vec::new();
        for taker in takers {
            got.push(taker.await.unwrap());
        }
        assert!(matches!(&got[3], Err(Error::SoldOut { wanted: 500, left, .. }) if *left <= 97), "{got:?}");
        let got: Vec<_> = got.into_iter().flatten().collect();
        assert_eq!(got, [3, 60, 4, 5, 6]);
        assert_eq!(direct.left().await.unwrap(), 22);

        // More than is left in all: as many as there are, in their order, unless a small one fits.
        let connection = pool.acquire().await.unwrap();
        let takers = queued(&narrow, &[1; 30]);
        connection.close().await.unwrap();
        let mut won = 0;
        for taker in takers {
            match taker.await.unwrap() {
                Ok(amount) => won += amount,
                Err(Error::SoldOut { wanted: 1, left: 0, .. }) => {}
                Err(err) => panic!("{err:?}"),
            }
        }
        assert_eq!((won, direct.left().await.unwrap()), (22, 0));
        db.assert_nothing_left().await;
    }

    async fn sums_that_no_column_holds_are_taken_in_several_batches<S>(db: TestDb<S>) {
        const MOST: u64 = i64::MAX as u64;
        let direct = stock(&db).segments(1);
        direct.put(MOST).await.unwrap();
        let pool = narrow::<S>(&db.url).await;
        let connection = pool.acquire().await.unwrap();
        let takers = queued(&Stock::new(pool.clone(), "sku:42").segments(1), &[2, MOST - 5, 2, MOST]);
        connection.close().await.unwrap();
        let mut got = Vec::new();
        for taker in takers {
            got.push(taker.await.unwrap());
        }
        assert!(matches!(got.pop(), Some(Err(Error::SoldOut { wanted: MOST, .. }))));
        let got: u64 = got.into_iter().map(Result::unwrap).sum();
        assert_eq!((got, direct.left().await.unwrap()), (MOST - 1, 1));
    }

    // Pools of their own take as processes do. Some futures are dropped at a random moment: all or none of it is taken.
    async fn what_several_processes_take_put_and_drop_adds_up<S>(db: TestDb<S>) {
        let mut tasks = JoinSet::new();
        stock(&db).put(300).await.unwrap();
        for process in 0..2 {
            let stock = Stock::new(db.pool_of(4).await, "sku:42").segments(10).wait(PATIENCE);
            for task in 0..32 {
                let stock = stock.clone();
                tasks.spawn(async move {
                    let (mut put, mut got, mut unknown) = (0, 0, 0);
                    for round in 0..12 {
                        let amount = (task + round) % 5 + 1;
                        if task == 0 {
                            stock.put(60).await.unwrap();
                            put += 60;
                        }
                        let take = stock.take(amount);
                        let taken = if (task + process) % 3 == 0 {
                            let limit = Duration::from_micros(fastrand(3000));
                            let Ok(taken) = timeout(limit, take).await else {
                                unknown += amount;
                                continue;
                            };
                            taken
                        } else {
                            take.await
                        };
                        match taken {
                            Ok(taken) => got += taken.amount(),
                            Err(Error::SoldOut { left, .. }) => assert!(left < amount, "{left} left, {amount} wanted"),
                            Err(err) => panic!("{err:?}"),
                        }
                    }
                    (put, got, unknown)
                });
            }
        }
        let (mut put, mut got, mut unknown) = (300, 0, 0);
        for (its_put, its_got, its_unknown) in tasks.join_all().await {
            (put, got, unknown) = (put + its_put, got + its_got, unknown + its_unknown);
        }
        db.assert_nothing_left().await;
        let gone = put - stock(&db).left().await.unwrap();
        assert!((got..=got + unknown).contains(&gone), "{got} were acknowledged, {unknown} unknown, {gone} are gone");
    }

    async fn a_take_that_is_not_polled_holds_up_no_other<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(100).await.unwrap();
        let mut idle = Box::pin(stock.take(1));
        // Rarely, the answer is there before the first poll ends.
        let answered = poll_once(idle.as_mut());
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let stock = stock.clone();
            tasks.spawn(async move { stock.take(1).await });
        }
        let taken = timeout(PATIENCE, tasks.join_all()).await.expect("they are answered");
        assert!(taken.iter().all(Result::is_ok), "{taken:?}");
        match answered {
            Some(taken) => taken.unwrap(),
            None => idle.await.unwrap(),
        };
        assert_eq!(stock.left().await.unwrap(), 91);
    }

    async fn a_runtime_that_ends_or_is_not_driven_holds_up_no_other<S>(db: TestDb<S>) {
        stock(&db).put(1000).await.unwrap();
        // All connections are opened here: one that was opened on the other runtime would wait for that to be driven.
        let pool = db.pool_of(8).await;
        let mut all = Vec::new();
        for _ in 0..8 {
            all.push(pool.acquire().await.unwrap());
        }
        drop(all);
        let stock = Stock::new(pool, "sku:42").segments(10).wait(PATIENCE);
        let other = {
            let stock = stock.clone();
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let mut takes = JoinSet::new();
                    for _ in 0..8 {
                        let stock = stock.clone();
                        takes.spawn(async move { stock.take(1).await.map(drop) });
                    }
                    takes.join_next().await.unwrap().unwrap().unwrap();
                    takes.detach_all();
                });
                runtime
            })
        };
        let idle = tokio::task::spawn_blocking(|| other.join().unwrap()).await.unwrap();
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let stock = stock.clone();
            tasks.spawn(async move { stock.take(1).await });
        }
        let taken = timeout(PATIENCE, tasks.join_all()).await.expect("they are answered");
        assert!(taken.iter().all(Result::is_ok), "{taken:?}");
        idle.shutdown_background();
        let left = stock.left().await.unwrap();
        assert!((984..=991).contains(&left), "{left}");
    }

    async fn each_taker_of_a_batch_that_fails_hears_of_it<S>(db: TestDb<S>) {
        let pool = narrow::<S>(&db.url).await;
        stock(&db).put(100).await.unwrap();
        db.execute("DROP TABLE lockkit_stock").await;
        let connection = pool.acquire().await.unwrap();
        let takers = queued(&Stock::new(pool.clone(), "sku:42"), &[1, 2, 3]);
        connection.close().await.unwrap();
        for taker in takers {
            let failed = taker.await.unwrap().unwrap_err();
            assert!(matches!(failed, Error::NotMigrated { .. }), "{failed:?}");
        }

        // No connection comes free.
        let pool = PoolOptions::<<S as Server>::DB>::new()
            .max_connections(1)
            .acquire_timeout(MILLIS(300))
            .connect(&db.url)
            .await
            .unwrap();
        let _connection = pool.acquire().await.unwrap();
        for taker in queued(&Stock::new(pool.clone(), "sku:42"), &[1, 2, 3]) {
            let failed = taker.await.unwrap().unwrap_err();
            assert!(matches!(failed, Error::PoolStarved { held: 1, size: 1, .. }), "{failed:?}");
        }
    }

    async fn a_taker_that_does_not_wait_is_refused_at_once_beside_patient_ones<S>(db: TestDb<S>) {
        let stock = stock(&db);
        stock.put(20).await.unwrap();
        // All segments, or the database, are locked.
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, "UPDATE lockkit_stock SET quantity = quantity").await.unwrap();
        let patient: Vec<_> = (0..4)
            .map(|_| {
                let stock = stock.clone();
                spawn(async move { stock.take(2).await })
            })
            .collect();
        // Where there is one lock for all writers, a batch waits for it by now.
        sleep(MILLIS(200)).await;
        let impatient = stock.clone().wait(Wait::Never);
        let asked = Instant::now();
        let refused = timeout(PATIENCE / 2, impatient.take(2)).await.expect("it does not wait").unwrap_err();
        assert!(matches!(refused, Error::Contended { .. }), "{refused:?} after {:?}", asked.elapsed());
        holder.rollback().await.unwrap();
        for taker in patient {
            assert_eq!(taker.await.unwrap().unwrap().amount(), 2);
        }
        assert_eq!(stock.left().await.unwrap(), 12);
    }
}

/// Polls a future once.
fn poll_once<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.poll(&mut context) {
        std::task::Poll::Ready(it) => Some(it),
        std::task::Poll::Pending => None,
    }
}

/// A random number below this one.
fn fastrand(below: u64) -> u64 {
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    u64::from(nanos) / 7 % below
}
