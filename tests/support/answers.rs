//! What requests with a stored answer cost.

use std::time::Duration;

use lockkit::dialect::{IdempotentOps, LeaseOps, reuse_connections};
use lockkit::{Error, Idempotent, Leases};
use sqlx::pool::PoolOptions;
use sqlx::{Database, Pool};
use tokio::time::sleep;

use crate::Proxy;

/// How often each is counted. The least counts: a message that arrives in two pieces can be answered in between, which
/// looks like one round trip more. On a busy machine most do.
const ROUNDS: usize = 24;

/// How long each body goes on: for longer than connections are kept without use, so that it does not depend on the
/// machine which ones are.
const UNUSED: Duration = Duration::from_millis(25);

/// Checks the round trips of requests: of `run` with a new key and with one that was answered before, then of
/// `outside`.
///
/// Nothing is done in their bodies, and the pings of the pool do not count.
///
/// # Panics
/// If a request fails, or costs more than this.
pub async fn assert_answers_cost<DB>(proxy: &Proxy, most: [u64; 4])
where
    DB: Database + IdempotentOps + LeaseOps,
{
    let pool: Pool<DB> = PoolOptions::new().max_connections(3).connect(proxy.url()).await.expect("a pool");
    reuse_connections(&pool);
    let leases = Leases::new(pool.clone());
    let work = async || {
        sleep(UNUSED).await;
        Ok::<_, Error>(())
    };
    let run = async |key: String| {
        Idempotent::key(key).run(&pool, async |_| work().await).await.expect("an answer").is_before()
    };
    let outside = async |key: String| {
        Idempotent::key(key).outside(&leases, async |_| work().await).await.expect("an answer").is_before()
    };
    let spoken = || proxy.round_trips() - proxy.pings();
    let mut least = [u64::MAX; 4];
    for round in 0..ROUNDS {
        let mut before = spoken();
        let mut count = |number: usize, is_before: bool| {
            assert_eq!(is_before, number % 2 == 1, "a key is new, and answered before the next time");
            let now = spoken();
            least[number] = least[number].min(now - before);
            before = now;
        };
        count(0, run(format!("run {round}")).await);
        count(1, run(format!("run {round}")).await);
        count(2, outside(format!("outside {round}")).await);
        count(3, outside(format!("outside {round}")).await);
    }
    assert!(least.iter().zip(most).all(|(cost, most)| *cost <= most), "{least:?} and not {most:?}");
}
