//! What is measured: scenarios, and in each of them the contenders that do the same work.

mod compare;
mod held;
mod idempotent;
mod lease;
mod optimistic;
mod stock;
mod subject;
mod sweep;
mod transaction;

use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use lockkit::{Lease, Leases, Stock};
use serde::{Deserialize, Serialize};
use sqlx::Pool;

pub(crate) use self::compare::row_under_lease;
pub(crate) use self::lease::leased;
pub(crate) use self::stock::NAME as STOCK;
pub(crate) use self::subject::Subject;
use crate::floors::TTL;
use crate::job::Job;
use crate::load::{Step, Work};
use crate::servers::Kind;

/// A kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scenario {
    /// A lease is acquired and released; each task has a key of its own, or `--keys` are shared.
    Lease,
    /// All tasks want the lease of one key.
    HotLease,
    /// An empty transaction.
    Transaction,
    /// A transaction locks one row.
    RowLock,
    /// A transaction locks one name.
    Named,
    /// Work with a new key, whose answer is stored.
    Idempotent,
    /// A request whose answer is stored.
    AnsweredBefore,
    /// Tasks read one row, and write it if it has not changed.
    Optimistic,
    /// Tasks take pieces from one counter.
    Stock,
    /// One more lease, while many are held.
    Held,
    /// A sweep that finds nothing, behind many fresh rows.
    Sweep,
    /// One more lease, in a table with many rows.
    TableSize,
    /// `compare`: a lock that nobody else wants.
    Uncontended,
    /// `compare`: tasks read one row of a database and write it, under a lock.
    HotRow,
}

/// What the workers' reports are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oracle {
    /// Holders of a key do not overlap, and their fences rise.
    Exclusion,
    /// Each operation raised the value of row 0 by one.
    Counter,
    /// What was taken is what is missing.
    Stock,
    /// The server counted each commit. SQLite does not count: there, transactions do not overlap.
    Commits,
    /// The worker checks each operation itself.
    Worker,
}

impl Scenario {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|it| it.get_name().to_owned()).unwrap_or_default()
    }

    /// The contenders, and first the one that the others are compared with.
    pub(crate) fn contenders(self, database: Kind) -> Vec<&'static str> {
        let has_session_locks = database != Kind::Sqlite;
        match self {
            Self::HotLease if has_session_locks => {
                vec!["polling", "session lock", "lockkit without hand-over", "lockkit"]
            }
            Self::HotLease => vec!["polling", "lockkit without hand-over", "lockkit"],
            Self::Lease | Self::Stock | Self::AnsweredBefore => vec!["floor", "lockkit"],
            Self::Transaction | Self::Idempotent => vec!["floor", "lockkit", REUSE],
            Self::RowLock | Self::Named => vec!["floor", "lockkit unbounded", "lockkit", REUSE],
            Self::Optimistic => vec!["floor: FOR UPDATE", "blind retry", "lockkit"],
            Self::Held => vec!["none held", "many held"],
            Self::Sweep | Self::TableSize => vec!["few rows", "many rows"],
            Self::Uncontended => vec!["floor", "lockkit lease"],
            Self::HotRow => vec!["floor: FOR UPDATE", "lockkit row", "lockkit version", "lockkit lease"],
        }
    }

    /// Tasks in all and processes, unless the command line says otherwise.
    pub(crate) fn crowds(self) -> &'static [(u32, u32)] {
        match self {
            Self::HotLease => &[(1, 1), (16, 1), (32, 1), (64, 1), (256, 1), (32, 4)],
            Self::Optimistic => &[(64, 1)],
            Self::Stock => &[(1, 1), (64, 1), (64, 4)],
            Self::Held | Self::Sweep | Self::TableSize | Self::Uncontended => &[(1, 1)],
            Self::HotRow => &[(16, 4)],
            Self::Lease | Self::Transaction | Self::RowLock | Self::Named | Self::Idempotent | Self::AnsweredBefore => {
                &[(1, 1), (32, 1)]
            }
        }
    }

    /// Keys that all tasks share, where that is part of the scenario.
    pub(crate) fn keys(self) -> Option<u32> {
        match self {
            Self::HotLease | Self::Optimistic | Self::Stock | Self::HotRow => Some(1),
            Self::Held | Self::Sweep | Self::TableSize | Self::Uncontended | Self::Idempotent => Some(0),
            Self::Lease | Self::Transaction | Self::RowLock | Self::Named | Self::AnsweredBefore => None,
        }
    }

    pub(crate) fn oracle(self) -> Oracle {
        match self {
            Self::Lease
            | Self::HotLease
            | Self::RowLock
            | Self::Named
            | Self::Held
            | Self::TableSize
            | Self::Uncontended => Oracle::Exclusion,
            Self::Transaction => Oracle::Commits,
            Self::Optimistic | Self::HotRow => Oracle::Counter,
            Self::Stock => Oracle::Stock,
            Self::Sweep | Self::Idempotent | Self::AnsweredBefore => Oracle::Worker,
        }
    }
}

/// The work of one worker on its database, by lockkit or by hand.
#[derive(Debug)]
pub(crate) struct Bench<DB: Subject> {
    job: Job,
    pool: Pool<DB>,
    leases: Leases<Pool<DB>>,
    stock: Stock<DB>,
    /// What is held the whole time.
    held: Vec<Lease<Pool<DB>>>,
}

impl<DB: Subject> Bench<DB> {
    /// Connects.
    pub(crate) async fn open(job: Job) -> Result<Arc<Self>> {
        let pool = DB::open(&job).await?;
        let mut leases = Leases::builder(pool.clone()).ttl(TTL).wait(WAIT).sweep_every(None);
        if job.contender == "lockkit without hand-over" {
            leases = leases.hand_over(0);
        }
        let mut bench = Self { leases: leases.build()?, stock: stock::open(&pool), pool, job, held: Vec::new() };
        match bench.job.contender.as_str() {
            "many held" => held::hold(&mut bench).await?,
            "many rows" => sweep::fill(&bench).await?,
            REUSE => lockkit::dialect::reuse_connections(&bench.pool),
            _ => {}
        }
        Ok(Arc::new(bench))
    }

    /// Lets the holder hold.
    async fn hold(&self) {
        if self.job.hold_us > 0 {
            tokio::time::sleep(self.job.hold()).await;
        }
    }
}

/// The contender whose transactions follow each other on one connection.
pub(crate) const REUSE: &str = "lockkit reuse";

/// How long lockkit and the floors wait at most: longer than any wait should take.
pub(crate) const WAIT: std::time::Duration = std::time::Duration::from_secs(60);

impl<DB: Subject> Work for Bench<DB> {
    async fn once(&self, key: u32) -> Result<Option<Step>> {
        match self.job.scenario {
            Scenario::Lease | Scenario::HotLease => lease::once(self, key).await,
            Scenario::Transaction => transaction::empty(self).await,
            Scenario::RowLock => transaction::row_lock(self, key).await,
            Scenario::Named => transaction::named(self, key).await,
            Scenario::Idempotent => idempotent::new_key(self).await,
            Scenario::AnsweredBefore => idempotent::answered_before(self, key).await,
            Scenario::Optimistic => optimistic::once(self).await,
            Scenario::Stock => stock::once(self).await,
            Scenario::Held | Scenario::TableSize => lease::lockkit(self, key).await,
            Scenario::Sweep => sweep::once(self).await,
            Scenario::Uncontended => compare::uncontended(self, key).await,
            Scenario::HotRow => compare::hot_row(self).await,
        }
    }

    async fn violations(&self) -> Vec<String> {
        held::violations(self)
    }
}
