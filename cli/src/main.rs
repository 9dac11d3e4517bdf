//! The command `lockkit`: runs a program under a lease, shows who holds which lease, and takes one away.
//!
//! - `args` is what the user writes, `target` the database or store that it names, `dotenv` the file `.env`.
//! - `look` has the commands that show leases and take one away, `table` writes them.
//! - `explain/` shows who blocks whom, `doctor` what harms locks; `lockkit-inspect` asks the database.
//! - `web` serves the page of `lockkit-web`, to requests that `host` finds meant for this machine.
//! - `run/` is the program under a lease: its process group, its signals and its sentinel.
//! - `exit` says how a command ends.
//!
//! What a command prints on stdout is data; everything else goes to stderr.

mod args;
mod doctor;
mod dotenv;
mod exit;
mod explain;
#[cfg(test)]
mod fuzz;
mod host;
mod look;
mod migrate;
mod run;
mod secret;
mod table;
mod target;
mod web;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use clap_complete::generate;
use tokio::runtime::Builder;

use crate::{
    args::{Args, Command},
    exit::Exit,
    secret::Secrets,
};

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(err) => {
            let exit = if err.use_stderr() { Exit::Usage } else { Exit::Success };
            // Nobody reads it if this fails.
            _ = err.print();
            return exit.into();
        }
    };
    let mut secrets = Secrets::default();
    let ended = execute(args, &mut secrets);
    ended
        .unwrap_or_else(|err| {
            eprintln!("lockkit: {}", secrets.hidden_in(&exit::message(&err)));
            exit::of(&err)
        })
        .into()
}

fn execute(args: Args, secrets: &mut Secrets) -> Result<Exit> {
    let Args { on, command } = args;
    match command {
        Command::Run(args) => run::run(&on, args, secrets),
        Command::Explain(args) => explain::explain(&on, &args, secrets),
        Command::Doctor(args) => doctor::doctor(&on, &args, secrets),
        Command::Ls(args) => look::ls(&on, &args, secrets),
        Command::Show(args) => look::show(&on, args, secrets),
        Command::Steal(args) => look::steal(&on, args, secrets),
        Command::Check(args) => look::check(&on, args, secrets),
        Command::Web(args) => web::web(&on, &args, secrets),
        Command::Migrate(args) => migrate::migrate(&on, &args, secrets),
        Command::Completions { shell } => {
            generate(shell, &mut Args::command(), "lockkit", &mut std::io::stdout());
            Ok(Exit::Success)
        }
        Command::Man { folder } => {
            std::fs::create_dir_all(&folder)?;
            clap_mangen::generate_to(Args::command(), folder)?;
            Ok(Exit::Success)
        }
        Command::Sentinel => run::sentinel::watch(),
        Command::Launch(args) => Ok(run::launch::launch(&args)),
    }
}

/// Runs a command to its end, and does not wait for what it has left in the background.
fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    // Renewals have a thread of their own beside the command that is waited for.
    let runtime =
        Builder::new_multi_thread().worker_threads(1).enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(command);
    runtime.shutdown_background();
    result
}
