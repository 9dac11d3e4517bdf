//! What the attempts of a retry share with the statements in them: the turn, and the rows to lock. Knows no database.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    policy::Wait,
    retry::{locking::Locking, turn::Turn},
    value::version::Row,
};

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
    /// Whether rows are locked after conflicts.
    then_locks: bool,
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
    /// Whether an attempt has read a row on a connection of its own, where it can lock one.
    can_lock: bool,
    /// The rows that the attempts lock when they read them in a transaction.
    locks: Vec<Locking>,
    /// Those that the running attempt has locked. It locks none twice: a second transaction of it would wait for the first.
    locked: Vec<Row>,
    /// The rows that cannot be locked where they are read.
    unlockable: Vec<Row>,
}

impl Attempts {
    pub(crate) fn new(deadline: Option<Instant>, then_locks: bool) -> Self {
        let is_nested = RUNNING.try_with(|_| ()).is_ok();
        let outcome_unknown = AtomicBool::new(false);
        Self(Arc::new(Shared { is_nested, deadline, then_locks, outcome_unknown, state: Mutex::default() }))
    }

    /// Runs `poll`, which polls an attempt.
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        RUNNING.sync_scope(self.clone(), poll)
    }

    /// Whether it is the turn of these attempts to write the row.
    pub(crate) fn has_turn(&self, row: Row) -> bool {
        self.0.state.lock().turn.as_ref().is_some_and(|it| it.row() == row && it.is_current())
    }

    /// Whether these attempts may wait for a turn. They may not in an attempt of another retry, which may have a turn or locks
    /// that others wait for.
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

    /// Another attempt begins.
    pub(crate) fn begin(&self) {
        let mut state = self.0.state.lock();
        state.stands_back = false;
        state.locked.clear();
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

    /// Whether the attempts can lock this row.
    pub(crate) fn can_lock(&self, row: Row) -> bool {
        let state = self.0.state.lock();
        state.can_lock && !state.unlockable.contains(&row)
    }

    /// Adds a row that the following attempts lock. `false` if they lock it already.
    pub(crate) fn lock(&self, row: Row) -> bool {
        self.0.state.lock().lock(row)
    }
}

impl State {
    fn lock(&mut self, row: Row) -> bool {
        let is_new = self.locks.iter().all(|it| it.row() != row);
        if is_new {
            self.locks.push(Locking::start(row));
        }
        is_new
    }
}

impl Shared {}

/// Waits for the turn of the running attempt, if other tasks of this process take turns to write the row. To be called before a
/// connection is taken: the task with the turn may need the last one.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) async fn turn(row: impl FnOnce() -> Option<Row>) {
    let Ok(attempts) = RUNNING.try_with(Clone::clone) else { return };
    let Some(row) = Turn::is_taken(row) else { return };
    if attempts.0.state.lock().turn.as_ref().is_some_and(Turn::is_current) || !attempts.may_wait() {
        return;
    }
    let started = Instant::now();
    // Boxed: it is larger than most bodies, and rarely runs.
    Box::pin(attempts.wait(row, attempts.0.deadline)).await;
    attempts.0.state.lock().waited += started.elapsed();
}

/// Whether the running attempt stands back before it reads this row on a connection of its own: other tasks of this process
/// take turns to write the row, and it has no turn. It cannot wait here, because they may need its connection or its locks.
/// At most once in a retry.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) fn stands_back(row: impl FnOnce() -> Row) -> bool {
    let Ok(attempts) = RUNNING.try_with(Clone::clone) else { return false };
    if attempts.0.then_locks || Turn::is_taken(|| Some(row())).is_none() || !attempts.may_wait() {
        return false;
    }
    let mut state = attempts.0.state.lock();
    if state.stood_back || state.turn.as_ref().is_some_and(Turn::is_current) {
        return false;
    }
    (state.stood_back, state.stands_back) = (true, true);
    true
}

/// How long the running attempt waits for the lock of this row, if it locks it when it reads it on a connection of its own.
/// `row` is only computed if any row is locked.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) fn lock_wait(row: impl FnOnce() -> Row) -> Option<Wait> {
    let attempts = RUNNING.try_with(Clone::clone).ok().filter(|it| it.0.then_locks)?;
    let mut state = attempts.0.state.lock();
    state.can_lock = true;
    if !Locking::is_any() {
        return None;
    }
    let row = row();
    if state.locked.contains(&row) || state.unlockable.contains(&row) {
        return None;
    }
    if !state.locks.iter().any(|it| it.row() == row) {
        // The one that locks it may be the retry that this one is nested in.
        if attempts.0.is_nested || !Locking::is_locked(row) {
            return None;
        }
        state.lock(row);
    }
    state.locked.push(row);
    let left = attempts.0.deadline.map(|it| it.saturating_duration_since(Instant::now()));
    Some(Wait::within(None, left))
}

/// The row cannot be locked where the running attempt has read it: outside a transaction, or without an index. Its writers take
/// turns instead.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) fn cannot_lock(row: Row) {
    let Ok(attempts) = RUNNING.try_with(Clone::clone) else { return };
    let dropped: Vec<_> = {
        let mut state = attempts.0.state.lock();
        state.unlockable.push(row);
        state.locks.extract_if(.., |it| it.row() == row).collect()
    };
    // Dropped after the mutex is unlocked.
    drop(dropped);
}
