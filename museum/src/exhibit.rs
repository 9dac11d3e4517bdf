//! An exhibit: a recipe, what breaks it, and the same schedule under lockkit.

use std::fmt;

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;

use crate::{run::Run, stage::Boxed};

#[derive(Debug, Clone)]
pub(crate) struct Exhibit {
    /// The name of its page.
    pub(crate) slug: &'static str,
    pub(crate) title: &'static str,
    /// The recipe in a few lines.
    pub(crate) recipe: &'static str,
    /// What happens and why, for readers who know no Rust.
    pub(crate) happens: &'static str,
    /// What the usual remedy misses.
    pub(crate) remedy: &'static str,
    /// What lockkit does in the same schedule.
    pub(crate) lockkit: &'static str,
    /// Where the guide continues: the text and the address of a link, from `docs/museum`.
    pub(crate) more: (&'static str, &'static str),
    pub(crate) broken: Play,
    pub(crate) cured: Play,
}

/// A script for a stage, and the clock that it runs on.
#[derive(Clone, Copy)]
pub(crate) struct Play {
    is_paused: bool,
    script: fn() -> Boxed<Result<Run>>,
}

impl fmt::Debug for Play {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Play").field("is_paused", &self.is_paused).finish_non_exhaustive()
    }
}

impl Play {
    /// On Tokio's paused clock: an hour passes at once.
    pub(crate) fn in_memory(script: fn() -> Boxed<Result<Run>>) -> Self {
        Self { is_paused: true, script }
    }

    /// On a database. It runs on its own threads, and a paused clock does not wait for them. So the clock runs, and the
    /// times in the database are moved.
    pub(crate) fn on_sqlite(script: fn() -> Boxed<Result<Run>>) -> Self {
        Self { is_paused: false, script }
    }

    pub(crate) fn run(self) -> Result<Run> {
        let runtime = Builder::new_current_thread().enable_all().start_paused(self.is_paused).build()?;
        runtime.block_on((self.script)())
    }
}

/// Both runs of an exhibit: the recipe broke, and lockkit did not.
#[derive(Debug)]
pub(crate) struct Shows {
    pub(crate) broken: Run,
    pub(crate) cured: Run,
}

impl Exhibit {
    /// Runs both.
    ///
    /// # Errors
    /// The recipe did not break, or lockkit did.
    pub(crate) fn shows(&self) -> Result<Shows> {
        let broken = self.broken.run().context("the run of the recipe ended early")?;
        if broken.breach().is_none() {
            bail!("the recipe does not break any more");
        }
        let cured = self.cured.run().context("the run with lockkit ended early")?;
        if let Some(breach) = cured.breach() {
            bail!("lockkit broke: {breach}");
        }
        Ok(Shows { broken, cured })
    }
}
