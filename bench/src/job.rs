//! The line protocol between the conductor and its workers, in whatever language: a worker reads one line with a `Job`,
//! says that it is ready, reads one line, works, and says what it has seen.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::scenarios::Scenario;
use crate::servers::Kind;

/// What a worker is told. Times are nanoseconds of the monotonic clock, or as their names say.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) scenario: Scenario,
    /// Which of the scenario's contenders it is.
    pub(crate) contender: String,
    pub(crate) database: Kind,
    pub(crate) url: String,
    /// The URL of Redis and the address of ZooKeeper, for contenders that lock there.
    pub(crate) redis: Option<String>,
    pub(crate) zookeeper: Option<String>,
    /// The number of this process, from 0.
    pub(crate) process: u32,
    /// Tasks in this process.
    pub(crate) tasks: u32,
    /// Keys that all tasks share, chosen at random. 0: each task has a key of its own.
    pub(crate) keys: u32,
    /// How long each holder holds.
    pub(crate) hold_us: u64,
    /// How long the tasks work before and while they are measured.
    pub(crate) warm_ms: u64,
    pub(crate) run_ms: u64,
    /// Connections of this process.
    pub(crate) connections: u32,
    /// Whether the pool pings a connection before it lends it, as sqlx does by default.
    pub(crate) ping: bool,
    /// Whether a commit waits for the disk.
    pub(crate) durable: bool,
    /// Leases held, or rows in the table, where that is part of the scenario.
    pub(crate) rows: u32,
}

impl Job {
    pub(crate) fn hold(&self) -> Duration {
        Duration::from_micros(self.hold_us)
    }
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// It is connected, has done so many operations to warm up, and waits for the start.
    Ready { done: u64 },
    /// It has worked.
    Finished(Box<Seen>),
}

/// What a worker has seen.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// When it began to work.
    pub(crate) began: u64,
    /// CPU of the process from the start of the work to its end, in microseconds.
    pub(crate) cpu_us: u64,
    pub(crate) operations: Operations,
    /// Attempts of all operations; 0 if they are not counted.
    #[serde(default)]
    pub(crate) attempts: u64,
    /// Operations that gave up because they waited for too long.
    #[serde(default)]
    pub(crate) refused: u64,
    /// What the worker itself found wrong.
    #[serde(default)]
    pub(crate) violations: Vec<String>,
}

/// Every operation that was done, as columns. Times count from `began`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Operations {
    pub(crate) key: Vec<u32>,
    /// The lock was asked for, granted, given up (just before the call that releases it), and the call had returned.
    pub(crate) asked: Vec<u64>,
    pub(crate) granted: Vec<u64>,
    pub(crate) let_go: Vec<u64>,
    pub(crate) done: Vec<u64>,
    /// Fencing tokens; empty if the contender has none.
    #[serde(default)]
    pub(crate) fence: Vec<u64>,
}
