//! A stage: participants whose steps run in the order of a schedule, and nothing else.
//!
//! A participant is an `async fn` that takes an [`Actor`] and awaits its turn before each step. The schedule names the
//! turns: `A B~ +30s A B` lets A take a step, lets B begin one that has to wait (`~`), lets 30 s pass, lets A take its
//! next step, and expects B's to be done by now. So a run is the same every time, however fast the machine is.

mod actor;
mod board;
mod shown;

use std::{
    future::{Future, ready},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

pub(crate) use self::actor::Actor;
use self::{board::Board, shown::Shown};
use crate::run::{Line, Run};

/// How long a step may take that is not marked with `~`, on the clock of the run.
const STEP: Duration = Duration::from_secs(20);

/// How long a step is watched that is marked with `~`, where no server can tell that it waits. What it waits for cannot
/// happen meanwhile.
const MOMENT: Duration = Duration::from_millis(20);

/// Between two questions to a server. MySQL and MariaDB answer from a copy that is renewed when nobody has asked for
/// 0.1 s.
const PAUSE: Duration = Duration::from_millis(120);

/// How many participants the server has waiting. `None` if it cannot tell.
type Waiting = Result<Option<usize>>;

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
    waiting: Box<dyn Fn() -> Boxed<Waiting> + Send>,
    bound: Duration,
    run: Run,
}

impl Stage {
    /// As [`new`](Self::new), with the state that `view` finds in this world.
    pub(crate) fn of<W, F>(state_title: &'static str, world: &W, view: impl Fn(W) -> F + Send + 'static) -> Self
    where
        W: Clone + Send + 'static,
        F: Future<Output = Result<View>> + Send + 'static,
    {
        let world = world.clone();
        Self::new(state_title, move || view(world.clone()))
    }

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
            waiting: Box::new(|| Box::pin(ready(Ok(None)))),
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

    /// How to ask the server how many participants wait there.
    pub(crate) fn asks<F>(mut self, waiting: impl Fn() -> F + Send + 'static) -> Self
    where
        F: Future<Output = Waiting> + Send + 'static,
    {
        self.waiting = Box::new(move || Box::pin(waiting()));
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
        // A participant without a further line may have entered beside another one.
        if let (_, Some(breach)) = self.board.cells(None)
            && let Some(last) = self.run.lines.last_mut()
        {
            last.breach.get_or_insert(breach);
        }
        self.tasks.iter().for_each(JoinHandle::abort);
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
        let done = if waits { !self.comes_to_wait(who).await? } else { self.board.done(who, STEP).await };
        if !done && !waits {
            bail!("{name} was expected to finish its step and waits");
        }
        self.board.waits(who, !done);
        let text = self.board.text(who);
        self.note(Some(who), text).await
    }

    /// Whether the step of this participant has to wait. Otherwise it is done.
    async fn comes_to_wait(&mut self, who: usize) -> Result<bool> {
        let before = self.board.waiting();
        let until = Instant::now() + STEP;
        while Instant::now() < until {
            match (self.waiting)().await? {
                None => return Ok(!self.board.done(who, MOMENT).await),
                Some(now) if now > before => return Ok(true),
                Some(_) if self.board.done(who, PAUSE).await => return Ok(false),
                Some(_) => {}
            }
        }
        bail!("it is not done, and does not wait in the server")
    }

    /// Adds a line to the record.
    async fn note(&mut self, who: Option<usize>, text: String) -> Result<()> {
        let View { state, breach } = (self.watch)().await?;
        while let Some(ended) = self.tasks.iter().position(JoinHandle::is_finished) {
            self.tasks.swap_remove(ended).await.context("a participant panicked")??;
        }
        let (cells, claimed) = self.board.cells(who);
        let waited_too_long = self.board.waited_longer_than(self.bound);
        let inside = cells.iter().filter(|it| it.inside).count();
        let breach = claimed
            .or(breach)
            .or(waited_too_long)
            .filter(|it| self.run.lines.iter().all(|line| line.breach.as_ref() != Some(it)));
        self.run.lines.push(Line { who, text, cells, state, inside, breach });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn stage() -> Stage {
        Stage::new("", || ready(Ok(View::default())))
    }

    async fn enters_and_stays(me: Actor) -> Result<()> {
        me.step("enter", async { me.enters() }).await;
        me.step("stay", async {}).await;
        Ok(())
    }

    async fn hangs(me: Actor) -> Result<()> {
        me.step("hang", pending::<()>()).await;
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn two_at_once_inside_are_a_breach_of_the_second_one() {
        let stage = stage().actor("A", enters_and_stays).actor("B", enters_and_stays);
        let run = stage.play("A B").await.expect("both have a step");
        assert_eq!(run.lines.iter().map(|it| it.inside).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(run.lines[1].breach.as_deref(), Some("A and B are inside"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_a_breach_when_it_is_longer_than_the_bound() {
        let wait = async |schedule| {
            let stage = stage().bound(Duration::from_secs(10)).actor("A", hangs);
            stage.play(schedule).await.expect("A waits").breach().map(str::to_owned)
        };
        assert_eq!(wait("A~ +10s").await, None);
        assert_eq!(wait("A~ +10s +1s").await.as_deref(), Some("A waited 11 s"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_schedule_that_does_not_fit_is_an_error() {
        for (schedule, problem) in [
            ("A", "A was expected to finish its step and waits"),
            ("B B B", "B has no step left"),
            ("C", "no participant is called C"),
            ("+1h", "a time is as in `+30s`"),
        ] {
            let played = stage().actor("A", hangs).actor("B", enters_and_stays).play(schedule).await;
            let err = played.map(|_run| ()).expect_err(schedule);
            assert_eq!(err.root_cause().to_string(), problem);
        }
    }
}
