//! Short scripts for what no crew meets by chance: each is one way in which a lock once answered wrongly.

mod etcd;
mod leases;
mod mysql;
mod network;
mod pgpool;
mod postgres;
mod sqlite;
mod transactions;

use std::time::Duration;

use anyhow::Result;
use lockkit::{Leases, lease::LeasesBuilder};
use sqlx::{Pool, pool::PoolOptions};
use tokio::time::{Instant, timeout};

use crate::lane::prepare;
use crate::rig::Rig;

pub(crate) use self::etcd::of_etcd;
pub(crate) use self::mysql::of_the_mysql_family;
pub(crate) use self::pgpool::{left_out as pgpool_left_out, of_pgpool};
pub(crate) use self::postgres::of_postgres;
pub(crate) use self::sqlite::of_sqlite;

/// No probe takes longer, unless what it probes hangs.
const LIMIT: Duration = Duration::from_secs(15);

/// What a probe stands on: a database with lockkit's tables and the rack's accounts.
pub(crate) struct Ground<S: Rig> {
    url: String,
    pool: Pool<S::DB>,
}

/// What came of a probe.
pub(crate) struct Found {
    pub(crate) probe: &'static str,
    pub(crate) seconds: f64,
    /// What is wrong, if anything is.
    pub(crate) broken: Option<String>,
}

/// `Err` in words if the promise was broken.
type Verdict = Result<(), String>;

impl<S: Rig> Ground<S> {
    /// A pool of its own, as another process would have.
    async fn pool(&self, connections: u32) -> Result<Pool<S::DB>> {
        self.pool_at(&self.url, connections).await
    }

    async fn pool_at(&self, url: &str, connections: u32) -> Result<Pool<S::DB>> {
        // Without a ping before each use, which would be late as well where answers are.
        let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
        let options = options.acquire_timeout(Duration::from_secs(5));
        Ok(options.connect(url).await?)
    }

    /// The settings of leases, as another process would have.
    fn leases(pool: &Pool<S::DB>, ttl_ms: u64) -> LeasesBuilder<Pool<S::DB>> {
        Leases::builder(pool.clone()).ttl(Duration::from_millis(ttl_ms)).sweep_every(None)
    }
}

/// Runs all probes that make sense on this database.
pub(crate) async fn all<S: Rig>(url: &str) -> Result<Vec<Found>> {
    prepare::<S>(url).await?;
    let pool = PoolOptions::new().max_connections(8).connect(url).await?;
    let ground = Ground::<S> { url: url.to_owned(), pool };
    let mut found = S::own_probes(&ground).await;
    found.push(probe("a share of the turns for everybody", leases::shares(&ground)).await);
    found.extend(<[Found; 3]>::from(tokio::join!(
        probe("a lease from a slow checkout is kept", leases::slow_checkout(&ground)),
        probe("leases outlive the runtime that began them", leases::second_runtime(&ground)),
        probe("`try_acquire` releases before it answers", leases::try_gives_back(&ground)),
    )));
    if S::HAS_SERVER {
        found.push(probe("a transaction of another database", transactions::two_databases(&ground)).await);
        found.extend(<[Found; 5]>::from(tokio::join!(
            probe("a dead transaction's commit frees nothing", transactions::dead_transaction(&ground)),
            probe("`run` says what was committed", network::late_answer_of_commit(&ground)),
            probe("a wait ends on a silent server", network::silent_server(&ground)),
            probe("trust never outlasts the store's expiry", network::trust_and_expiry(&ground)),
            probe("nobody holds what nobody could ask for", network::slow_connects(&ground)),
        )));
    }
    Ok(found)
}

/// Runs one probe. One that fails to run has found something, too.
async fn probe(name: &'static str, script: impl Future<Output = Result<Verdict>>) -> Found {
    let began = Instant::now();
    let broken = match timeout(LIMIT, script).await {
        Ok(Ok(verdict)) => verdict.err(),
        Ok(Err(err)) => Some(format!("it failed: {err:#}")),
        Err(_) => Some(format!("it hung for {LIMIT:?}")),
    };
    Found { probe: name, seconds: began.elapsed().as_secs_f64(), broken }
}

/// An error of `lockkit` in a few words.
fn told(result: &lockkit::Result<()>) -> String {
    match result {
        Ok(()) => "Ok".into(),
        Err(err) => format!("`{err}`"),
    }
}
