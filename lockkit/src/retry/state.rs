//! What a retry loop knows: the attempts so far, their conflicts, and what follows from them for the next one.

use std::{error::Error as StdError, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    attempt::Attempts,
    error::{BoxError, Error, Raced, Result, chain},
    observe,
    policy::{Pauses, RetryPolicy},
    turn::Row,
};

/// The state of a retry loop. [`RetryPolicy::retry`] and the macro's loops use it.
#[derive(Debug)]
pub struct Retry {
    policy: RetryPolicy,
    started: Instant,
    attempts: u32,
    attempt_started: Instant,
    fastest: Duration,
    pauses: Pauses,
    conflicts: u32,
    shared: Attempts,
}

impl Retry {
    /// Checks the policy and starts its clock.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn new(policy: RetryPolicy) -> Result<Self> {
        policy.check()?;
        let now = Instant::now();
        Ok(Self {
            policy,
            started: now,
            attempts: 0,
            attempt_started: now,
            fastest: Duration::MAX,
            pauses: Pauses::new(policy.backoff),
            conflicts: 0,
            shared: Attempts::new(policy.deadline.map(|it| now + it), policy.then_lock.is_some()),
        })
    }

    /// The deadline of the whole loop.
    pub fn deadline(&self) -> Option<Instant> {
        self.policy.deadline.map(|it| self.started + it)
    }

    /// What the attempts share with the statements in them.
    pub(crate) fn attempts(&self) -> &Attempts {
        &self.shared
    }

    /// Counts another attempt and returns its number.
    pub fn start(&mut self) -> u32 {
        self.attempts += 1;
        self.attempt_started = Instant::now();
        self.attempts
    }

    /// Evaluates an attempt, which is `None` if the deadline cut it off. Returns the final result, or `None` after the
    /// pause before the next attempt, and the wait for its turn.
    pub async fn step<T, E>(
        &mut self,
        outcome: Option<Result<T, E>>,
        worth_another: impl Fn(&E) -> bool,
    ) -> Option<Result<T, E>>
    where
        E: From<Error> + Into<BoxError>,
    {
        let err: BoxError = match outcome {
            None => return Some(Err(self.exhausted(CutOff.into()).into())),
            Some(Err(err)) if worth_another(&err) => err.into(),
            Some(result) => return Some(result),
        };
        let stood_back = self.shared.take_stands_back();
        let took = self.attempt_started.elapsed().saturating_sub(self.shared.take_waited());
        let conflict = chain(&*err).find_map(<dyn StdError>::downcast_ref::<Raced>);
        let Next { pause, turn } = match conflict {
            // Has not read the row, so it is neither a conflict nor the time of an attempt.
            Some(it) if stood_back => Next { pause: Duration::ZERO, turn: it.row },
            _ => {
                self.fastest = self.fastest.min(took);
                self.next(conflict)
            }
        };
        let is_last = self.attempts >= self.policy.most_attempts() && !stood_back;
        if is_last || self.is_too_late(pause) {
            return Some(Err(self.exhausted(err).into()));
        }
        observe::retried(self.attempts, pause, &err);
        if !pause.is_zero() {
            sleep(pause).await;
        }
        if let Some(row) = turn {
            // Leaves the time of an attempt.
            let until = self.deadline().map(|it| it.checked_sub(self.least()).unwrap_or(it));
            self.shared.wait(row, until).await;
            if self.is_too_late(Duration::ZERO) {
                return Some(Err(self.exhausted(err).into()));
            }
        }
        self.attempts -= u32::from(stood_back);
        None
    }

    /// What comes before the next attempt, after a conflict or another transient error.
    fn next(&mut self, conflict: Option<&Raced>) -> Next {
        self.conflicts += u32::from(conflict.is_some());
        let row = conflict.and_then(|it| it.row);
        if let (Some(row), Some(after)) = (row, self.policy.then_lock)
            && self.conflicts >= after
            && self.shared.can_lock()
        {
            // The queue for the lock is in the database, where the attempts of this process overlap.
            self.shared.give_up_turn();
            let is_queued = self.shared.lock(row);
            return Next { pause: self.pauses.next(self.fastest, is_queued), turn: None };
        }
        if self.policy.backoff.is_some() {
            // Others do not wait for a pause that the caller has chosen.
            self.shared.give_up_turn();
        }
        // Attempts that will lock leave the queue to the database, where others would overtake those with a turn.
        let takes_turns = self.shared.may_wait() && !(self.policy.then_lock.is_some() && self.shared.can_lock());
        let turn = row.filter(|it| takes_turns && !self.shared.has_turn(*it));
        // The queue takes the place of the pause.
        Next { pause: self.pauses.next(self.fastest, turn.is_some()), turn }
    }

    fn is_too_late(&self, pause: Duration) -> bool {
        let left = self.deadline().map(|it| it.saturating_duration_since(Instant::now()));
        left.is_some_and(|it| pause.saturating_add(self.least()) >= it)
    }

    /// The least time that another attempt takes.
    fn least(&self) -> Duration {
        if self.fastest == Duration::MAX { Duration::ZERO } else { self.fastest }
    }

    fn exhausted(&self, source: BoxError) -> Error {
        Error::RetriesExhausted { attempts: self.attempts, elapsed: self.started.elapsed(), source }
    }
}

/// What comes before the next attempt: a pause, then the wait for the turn to write this row.
struct Next {
    pause: Duration,
    turn: Option<Row>,
}

#[derive(Debug, thiserror::Error)]
#[error("the deadline passed while the attempt was running")]
struct CutOff;

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
