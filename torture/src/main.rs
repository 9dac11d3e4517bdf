//! The rack: worker processes on a database, faults, and oracles that say what broke. See `README.md`.

mod clock;
mod cluster;
mod crew;
mod event;
mod faults;
mod full_pool;
mod history;
mod lane;
mod oracle;
mod payments;
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
use crate::payments::{PaymentsArgs, ServiceArgs};
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
    /// A service that takes payments: how many keys are charged twice while it is killed and its COMMITs are cut.
    Payments(PaymentsArgs),
    /// One process of that service; the conductor starts it.
    #[command(hide = true)]
    PaymentService(ServiceArgs),
    /// One worker process; the conductor starts it.
    #[command(hide = true)]
    Worker(WorkerArgs),
}

fn main() -> Result<ExitCode> {
    match Args::parse().form {
        Form::Worker(args) => work(worker::run(args)),
        Form::PaymentService(args) => work(payments::serve(args)),
        // One thread: the servers and workers die with the thread that started them.
        Form::Quick(args) => conduct(rack::quick(args)),
        Form::Long(args) => conduct(rack::long(args)),
        Form::FullPool(args) => conduct(full_pool::run(args)),
        Form::Payments(args) => conduct(payments::run(args)),
    }
}

fn work(worker: impl Future<Output = Result<()>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(worker)?;
    Ok(ExitCode::SUCCESS)
}

fn conduct(rack: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, rack)
}
