//! What the attempts of a retry share with the statements in them: the turn to write a row. Knows no database.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{mutex::Mutex, retry::turn::Turn, value::version::Row};

tokio::task_local! {
    /// The retry whose attempt is running.
    static RUNNING: Attempts;
}

/// The attempts of one retry.
#[derive(Debug, Clone)]
pub(crate) struct Attempts(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Whether this retry runs in an attempt of another one.
    is_nested: bool,
    deadline: Option<Instant>,
    /// Whether the commit of an attempt was not answered.
    outcome_unknown: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    turn: Option<Turn>,
    /// How long the running attempt has waited for its turn.
    waited: Duration,
    /// Whether an attempt has stood back for others.
    stood_back: bool,
    /// Whether it was the running one.
    stands_back: bool,
}

impl Attempts {
    pub(crate) fn new(deadline: Option<Instant>) -> Self {
        let is_nested = RUNNING.try_with(|_| ()).is_ok();
        let outcome_unknown = AtomicBool::new(false);
        Self(Arc::new(Shared { is_nested, deadline, outcome_unknown, state: Mutex::default() }))
    }

    /// Runs `poll`, which polls an attempt.
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        RUNNING.sync_scope(self.clone(), poll)
    }

    /// Whether it is the turn of these attempts to write the row.
    pub(crate) fn has_turn(&self, row: Row) -> bool {
        self.0.state.lock().turn.as_ref().is_some_and(|it| it.row() == row && it.is_current())
    }

    /// Whether these attempts may wait for a turn. They may not in an attempt of another retry, which may have a turn
    /// or locks that others wait for.
    pub(crate) fn may_wait(&self) -> bool {
        !self.0.is_nested
    }

    /// Waits for the turn to write this row, in place of any other turn.
    pub(crate) async fn wait(&self, row: Row, deadline: Option<Instant>) {
        self.give_up_turn();
        let turn = Turn::wait(row, deadline).await;
        self.0.state.lock().turn = turn;
    }

    pub(crate) fn give_up_turn(&self) {
        let turn = self.0.state.lock().turn.take();
        drop(turn);
    }

    /// The time that the attempt spent waiting for its turn, which is not its own.
    pub(crate) fn take_waited(&self) -> Duration {
        std::mem::take(&mut self.0.state.lock().waited)
    }

    /// Whether the attempt has ended because it [stands back](stands_back).
    pub(crate) fn take_stands_back(&self) -> bool {
        std::mem::take(&mut self.0.state.lock().stands_back)
    }

    /// The attempt was ended while its commit had no answer.
    pub(crate) fn set_outcome_unknown(&self) {
        self.0.outcome_unknown.store(true, Ordering::Relaxed);
    }

    /// Whether an attempt was ended while its commit had no answer.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        self.0.outcome_unknown.load(Ordering::Relaxed)
    }

    /// Whether the running attempt [stands back](stands_back).
    pub(crate) fn is_standing_back(&self) -> bool {
        self.0.state.lock().stands_back
    }
}

/// Waits for the turn of the running attempt, if other tasks of this process take turns to write the row. To be called
/// before a connection is taken: the task with the turn may need the last one.
pub(crate) async fn turn(row: impl FnOnce() -> Option<Row>) {
    let Ok(attempts) = RUNNING.try_with(Clone::clone) else { return };
    let Some(row) = Turn::contested(row) else { return };
    if attempts.0.state.lock().turn.as_ref().is_some_and(Turn::is_current) || !attempts.may_wait() {
        return;
    }
    let started = Instant::now();
    // Boxed: it is larger than most bodies, and rarely runs.
    Box::pin(attempts.wait(row, attempts.0.deadline)).await;
    attempts.0.state.lock().waited += started.elapsed();
}

/// Whether the running attempt stands back before it reads this row on a connection of its own: other tasks of this
/// process take turns to write the row, and it has no turn. It cannot wait here, because they may need its connection
/// or its locks. At most once in a retry.
pub(crate) fn stands_back(row: impl FnOnce() -> Row) -> bool {
    let Ok(attempts) = RUNNING.try_with(Clone::clone) else { return false };
    if Turn::contested(|| Some(row())).is_none() || !attempts.may_wait() {
        return false;
    }
    let mut state = attempts.0.state.lock();
    if state.stood_back || state.turn.as_ref().is_some_and(Turn::is_current) {
        return false;
    }
    (state.stood_back, state.stands_back) = (true, true);
    true
}
