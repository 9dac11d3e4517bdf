//! A museum of broken locks: recipes that break, each beside the same schedule under lockkit.
//!
//! ```text
//! cargo run -p museum              # the list
//! cargo run -p museum 5            # one exhibit
//! cargo run -p museum all          # all of them; fails if one does not show what it should
//! cargo run -p museum write        # the pages in docs/museum
//!
//! cargo run -p museum all --url postgres://… --redis redis://…/9   # on servers
//! ```

mod comparison;
mod exhibit;
mod exhibits;
mod pages;
mod picture;
mod run;
mod stage;
#[cfg(test)]
mod tests;
mod text;
mod world;

use std::{
    env,
    io::{IsTerminal, stdout},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::runtime::Builder;

use crate::{exhibit::Exhibit, text::Style, world::Servers};

/// Locks that break, each beside the same schedule under lockkit.
#[derive(Debug, Parser)]
struct Arguments {
    /// `list`, `all`, `write` (the pages in docs/museum), or the number of an exhibit.
    #[arg(default_value = "list")]
    what: String,
    /// Runs what is on SQLite on this server: `postgres://…`, or `mysql://…` for MySQL and MariaDB. Each run makes a
    /// database, and drops it.
    #[arg(long)]
    url: Option<String>,
    /// Runs what is on the toy Redis on this server, also lockkit's leases. The database, such as `/9`, must be empty,
    /// and is emptied after each run.
    #[arg(long)]
    redis: Option<String>,
}

fn main() -> Result<ExitCode> {
    let Arguments { what, url, redis } = Arguments::parse();
    let exhibits = exhibits::all();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let servers = runtime.block_on(Servers::find(url.as_deref(), redis.as_deref()))?;
    drop(runtime);
    match what.as_str() {
        "list" => list(&exhibits),
        "all" => return Ok(all(&exhibits, &servers)),
        "write" => write(&exhibits)?,
        number => {
            let Some(at) = number.parse().ok().filter(|it| (1..=exhibits.len()).contains(it)) else {
                bail!("there is no exhibit `{number}`: `list`, `all`, `write`, or 1 to {}", exhibits.len());
            };
            let exhibit = &exhibits[at - 1];
            println!("{}", text::exhibit(at, exhibit, &exhibit.shows(&servers)?, &servers, style()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(exhibits: &[Exhibit]) {
    for (at, exhibit) in exhibits.iter().enumerate() {
        println!("{:>2}  {}", at + 1, exhibit.title);
    }
}

/// Runs all of them, even if one fails.
fn all(exhibits: &[Exhibit], servers: &Servers) -> ExitCode {
    let mut failures = Vec::new();
    for (at, exhibit) in exhibits.iter().enumerate() {
        match exhibit.shows(servers) {
            Ok(shows) => println!("{}\n", text::exhibit(at + 1, exhibit, &shows, servers, style())),
            Err(err) => failures.push(format!("{}. {}: {err:#}", at + 1, exhibit.title)),
        }
    }
    println!("{} of {} show what they should", exhibits.len() - failures.len(), exhibits.len());
    for failure in &failures {
        eprintln!("{failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The pages show the runs that need no server.
fn write(exhibits: &[Exhibit]) -> Result<()> {
    let show = |it: &Exhibit| it.shows(&Servers::default()).with_context(|| it.title);
    pages::write(exhibits, &exhibits.iter().map(show).collect::<Result<Vec<_>>>()?)
}

/// Colours on a terminal, unless they are unwanted: <https://no-color.org>.
fn style() -> Style {
    let is_unwanted = env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    if stdout().is_terminal() && !is_unwanted { Style::Colour } else { Style::Plain }
}
