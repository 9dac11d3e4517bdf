//! What a retry loop knows: the attempts so far, their conflicts, and what follows from them for the next one.
//!
//! Pauses are full jitter below the time of the fastest attempt so far, doubled each time: a fixed base is too long for
//! a row in memory and too short for a body of a second.

use std::{error::Error as StdError, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    body::task::timed_out,
    observe,
    policy::{Pauses, RetryPolicy},
    retry::context::Attempts,
    value::{
        error::{BoxError, Error, Raced, Result, chain},
        version::Row,
    },
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
            shared: Attempts::new(policy.deadline.map(|it| now + it)),
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
            None if self.shared.is_outcome_unknown() => {
                return Some(Err(Error::OutcomeUnknown { source: timed_out().into() }.into()));
            }
            None => return Some(Err(self.exhausted(CutOff.into()).into())),
            // An attempt that stood back has not run, whatever its caller makes of that.
            Some(Err(err)) if worth_another(&err) || self.shared.is_standing_back() => err.into(),
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
        if !self.policy.backoff.adapts() {
            // Other tasks must not wait during a pause that the caller has chosen.
            self.shared.give_up_turn();
        }
        let row = conflict.and_then(|it| it.row);
        let turn = row.filter(|row| self.shared.may_wait() && !self.shared.has_turn(*row));
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
mod tests {
    use std::{
        cell::Cell,
        future::Future,
        pin::pin,
        sync::{
            Arc,
            atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
        },
        task::Poll,
    };

    use tokio::task::{JoinSet, yield_now};

    use crate::{
        body::commits::{COMMIT_LIMIT, CommitSent},
        policy::Backoff,
        retry::{context, turn::Turn},
    };

    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn conflict() -> Error {
        Error::conflict()
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_end_a_retry() {
        let mut ran = 0;
        let result: Result<()> = RetryPolicy::new()
            .attempts(3)
            .retry(|number| {
                ran += 1;
                assert_eq!(number, ran);
                async { Err(conflict()) }
            })
            .await;
        assert!(matches!(result, Err(Error::RetriesExhausted { attempts: 3, .. })));
        assert_eq!(ran, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_cuts_off_a_running_attempt() {
        let started = Instant::now();
        let policy = RetryPolicy::new().deadline(Duration::from_secs(2));
        let result: Result<()> = policy.retry(|_| std::future::pending()).await;
        assert!(matches!(result, Err(Error::RetriesExhausted { attempts: 1, .. })));
        assert_eq!(started.elapsed(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_that_is_on_its_way_at_the_deadline_is_waited_for() {
        let policy = RetryPolicy::new().deadline(Duration::from_secs(2));
        let commit = |takes: Duration| {
            policy.retry(move |_| async move {
                let sent = CommitSent::now();
                sleep(takes).await;
                drop(sent);
                Ok::<_, Error>(())
            })
        };
        commit(COMMIT_LIMIT).await.unwrap();
        let unanswered = commit(2 * COMMIT_LIMIT).await;
        assert!(matches!(unanswered, Err(Error::OutcomeUnknown { .. })), "{unanswered:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_cannot_finish_in_time_is_not_started() {
        let (started, mut ran) = (Instant::now(), 0);
        let policy = RetryPolicy::new().deadline(Duration::from_millis(2500));
        let result: Result<()> = policy
            .retry(|_| {
                ran += 1;
                async {
                    sleep(Duration::from_secs(1)).await;
                    Err(conflict())
                }
            })
            .await;
        assert!(matches!(result, Err(Error::RetriesExhausted { attempts: 2, .. })));
        assert_eq!(ran, 2);
        assert!(started.elapsed() < Duration::from_millis(2500));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_a_passing_reason_ends_it_at_once() {
        let mut ran = 0;
        let result: Result<()> = RetryPolicy::new()
            .retry(|_| {
                ran += 1;
                async { Err(Error::NoSuchRow { table: "t".into() }) }
            })
            .await;
        assert!(matches!(result, Err(Error::NoSuchRow { .. })));
        assert_eq!(ran, 1);
    }

    /// A row in memory: its version is the number of writes.
    #[derive(Debug, Clone)]
    struct Memory {
        row: Row,
        version: Arc<AtomicU64>,
    }

    /// The tests share the turns of the process, so each has rows of its own.
    fn cell() -> Memory {
        Memory { row: Row(fastrand::u64(..)), version: Arc::default() }
    }

    impl Memory {
        async fn load(&self) -> u64 {
            context::turn(|| Some(self.row)).await;
            self.version.load(Relaxed)
        }

        /// Writes if the version is still that one, after this much work.
        async fn save(&self, version: u64, work: Duration) -> Result<()> {
            sleep(work).await;
            let saved = self.version.compare_exchange(version, version + 1, Relaxed, Relaxed);
            saved.map(drop).map_err(|_| conflict_of(self.row))
        }

        fn written(&self) -> u64 {
            self.version.load(Relaxed)
        }

        fn has_turns(&self) -> bool {
            Turn::contested(|| Some(self.row)).is_some()
        }
    }

    fn conflict_of(row: Row) -> Error {
        Error::Conflict { table: None, expected: None, found: None, source: Raced { row: Some(row) } }
    }

    #[tokio::test(start_paused = true)]
    async fn writers_of_one_row_take_turns_once_they_have_conflicted() {
        let (cell, attempts) = (cell(), Arc::new(AtomicU32::new(0)));
        let mut writers = JoinSet::new();
        for _ in 0..64 {
            let (cell, attempts) = (cell.clone(), attempts.clone());
            writers.spawn(async move {
                for _ in 0..20 {
                    let write = async |_| {
                        attempts.fetch_add(1, Relaxed);
                        let version = cell.load().await;
                        cell.save(version, 3 * MILLI).await
                    };
                    RetryPolicy::new().retry(write).await.unwrap();
                }
            });
        }
        let started = Instant::now();
        writers.join_all().await;
        assert_eq!(cell.written(), 64 * 20);
        // One conflict for each task, in the first attempts of all.
        assert!(attempts.load(Relaxed) <= 64 * 21, "{attempts:?}");
        assert!(started.elapsed() < MILLI * 5 * 64 * 20, "no pauses between turns: {:?}", started.elapsed());
        assert!(!cell.has_turns());
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_during_its_turn_is_followed_by_a_pause_with_the_turn() {
        let (row, started) = (cell().row, Instant::now());
        let mut retry = Retry::new(RetryPolicy::new()).unwrap();
        for number in 1..=3 {
            assert_eq!(retry.start(), number);
            sleep(MILLI).await;
            let ended: Option<Result<()>> = retry.step(Some(Err(conflict_of(row))), Error::is_conflict).await;
            assert!(ended.is_none());
            assert!(retry.attempts().has_turn(row));
        }
        assert!(started.elapsed() <= MILLI * (3 + 2 + 4 + 2), "{:?}", started.elapsed());
        drop(retry);
        assert!(Turn::contested(|| Some(row)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_on_another_row_takes_its_turn_in_place_of_the_first() {
        let (first, then) = (cell(), cell());
        let mut retry = Retry::new(RetryPolicy::new()).unwrap();
        for (row, has_turns) in [(first.row, (true, false)), (then.row, (false, true))] {
            retry.start();
            let ended: Option<Result<()>> = retry.step(Some(Err(conflict_of(row))), Error::is_conflict).await;
            assert!(ended.is_none());
            assert_eq!((first.has_turns(), then.has_turns()), has_turns);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_turn_is_no_part_of_the_time_that_an_attempt_takes() {
        let cell = cell();
        let _holder = Turn::wait(cell.row, None).await.unwrap();
        let write = async |number| {
            // Until the turn passes on, after most of the time.
            let version = cell.load().await;
            if number == 1 { Err(conflict_of(cell.row)) } else { cell.save(version, MILLI).await }
        };
        RetryPolicy::new().deadline(400 * MILLI).retry(write).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_with_the_turn_does_not_stand_back() {
        let cell = cell();
        let write = async |number| {
            assert!(!context::stands_back(|| cell.row));
            if number == 1 { Err(conflict_of(cell.row)) } else { Ok(()) }
        };
        RetryPolicy::new().retry(write).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_that_the_caller_sets_are_made_and_hold_up_nobody() {
        let cell = cell();
        let pause = 100 * MILLI;
        let policy = RetryPolicy::new().attempts(2000).backoff(Backoff { base: pause, cap: pause });
        let mut retry = Retry::new(policy).unwrap();
        let started = Instant::now();
        for _ in 0..200 {
            retry.start();
            let mut step = pin!(retry.step::<(), Error>(Some(Err(conflict_of(cell.row))), Error::is_conflict));
            poll_once(step.as_mut()).await;
            assert!(!cell.has_turns());
            assert!(step.await.is_none());
        }
        let mean = started.elapsed() / 200;
        assert!(mean > 35 * MILLI && mean < 65 * MILLI, "{mean:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_ends_the_wait_for_a_turn() {
        let cell = cell();
        let holder = Turn::wait(cell.row, None).await.unwrap();
        let (policy, started) = (RetryPolicy::new().deadline(100 * MILLI), Instant::now());
        // At the start of an attempt, and between two.
        let first: Result<()> = policy
            .retry(async |_| {
                let version = cell.load().await;
                cell.save(version, MILLI).await
            })
            .await;
        assert!(matches!(first, Err(Error::RetriesExhausted { attempts: 1, .. })), "{first:?}");
        assert_eq!(started.elapsed(), 100 * MILLI);
        let started = Instant::now();
        let then: Result<()> = policy
            .retry(async |_| {
                sleep(20 * MILLI).await;
                Err(conflict_of(cell.row))
            })
            .await;
        assert!(matches!(then, Err(Error::RetriesExhausted { attempts: 1, .. })), "{then:?}");
        assert!(started.elapsed() <= 81 * MILLI, "an attempt would not fit any more: {:?}", started.elapsed());
        assert!(holder.is_current());
        drop(holder);
        assert!(!cell.has_turns());
    }

    #[tokio::test(start_paused = true)]
    async fn rows_in_opposite_orders_in_nested_retries_wait_for_no_turn_in_vain() {
        let rows = [cell(), cell()];
        let mut writers = JoinSet::new();
        for task in 0..16 {
            let (outer, inner) = (rows[task % 2].clone(), rows[1 - task % 2].clone());
            writers.spawn(async move {
                let policy = RetryPolicy::new().attempts(10_000);
                for _ in 0..10 {
                    let write = async |_| {
                        let version = outer.load().await;
                        let write_inner = async |_| {
                            let version = inner.load().await;
                            inner.save(version, MILLI).await
                        };
                        policy.retry(write_inner).await?;
                        outer.save(version, MILLI).await
                    };
                    policy.retry(write).await.unwrap();
                }
            });
        }
        let started = Instant::now();
        let written = async {
            writers.join_all().await;
        };
        tokio::time::timeout(Duration::from_secs(600), written).await.unwrap();
        assert!(rows[0].written() + rows[1].written() >= 2 * 160);
        assert!(!rows[0].has_turns() && !rows[1].has_turns());
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_with_a_turn_retries_the_same_row_without_waiting_for_itself() {
        let (cell, started) = (cell(), Instant::now());
        let written = RetryPolicy::new()
            .retry(async |number| {
                let version = cell.load().await;
                if number == 1 {
                    return Err(conflict_of(cell.row));
                }
                assert!(cell.has_turns());
                let stale = Cell::new(true);
                let write_inner = async |_| {
                    let version = cell.load().await;
                    if stale.replace(false) {
                        return Err(conflict_of(cell.row));
                    }
                    cell.save(version, MILLI).await
                };
                RetryPolicy::new().retry(write_inner).await?;
                Ok(version)
            })
            .await;
        assert_eq!(written.unwrap(), 0);
        assert!(started.elapsed() < 20 * MILLI, "{:?}", started.elapsed());
        assert!(!cell.has_turns());
    }

    #[tokio::test(start_paused = true)]
    async fn a_retry_that_is_dropped_at_any_await_leaves_no_turn() {
        let cell = cell();
        for polls in 1..20 {
            let holder = (polls % 2 == 0).then(|| Turn::wait(cell.row, None));
            let holder = match holder {
                Some(turn) => turn.await,
                None => None,
            };
            let write = async |number| {
                let version = cell.load().await;
                yield_now().await;
                if number < 3 { Err(conflict_of(cell.row)) } else { cell.save(version, MILLI).await }
            };
            let mut retry = Box::pin(RetryPolicy::new().retry(write));
            for _ in 0..polls {
                let ended = std::future::poll_fn(|context| Poll::Ready(retry.as_mut().poll(context).is_ready())).await;
                if ended {
                    break;
                }
                tokio::time::advance(MILLI).await;
            }
            drop(retry);
            drop(holder);
            assert!(!cell.has_turns(), "{polls}");
        }
        assert!(cell.written() > 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_cannot_wait_starts_again_with_the_turn() {
        let cell = cell();
        let holder = Turn::wait(cell.row, None).await.unwrap();
        let (begun, held, other) = (Cell::new(0), Cell::new(Some(holder)), self::cell());
        let write = async |number| {
            assert_eq!(number, 1, "what was not read is no attempt");
            begun.set(begun.get() + 1);
            sleep(MILLI).await;
            assert!(!context::stands_back(|| other.row), "no tasks take turns to write it");
            if context::stands_back(|| cell.row) {
                drop(held.take());
                return Err(conflict_of(cell.row));
            }
            assert!(cell.has_turns());
            cell.save(0, MILLI).await
        };
        let policy = RetryPolicy::new().attempts(1).deadline(Duration::from_secs(1));
        policy.retry_if(|_: &Error| false, write).await.unwrap();
        assert_eq!((begun.get(), cell.written()), (2, 1));
        assert!(!cell.has_turns());
    }

    async fn poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) {
        std::future::poll_fn(|context| {
            assert!(future.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
    }
}
