//! A museum of broken locks: recipes that break, each beside the same schedule under lockkit.
//!
//! ```text
//! cargo run -p museum              # the list
//! cargo run -p museum 5            # one exhibit
//! cargo run -p museum all          # all of them; fails if one does not show what it should
//! cargo run -p museum write        # the pages in docs/museum
//! ```

mod exhibit;
mod exhibits;
mod pages;
mod picture;
mod run;
mod stage;
mod text;
mod world;

use std::{
    env,
    io::{IsTerminal, stdout},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};

use crate::{exhibit::Exhibit, text::Style};

fn main() -> Result<ExitCode> {
    let exhibits = exhibits::all();
    let argument = env::args().nth(1).unwrap_or_else(|| "list".to_owned());
    match argument.as_str() {
        "list" => list(&exhibits),
        "all" => return Ok(all(&exhibits)),
        "write" => write(&exhibits)?,
        number => {
            let Some(at) = number.parse().ok().filter(|it| (1..=exhibits.len()).contains(it)) else {
                bail!("usage: museum [list | all | write | 1 … {}]", exhibits.len());
            };
            println!("{}", text::exhibit(at, &exhibits[at - 1], &exhibits[at - 1].shows()?, style()));
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
fn all(exhibits: &[Exhibit]) -> ExitCode {
    let mut failures = Vec::new();
    for (at, exhibit) in exhibits.iter().enumerate() {
        match exhibit.shows() {
            Ok(shows) => println!("{}\n", text::exhibit(at + 1, exhibit, &shows, style())),
            Err(err) => failures.push(format!("{}. {}: {err:#}", at + 1, exhibit.title)),
        }
    }
    println!("{} of {} show what they should", exhibits.len() - failures.len(), exhibits.len());
    for failure in &failures {
        eprintln!("{failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write(exhibits: &[Exhibit]) -> Result<()> {
    let show = |it: &Exhibit| it.shows().with_context(|| it.title);
    pages::write(exhibits, &exhibits.iter().map(show).collect::<Result<Vec<_>>>()?)
}

/// Colours on a terminal, unless they are unwanted: <https://no-color.org>.
fn style() -> Style {
    let is_unwanted = env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    if stdout().is_terminal() && !is_unwanted { Style::Colour } else { Style::Plain }
}
