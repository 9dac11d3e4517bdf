//! A stage: participants whose steps run in the order of a schedule, and nothing else.
//!
//! A participant is an `async fn` that takes an [`Actor`] and awaits its turn before each step. The schedule names the
//! turns: `A B~ +30s A B` lets A take a step, lets B begin one that has to wait (`~`), lets 30 s pass, lets A take its
//! next step, and expects B's to be done by now. So a run is the same every time, however fast the machine is.

mod actor;
mod board;
mod shown;

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use tokio::{task::JoinHandle, time::sleep};

pub(crate) use self::actor::Actor;
use self::{board::Board, shown::Shown};
use crate::run::{Line, Run};

/// How long a step may take, on the clock of the run. One that takes longer was to be marked with `~`.
const STEP: Duration = Duration::from_secs(20);

/// How long a step is watched that is expected to wait: a moment, because what it waits for cannot happen meanwhile.
const MOMENT: Duration = Duration::from_millis(20);

pub(crate) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What the world looks like after a step.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// The state of the lock or of the books, in a word or two.
    pub(crate) state: String,
    /// What is wrong in the books.
    pub(crate) breach: Option<String>,
}

impl From<String> for View {
    fn from(state: String) -> Self {
        Self { state, breach: None }
    }
}

pub(crate) struct Stage {
    board: Arc<Board>,
    tasks: Vec<JoinHandle<Result<()>>>,
    state_title: &'static str,
    watch: Box<dyn Fn() -> Boxed<Result<View>> + Send>,
    pass: Box<dyn Fn(Duration) -> Boxed<Result<()>> + Send>,
    bound: Duration,
    run: Run,
}

impl Stage {
    /// A stage whose clock is Tokio's, which must be paused. `watch` returns the state after every step; without a
    /// title it is not shown.
    pub(crate) fn new<F>(state_title: &'static str, watch: impl Fn() -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<View>> + Send + 'static,
    {
        Self {
            board: Arc::default(),
            tasks: Vec::new(),
            state_title,
            watch: Box::new(move || Box::pin(watch())),
            pass: Box::new(|time| {
                Box::pin(async move {
                    sleep(time).await;
                    Ok(())
                })
            }),
            bound: Duration::MAX,
            run: Run::default(),
        }
    }

    /// How time passes in a world that has its own clock, as a database has.
    pub(crate) fn clock<F>(mut self, pass: impl Fn(Duration) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        self.pass = Box::new(move |time| Box::pin(pass(time)));
        self
    }

    /// The longest time that a participant may want something and not get it.
    pub(crate) fn bound(mut self, bound: Duration) -> Self {
        self.bound = bound;
        self
    }

    /// Adds a participant.
    pub(crate) fn actor<F>(mut self, name: &'static str, script: impl FnOnce(Actor) -> F) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let actor = self.board.actor(name);
        let script = script(actor.clone());
        self.tasks.push(tokio::spawn(async move {
            let result = script.await;
            actor.ended();
            result
        }));
        self
    }

    /// Gives the turns, and returns what happened.
    pub(crate) async fn play(mut self, schedule: &str) -> Result<Run> {
        self.run.names = self.board.names();
        self.run.state_title = self.state_title;
        self.board.at_rest(STEP).await.context("a participant did not come to its first step")?;
        for turn in schedule.split_whitespace() {
            match turn.strip_prefix('+') {
                Some(time) => self.pass(time).await,
                None => self.turn(turn).await,
            }
            .with_context(|| format!("at `{turn}` of `{schedule}`"))?;
        }
        if let (_, Some(breach)) = self.board.cells(None)
            && let Some(last) = self.run.lines.last_mut()
        {
            last.breach.get_or_insert(breach);
        }
        for task in self.tasks {
            if task.is_finished() {
                task.await.context("a participant panicked")??;
            } else {
                task.abort();
            }
        }
        Ok(self.run)
    }

    async fn pass(&mut self, text: &str) -> Result<()> {
        let seconds = text.strip_suffix('s').and_then(|it| it.parse().ok()).context("a time is as in `+30s`")?;
        (self.pass)(Duration::from_secs(seconds)).await?;
        self.board.pass(seconds);
        self.note(None, if seconds == 3600 { "an hour passes".to_owned() } else { format!("{seconds} s pass") }).await
    }

    async fn turn(&mut self, turn: &str) -> Result<()> {
        let (name, waits) = turn.strip_suffix('~').map_or((turn, false), |it| (it, true));
        let who = self.board.find(name).with_context(|| format!("no participant is called {name}"))?;
        let goes_on = self.board.is_working(who);
        if !goes_on {
            self.board.give_turn(who)?;
        }
        let done = self.board.done(who, if waits { MOMENT } else { STEP }).await;
        if !done && !waits {
            bail!("{name} was expected to finish its step and waits");
        }
        self.board.waits(who, !done);
        let text = self.board.text(who);
        self.note(Some(who), text).await
    }

    /// Adds a line to the record.
    async fn note(&mut self, who: Option<usize>, text: String) -> Result<()> {
        let View { state, breach } = (self.watch)().await?;
        if let Some(failed) = self.tasks.iter_mut().find(|it| it.is_finished()) {
            // A script that has ended well may be looked at once only.
            let ended = std::mem::replace(failed, tokio::spawn(async { Ok(()) }));
            ended.await.context("a participant panicked")??;
        }
        let (cells, claimed) = self.board.cells(who);
        let waited_too_long = self.board.waited_longer_than(self.bound);
        let inside = cells.iter().filter(|it| it.inside).count();
        let breach = claimed
            .or(breach)
            .or(waited_too_long)
            .filter(|it| self.run.lines.iter().all(|line| line.breach.as_ref() != Some(it)));
        ensure!(cells.len() == self.run.names.len(), "participants join before the first step");
        self.run.lines.push(Line { who, text, cells, state, inside, breach });
        Ok(())
    }
}
