//! Measures lockkit beside hand-written SQL and other lock libraries. See `README.md`.

mod args;
mod clock;
mod crew;
mod floors;
mod guard;
mod job;
mod lines;
mod load;
mod oracle;
mod peers;
mod report;
mod rounds;
mod sample;
mod scenarios;
mod selfcheck;
mod servers;
mod stage;
mod strace;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::args::{CompareArgs, RunArgs};

#[derive(Parser)]
#[command(
    about = "Measures lockkit beside hand-written SQL and other lock libraries. Fails if a lock did not hold.",
    args_conflicts_with_subcommands = true
)]
struct Args {
    #[command(flatten)]
    run: RunArgs,

    #[command(subcommand)]
    form: Option<Form>,
}

#[derive(Subcommand)]
enum Form {
    /// The same work by hand, by lockkit and by the libraries that are installed.
    Compare(CompareArgs),
    /// Draws the plots of results again, and measures nothing.
    Draw {
        /// The folders of the results
        #[arg(required = true, value_name = "DIR")]
        folders: Vec<PathBuf>,
    },
    /// Plants a bug of each kind, and fails if an oracle does not see it.
    Selfcheck,
    /// One worker process; the conductor starts it.
    #[command(hide = true)]
    Worker,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    match args.form {
        None => conduct(rounds::run(args.run)),
        Some(Form::Compare(compare)) => conduct(rounds::compare(compare)),
        Some(Form::Draw { folders }) => {
            folders.iter().try_for_each(|it| report::draw(it))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Form::Selfcheck) => conduct(selfcheck::run()),
        Some(Form::Worker) => {
            tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(worker::run())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// On one thread: the servers die with the thread that started them.
fn conduct(form: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(form)
}
