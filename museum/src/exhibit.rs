//! An exhibit: a recipe, what breaks it, and the same schedule under lockkit.

use std::fmt;

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;

use crate::{
    run::Run,
    stage::Boxed,
    world::{Kind, Place, Servers},
};

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
    pub(crate) elsewhere: &'static [Elsewhere],
    pub(crate) also: Option<Also>,
}

/// What a database does otherwise than the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elsewhere {
    pub(crate) on: Kind,
    /// Whether the recipe breaks there, too.
    pub(crate) breaks: bool,
    pub(crate) note: &'static str,
}

impl Elsewhere {
    pub(crate) fn text(self) -> String {
        let Self { on, breaks, note } = self;
        if breaks { note.to_owned() } else { format!("The recipe does NOT break on {}. {note}", on.name()) }
    }
}

/// Another way in which the recipe breaks, on some databases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Also {
    pub(crate) on: &'static [Kind],
    pub(crate) happens: &'static str,
    pub(crate) broken: Play,
}

/// A script for a stage, and what it uses.
#[derive(Clone, Copy)]
pub(crate) struct Play {
    pub(crate) uses: Uses,
    script: fn(Place) -> Boxed<Result<Run>>,
}

/// What the steps of a script act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uses {
    /// The toy, whatever server there is. The reason is for the reader.
    Toy(&'static str),
    Redis,
    Leases,
    Database,
    RedisAndDatabase,
}

impl fmt::Debug for Play {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Play").field("uses", &self.uses).finish_non_exhaustive()
    }
}

/// A play of a script that is generic over its database, on the one that the reader has named.
macro_rules! on_database {
    ($uses:ident, $script:ident $(, $argument:expr)*) => {
        $crate::exhibit::Play::new($crate::exhibit::Uses::$uses, |place| match place.kind() {
            $crate::world::Kind::Sqlite => Box::pin($script::<sqlx::Sqlite>(place $(, $argument)*)),
            $crate::world::Kind::Postgres => Box::pin($script::<sqlx::Postgres>(place $(, $argument)*)),
            $crate::world::Kind::MySql | $crate::world::Kind::MariaDb => {
                Box::pin($script::<sqlx::MySql>(place $(, $argument)*))
            }
        })
    };
}
pub(crate) use on_database;

impl Play {
    pub(crate) fn new(uses: Uses, script: fn(Place) -> Boxed<Result<Run>>) -> Self {
        Self { uses, script }
    }

    /// Runs it, and deletes what it leaves on the servers.
    ///
    /// On Tokio's paused clock an hour passes at once. A database runs on threads or machines of its own, and a paused
    /// clock does not wait for them. So with a database the clock runs, and the times in the database are moved.
    pub(crate) fn run(self, servers: &Servers) -> Result<Run> {
        let place = Place::new(servers.clone())?;
        let is_paused = !matches!(self.uses, Uses::Database | Uses::RedisAndDatabase);
        let runtime = Builder::new_current_thread().enable_all().start_paused(is_paused).build()?;
        let run = runtime.block_on((self.script)(place.clone()));
        // Ends the connections of participants that still wait.
        drop(runtime);
        let cleared = Builder::new_current_thread().enable_all().build()?.block_on(place.clear());
        let run = run?;
        cleared.context("delete what the run has left")?;
        Ok(run)
    }

    /// Where it runs.
    pub(crate) fn place(self, servers: &Servers) -> String {
        match self.uses {
            Uses::Toy(_) => "a toy Redis".to_owned(),
            Uses::Redis => servers.redis_name(),
            Uses::Leases if servers.redis.is_some() => servers.redis_name(),
            Uses::Leases => "leases in memory".to_owned(),
            Uses::Database => servers.database_name(),
            Uses::RedisAndDatabase => format!("{} and {}", servers.redis_name(), servers.database_name()),
        }
    }
}

/// The runs of an exhibit: the recipe broke, and lockkit did not.
#[derive(Debug)]
pub(crate) struct Shows {
    pub(crate) broken: Run,
    pub(crate) cured: Run,
    /// The run of [`Also`], on its databases.
    pub(crate) also: Option<Run>,
}

impl Exhibit {
    /// Runs all.
    ///
    /// # Errors
    /// The recipe did not break, or lockkit did. On a database where the recipe is known to hold: it broke.
    pub(crate) fn shows(&self, servers: &Servers) -> Result<Shows> {
        let broken = self.broken.run(servers).context("the run of the recipe ended early")?;
        match (broken.breach(), self.elsewhere(servers).is_none_or(|it| it.breaks)) {
            (None, true) => bail!("the recipe does not break any more"),
            (Some(breach), false) => bail!("the recipe breaks on {}, too: {breach}", servers.database_name()),
            _ => {}
        }
        let also = self.also(servers).map(|it| it.broken.run(servers)).transpose().context("the other run")?;
        if also.as_ref().is_some_and(|it| it.breach().is_none()) {
            bail!("the recipe does not break in the other way any more");
        }
        let cured = self.cured.run(servers).context("the run with lockkit ended early")?;
        if let Some(breach) = cured.breach() {
            bail!("lockkit broke: {breach}");
        }
        Ok(Shows { broken, cured, also })
    }

    /// What is different on this database.
    pub(crate) fn elsewhere(&self, servers: &Servers) -> Option<Elsewhere> {
        self.elsewhere.iter().copied().find(|it| it.on == servers.kind())
    }

    pub(crate) fn also(&self, servers: &Servers) -> Option<Also> {
        self.also.filter(|it| it.on.contains(&servers.kind()))
    }
}
