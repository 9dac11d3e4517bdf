//! A process that was stopped for too long cannot commit what it began: another took its lease over meanwhile.
//!
//! ```text
//! cargo run --example lost_lease                                                 # on a temporary SQLite file
//! cargo run --example lost_lease -- --url postgres://user:password@localhost/shop
//! cargo run --example lost_lease -- --url mysql://user:password@localhost/shop
//! ```
//!
//! The first process takes a lease and works; SIGSTOP stops it in the middle, as a long pause of a virtual machine would.
//! Its lease expires, the second process takes it over, is told from whom, and commits. Then the first goes on. It still
//! has what it worked out, and believes what it believed; but its body is dropped at the next await, and a commit with
//! the old lease is refused. The standard error has lockkit's log of both. The table `t_reports` is made anew.

use std::{env, process::Stdio, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lockkit::{Error, LeaseOps, LeaseStore, Leases};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Database, Executor, IntoArguments, MySql, Pool, Postgres, Sqlite, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::{Instant, sleep},
};
use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

const KEY: &str = "report:january";
const TTL: Duration = Duration::from_secs(1);
/// How long the second process waits for the lease.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(about = "A process that was stopped for too long cannot commit: another took its lease over.")]
struct Args {
    /// The database: `postgres://…`, `mysql://…` or `sqlite://…`. A temporary SQLite file without it.
    #[arg(long)]
    url: Option<String>,
    /// Be the first process.
    #[arg(long, hide = true)]
    first: bool,
}
