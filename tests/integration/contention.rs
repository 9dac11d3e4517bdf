//! Many who want the same thing at once: nothing is sold twice, no update is lost, and no two hold one lease.

use std::collections::BTreeMap;
use std::env;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockkit::{Error, Fault, Lease, Leases};
use sqlx::Pool;
use support::draws::{Draws, Stock, Strategy, Tally};
use support::{Backend, JoinSet, Server, TestDb, on_every_database};
use tokio::time::sleep;

const TASKS: u64 = 64;

/// How often each of the tasks draws: `LOCKKIT_TEST_DRAWS`, or this.
///
/// 2,000 each would take minutes: with a build beside it on the same 2 cores, a draw by row or name was measured at
/// 0.4 (`SQLite`) to 1.5 ms, by version at 0.4 to 3 ms, and by lease, which is handed over each time, at 1.6 to 3 ms.
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
        let (tally, stock) = draw_all!(S, db, Strategy::Lease, draws(40));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn versions_lose_no_update_and_sell_nothing_twice<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Version, draws(60));
        sold_exactly_what_there_was(tally, stock);
        db.assert_nothing_left().await;
    }

    async fn without_a_lock_updates_are_lost_so_that_the_oracle_is_seen_to_fail<S>(db: TestDb<S>) {
        let (tally, stock) = draw_all!(S, db, Strategy::Naive, 20);
        assert!(!stock.adds_up(tally), "{tally:?}, {stock:?}");
        assert!(tally.won > stock.before - u64::try_from(stock.left).unwrap(), "{tally:?}, {stock:?}");
    }
}

/// When somebody believed to hold a lease, by the monotonic clock that all tasks share.
#[derive(Debug)]
struct Belief {
    fence: u64,
    from: Instant,
    until: Instant,
}

/// What all holders believed, by key.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<BTreeMap<String, Vec<Belief>>>>);

impl Log {
    fn add(&self, key: &str, belief: Belief) {
        self.0.lock().unwrap().entry(key.to_owned()).or_default().push(belief);
    }

    /// Fences rise, and whoever has the greater one came after all those with smaller ones were gone.
    fn assert_nobody_met(&self, server: &str) {
        let mut all = 0;
        for (key, beliefs) in &mut *self.0.lock().unwrap() {
            beliefs.sort_by_key(|it| it.fence);
            all += beliefs.len();
            for pair in beliefs.windows(2) {
                let [first, second] = pair else { unreachable!("windows of two") };
                assert!(first.fence < second.fence, "{key}: {first:?} and {second:?} have the same fence");
                assert!(first.until <= second.from, "{key}: {first:?} and {second:?} overlap");
            }
        }
        println!("{server}: {all} leases, none of them overlap");
    }
}

/// How a holder ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Release,
    Drop,
    /// Its connections are gone, so that it is not renewed until its trust has run out.
    Expire,
    /// Somebody else makes its time run out in the database.
    Theft,
}

/// Holds the lease for a while, ends as it is told, and notes from when until when it believed to hold it.
async fn hold<S: Backend>(db: &TestDb<S>, log: &Log, pool: &Pool<S::DB>, lease: Lease<Pool<S::DB>>, end: End) {
    let from = Instant::now();
    let key = lease.key().to_string();
    let fence = lease.fence().get();
    sleep(Duration::from_micros(300 * (fence % 10))).await;
    let until = match end {
        End::Release | End::Drop => Instant::now(),
        End::Expire => {
            let mut connections = Vec::new();
            for _ in 0..pool.options().get_max_connections() {
                connections.push(pool.acquire().await.expect("acquire a connection"));
            }
            lease.lost().await;
            Instant::now()
        }
        End::Theft => {
            let until = Instant::now();
            db.execute(&format!("UPDATE lockkit_lease SET expires_us = 1 WHERE name = '{key}' AND fence = {fence}"))
                .await;
            until
        }
    };
    let until = until.min(lease.trusted_until());
    // Trust may have run out before the answer of the grant was looked at.
    log.add(&key, Belief { fence, from: from.min(until), until });
    if let End::Release = end
        && let Err(err) = lease.release().await
    {
        // The limit of its answer is of the short ttl, which a machine that stalls exceeds.
        let is_unanswered =
            matches!(err, Error::Database { fault: Fault::Unavailable, .. } | Error::PoolStarved { .. });
        assert!(is_unanswered, "release: {err:?}");
    }
}

/// A process of its own, as far as leases go: a line of its own and a pool of its own.
async fn process<S: Backend>(db: &TestDb<S>, connections: u32) -> (Leases<Pool<S::DB>>, Pool<S::DB>) {
    let pool = db.pool_of(connections).await;
    let leases = Leases::builder(pool.clone()).ttl(Duration::from_millis(90)).wait(Duration::from_mins(1));
    // For `End::Expire`.
    let leases = leases.own_connections(0);
    (leases.build().expect("valid settings"), pool)
}

on_every_database! {
    async fn holders_of_one_key_never_meet_and_their_fences_rise<S>(db: TestDb<S>) {
        let (db, log) = (Arc::new(db), Log::default());
        let mut processes = JoinSet::new();
        for number in 0..8 {
            let (db, log) = (Arc::clone(&db), log.clone());
            processes.spawn(async move {
                let (leases, pool) = process(&db, 1).await;
                for round in 0..12 {
                    let lease = leases.lease("k").acquire().await.expect("acquire");
                    let end = match (number + round) % 8 {
                        0 => End::Expire,
                        1 => End::Theft,
                        2 | 3 => End::Drop,
                        _ => End::Release,
                    };
                    hold(&db, &log, &pool, lease, end).await;
                }
            });
        }
        while let Some(done) = processes.join_next().await {
            done.unwrap();
        }
        log.assert_nobody_met(S::NAME);
    }

    async fn holders_of_a_thousand_keys_never_meet_and_their_fences_rise<S>(db: TestDb<S>) {
        let (db, log) = (Arc::new(db), Log::default());
        let mut tasks = JoinSet::new();
        for _process in 0..3 {
            let (leases, pool) = process(&db, 4).await;
            for task in 0..8 {
                let (db, log, leases, pool) = (Arc::clone(&db), log.clone(), leases.clone(), pool.clone());
                tasks.spawn(async move {
                    // Every process wants the same keys in the same order, so that they meet.
                    for number in (task..1000).step_by(8) {
                        let lease = leases.lease(format!("item:{number}")).acquire().await.expect("acquire");
                        let end = match number % 10 {
                            0 => End::Theft,
                            1 => End::Drop,
                            _ => End::Release,
                        };
                        hold(&db, &log, &pool, lease, end).await;
                    }
                });
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        log.assert_nobody_met(S::NAME);
    }
}
