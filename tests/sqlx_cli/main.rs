//! The `sqlx` command, so that the tests can run it where nobody has installed it.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    sqlx::any::install_default_drivers();
    if let Err(err) = sqlx_cli::run(sqlx_cli::Opt::parse()).await {
        eprintln!("{err:?}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
