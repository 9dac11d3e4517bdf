//! The rack: worker processes on a database, faults, and oracles that say what broke. See `README.md`.

mod clock;
mod crew;
mod event;
mod faults;
mod full_pool;
mod history;
mod lane;
mod oracle;
mod probes;
mod proxy;
mod rack;
mod report;
mod rig;
mod server;
mod worker;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::full_pool::FullPoolArgs;
use crate::rack::{LongArgs, QuickArgs};
use crate::worker::WorkerArgs;

#[derive(Parser)]
#[command(about = "Breaks lockkit: worker processes, faults and oracles, on servers of its own or on yours.")]
struct Args {
    #[command(subcommand)]
    form: Form,
}

#[derive(Subcommand)]
enum Form {
    /// The faults that find most, on all databases, within four minutes.
    Quick(QuickArgs),
    /// All faults, each on a server of its own, for as long as you like.
    Long(LongArgs),
    /// A service whose pool is full of transactions that wait for a row: how many of its leases it loses.
    FullPool(FullPoolArgs),
    /// One worker process; the conductor starts it.
    #[command(hide = true)]
    Worker(WorkerArgs),
}

fn main() -> Result<ExitCode> {
    match Args::parse().form {
        Form::Worker(args) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            runtime.block_on(worker::run(args))?;
            Ok(ExitCode::SUCCESS)
        }
        // One thread: the servers and workers die with the thread that started them.
        Form::Quick(args) => conduct(rack::quick(args)),
        Form::Long(args) => conduct(rack::long(args)),
        Form::FullPool(args) => conduct(full_pool::run(args)),
    }
}

fn conduct(rack: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, rack)
}
