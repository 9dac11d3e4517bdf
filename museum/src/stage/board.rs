//! The state that a stage shares with its actors: turns, and which participants are inside or wait.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, ensure};
use tokio::{sync::Notify, time::timeout};

use super::Actor;
use crate::run::Cell;

#[derive(Debug, Default)]
pub(super) struct Board {
    seats: Mutex<Vec<Seat>>,
    /// A participant has come to rest, or has got its turn.
    changed: Notify,
    /// The seconds that the schedule has let pass.
    passed: AtomicU64,
}

#[derive(Debug)]
struct Seat {
    name: &'static str,
    phase: Phase,
    text: String,
    result: Option<String>,
    mark: String,
    inside: bool,
    /// As the lines show it: a participant that enters during the step of another one is shown inside from its own
    /// next line.
    seen_inside: bool,
    waiting: bool,
    /// Since when it wants the lock, in seconds from the start of the run.
    wants: Option<u64>,
    breach: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Its step runs.
    Working,
    /// At a step, waiting for its turn.
    Resting,
    /// Has its turn, and has not begun the step yet.
    Called,
    Ended,
}

impl Board {
    /// A new participant.
    pub(super) fn actor(self: &Arc<Self>, name: &'static str) -> Actor {
        let mut seats = self.seats();
        seats.push(Seat {
            name,
            phase: Phase::Working,
            text: String::new(),
            result: None,
            mark: String::new(),
            inside: false,
            seen_inside: false,
            waiting: false,
            wants: None,
            breach: None,
        });
        Actor { who: seats.len() - 1, name, board: self.clone() }
    }

    pub(super) fn names(&self) -> Vec<&'static str> {
        self.seats().iter().map(|it| it.name).collect()
    }

    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.seats().iter().position(|it| it.name == name)
    }

    /// Waits until all participants rest or have ended.
    pub(super) async fn at_rest(&self, limit: Duration) -> Result<()> {
        Ok(timeout(limit, self.until(|seats| seats.iter().all(Seat::is_done))).await?)
    }

    /// Whether this participant rests or has ended, within the limit.
    pub(super) async fn done(&self, who: usize, limit: Duration) -> bool {
        timeout(limit, self.until(|seats| seats[who].is_done())).await.is_ok()
    }

    /// Whether it has begun a step that has no line with its result yet.
    pub(super) fn is_working(&self, who: usize) -> bool {
        self.seats()[who].waiting
    }

    /// How many have such a step.
    pub(super) fn waiting(&self) -> usize {
        self.seats().iter().filter(|it| it.waiting).count()
    }

    pub(super) fn give_turn(&self, who: usize) -> Result<()> {
        let seat = &mut self.seats()[who];
        ensure!(seat.phase == Phase::Resting, "{} has no step left", seat.name);
        seat.phase = Phase::Called;
        self.changed.notify_waiters();
        Ok(())
    }

    /// Whether the step of the participant is waiting. One that waits wants something.
    pub(super) fn waits(&self, who: usize, waiting: bool) {
        let waited = std::mem::replace(&mut self.seats()[who].waiting, waiting);
        match (waited, waiting) {
            (_, true) => self.wants(who),
            (true, false) => self.with(who, |seat| seat.wants = None),
            (false, false) => {}
        }
    }

    /// The last step, with its result.
    pub(super) fn text(&self, who: usize) -> String {
        let Seat { text, result, .. } = &self.seats()[who];
        match result {
            Some(result) => format!("{text} → {result}"),
            None => text.clone(),
        }
    }

    /// The cells of the next line, and the breach of the participant that took the step.
    pub(super) fn cells(&self, who: Option<usize>) -> (Vec<Cell>, Option<String>) {
        let mut breach = None;
        let mut seats = self.seats();
        let cell = |(at, seat): (usize, &mut Seat)| {
            if who.is_none_or(|it| it == at) || !seat.inside {
                seat.seen_inside = seat.inside;
            }
            let shows = who.is_none_or(|it| it == at);
            if shows {
                breach = breach.take().or(seat.breach.take());
            }
            let mark = if shows { std::mem::take(&mut seat.mark) } else { String::new() };
            Cell { mark, inside: seat.seen_inside, waiting: seat.waiting && !seat.seen_inside }
        };
        let cells = seats.iter_mut().enumerate().map(cell).collect();
        (cells, breach)
    }

    pub(super) fn pass(&self, seconds: u64) {
        self.passed.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Names the participants that have wanted the lock for longer than this.
    pub(super) fn waited_longer_than(&self, bound: Duration) -> Option<String> {
        let now = self.passed.load(Ordering::Relaxed);
        let seats = self.seats();
        let waited = |seat: &Seat| Some((seat.name, now - seat.wants?));
        let too_long: Vec<_> = seats.iter().filter_map(waited).filter(|(_, time)| *time > bound.as_secs()).collect();
        let longest = too_long.iter().map(|(_, time)| time).max()?;
        let names: Vec<_> = too_long.iter().map(|(name, _)| *name).collect();
        Some(format!("{} waited {longest} s", names.join(" and ")))
    }

    pub(super) async fn turn(&self, who: usize, text: String) {
        self.with(who, |seat| seat.phase = Phase::Resting);
        self.until(|seats| seats[who].phase == Phase::Called).await;
        self.with(who, |seat| {
            (seat.phase, seat.text, seat.result) = (Phase::Working, text, None);
        });
    }

    pub(super) fn result(&self, who: usize, result: Option<String>) {
        self.with(who, |seat| seat.result = result);
    }

    pub(super) fn enters(&self, who: usize) {
        let others: Vec<_> = self.seats().iter().filter(|it| it.inside).map(|it| it.name).collect();
        self.with(who, |seat| {
            (seat.inside, seat.wants) = (true, None);
            "enters".clone_into(&mut seat.mark);
            if !others.is_empty() {
                seat.breach = Some(format!("{} and {} are inside", others.join(" and "), seat.name));
            }
        });
    }

    pub(super) fn leaves(&self, who: usize, how: &str) {
        self.with(who, |seat| {
            seat.inside = false;
            how.clone_into(&mut seat.mark);
        });
    }

    pub(super) fn wants(&self, who: usize) {
        let now = self.passed.load(Ordering::Relaxed);
        self.with(who, |seat| {
            seat.wants.get_or_insert(now);
        });
    }

    pub(super) fn gives_up(&self, who: usize, how: &str) {
        self.with(who, |seat| {
            seat.wants = None;
            how.clone_into(&mut seat.mark);
        });
    }

    pub(super) fn mark(&self, who: usize, mark: &str) {
        self.with(who, |seat| mark.clone_into(&mut seat.mark));
    }

    pub(super) fn breach(&self, who: usize, what: String) {
        self.with(who, |seat| seat.breach = Some(what));
    }

    pub(super) fn ended(&self, who: usize) {
        self.with(who, |seat| seat.phase = Phase::Ended);
    }

    fn with(&self, who: usize, change: impl FnOnce(&mut Seat)) {
        change(&mut self.seats()[who]);
        self.changed.notify_waiters();
    }

    async fn until(&self, mut holds: impl FnMut(&[Seat]) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if holds(&self.seats()) {
                return;
            }
            changed.await;
        }
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Resting | Phase::Ended)
    }
}
