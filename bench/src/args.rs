//! The command line of the forms that measure.

use std::path::PathBuf;

use clap::Args;

use crate::scenarios::Scenario;
use crate::servers::Kind;

/// What every form has.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Rounds; the result is their median
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,

    /// How long each sample is measured
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,

    /// How long the tasks work before that
    #[arg(long, default_value_t = 0.3)]
    pub(crate) warm: f64,

    /// Let commits wait for the disk
    #[arg(long)]
    pub(crate) durable: bool,

    /// Let pools lend connections without a ping, which sqlx sends by default
    #[arg(long)]
    pub(crate) no_ping: bool,

    /// Count the system calls of the workers with strace, which makes them slow
    #[arg(long)]
    pub(crate) strace: bool,

    /// Where to write results.md, results.csv and the plots
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    /// A PostgreSQL server to use instead of a throwaway one; likewise below
    #[arg(long, value_name = "URL")]
    pub(crate) postgres: Option<String>,

    #[arg(long, value_name = "URL")]
    pub(crate) mariadb: Option<String>,

    #[arg(long, value_name = "URL")]
    pub(crate) mysql: Option<String>,

    /// A folder for SQLite's file
    #[arg(long, value_name = "PATH")]
    pub(crate) sqlite: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) common: Common,

    /// What to measure [default: everything]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) scenarios: Vec<Scenario>,

    /// On which databases [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) databases: Vec<Kind>,

    /// Tasks of all processes together [default: by scenario]
    #[arg(long, value_delimiter = ',')]
    pub(crate) tasks: Vec<u32>,

    /// Processes [default: by scenario]
    #[arg(long, value_delimiter = ',')]
    pub(crate) processes: Vec<u32>,

    /// Keys that all tasks share, where the scenario lets choose; 0: each task has its own
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0",
        value_parser = clap::value_parser!(u32).range(..=i64::from(crate::floors::KEYS))
    )]
    pub(crate) keys: Vec<u32>,

    /// How long each holder holds, in milliseconds
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub(crate) hold: Vec<u64>,

    /// Leases held in `held`
    #[arg(long, value_delimiter = ',', default_value = "10000")]
    pub(crate) held: Vec<u32>,

    /// Fresh rows in `sweep` and `table-size`
    #[arg(long, value_delimiter = ',', default_value = "270000")]
    pub(crate) rows: Vec<u32>,

    /// A short run that fails if a ratio is far from what it should be; for CI
    #[arg(long)]
    pub(crate) quick: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) common: Common,

    /// Where `bench/peers/install` has put the other libraries
    #[arg(long, value_name = "DIR")]
    pub(crate) peers: Option<PathBuf>,

    /// Only these contenders, by a part of their names
    #[arg(long, value_delimiter = ',')]
    pub(crate) only: Vec<String>,

    /// Tasks of all processes together that want the hot row
    #[arg(long, default_value_t = 16)]
    pub(crate) tasks: u32,

    /// Processes
    #[arg(long, default_value_t = 4)]
    pub(crate) processes: u32,
}
