//! The one retry loop, and the default test for retryable errors.

use std::{error::Error as StdError, future::Future, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    error::{BoxError, Error, Fault, Raced, Result, chain},
    observe,
    policy::{Backoff, RetryPolicy, full_jitter},
    task::until,
};

/// Whether another attempt may succeed after this error: whether its chain of sources contains a version conflict, a
/// deadlock, a serialization failure or a stale snapshot.
///
/// This is the default test of [`RetryPolicy::retry`] and `#[with_lock]`. It works through any wrapper that keeps
/// [`source`](StdError::source), including transparent ones, and for a `sqlx::Error` that never passed through lockkit.
///
/// ```
/// use lockkit::OrConflict;
///
/// #[derive(Debug, thiserror::Error)]
/// enum OrderError {
///     #[error(transparent)]
///     Lock(#[from] lockkit::Error),
///     #[error("sold out")]
///     SoldOut,
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t (id INTEGER, version INTEGER)").execute(&pool).await?;
/// let stale = sqlx::query("UPDATE t SET version = 2 WHERE id = 1 AND version = 1").execute(&pool).await?;
/// let conflict = OrderError::from(stale.or_conflict().unwrap_err());
/// assert!(lockkit::is_retryable(&conflict));
/// assert!(!lockkit::is_retryable(&OrderError::SoldOut));
/// # Ok(()) }
/// ```
pub fn is_retryable(err: &(dyn StdError + 'static)) -> bool {
    chain(err).any(<dyn StdError>::is::<Raced>) || fault(err).is_some_and(Fault::is_transient)
}

/// The first fault in the chain of sources of an error, as a driver or a store reported it.
fn fault(err: &(dyn StdError + 'static)) -> Option<Fault> {
    #[cfg(feature = "sql")]
    if let Some(fault) = crate::sql::fault_in_chain(err) {
        return Some(fault);
    }
    chain(err).filter_map(<dyn StdError>::downcast_ref).find_map(|it| match it {
        Error::Database { fault, .. } => Some(*fault),
        _ => None,
    })
}

impl RetryPolicy {
    /// Runs `attempt` until it succeeds, fails with an error that is not retryable, or this policy ends. The closure
    /// gets the number of the attempt, counted from 1.
    ///
    /// [`is_retryable`] decides whether a failure is retried. The deadline bounds everything: an attempt that is still
    /// running at the deadline is dropped, and no pause lasts past it. No further attempt is started if the pause and
    /// the fastest attempt so far would not fit before the deadline.
    ///
    /// # Errors
    /// The attempt's own error if it is not retryable; [`Error::RetriesExhausted`], with the last error as its source,
    /// when attempts or time ran out; [`Error::InvalidOption`] for zero attempts or a zero deadline.
    ///
    /// # Cancel safety
    /// As cancel safe as `attempt` is. The same applies to the deadline: an attempt that it drops in the middle of a
    /// COMMIT may have committed. `#[with_lock(…, tx = tx)]` keeps the commit out of the deadline. Without the
    /// attribute, leave time for the commit.
    ///
    /// # Example
    /// ```
    /// use lockkit::{OrConflict, RetryPolicy};
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::query("CREATE TABLE t (id INTEGER, n INTEGER, version INTEGER)").execute(&pool).await?;
    /// # sqlx::query("INSERT INTO t VALUES (1, 10, 1)").execute(&pool).await?;
    /// #[derive(Debug, thiserror::Error)]
    /// enum TakeError {
    ///     #[error(transparent)]
    ///     Lock(#[from] lockkit::Error),
    ///     #[error(transparent)]
    ///     Database(#[from] sqlx::Error),
    /// }
    ///
    /// RetryPolicy::new()
    ///     .attempts(3)
    ///     .deadline(Duration::from_millis(500))
    ///     .retry(|_attempt| async {
    ///         let (n, version): (i64, i64) =
    ///             sqlx::query_as("SELECT n, version FROM t WHERE id = 1").fetch_one(&pool).await?;
    ///         sqlx::query("UPDATE t SET n = ?, version = version + 1 WHERE id = 1 AND version = ?")
    ///             .bind(n - 1)
    ///             .bind(version)
    ///             .execute(&pool)
    ///             .await?
    ///             .or_conflict()?;
    ///         Ok::<_, TakeError>(())
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub async fn retry<T, E, Fut>(self, attempt: impl FnMut(u32) -> Fut) -> Result<T, E>
    where
        Fut: Future<Output = Result<T, E>>,
        E: StdError + From<Error> + Send + Sync + 'static,
    {
        self.retry_if(|err: &E| is_retryable(err), attempt).await
    }

    /// As [`retry`](Self::retry), with your own test for retryable errors.
    ///
    /// The error can be any type that converts into a boxed error, such as `anyhow::Error`.
    ///
    /// # Errors
    /// As [`retry`](Self::retry).
    pub async fn retry_if<T, E, Fut>(
        self,
        worth_another: impl Fn(&E) -> bool,
        mut attempt: impl FnMut(u32) -> Fut,
    ) -> Result<T, E>
    where
        Fut: Future<Output = Result<T, E>>,
        E: From<Error> + Into<BoxError>,
    {
        let mut retry = Retry::new(self)?;
        loop {
            let number = retry.start();
            let outcome = until(retry.deadline(), attempt(number)).await;
            if let Some(result) = retry.step(outcome, &worth_another).await {
                return result;
            }
        }
    }
}

/// The state of a retry loop. [`RetryPolicy::retry`] and the macro's loops use it.
#[derive(Debug)]
pub struct Retry {
    policy: RetryPolicy,
    started: Instant,
    attempts: u32,
    attempt_started: Instant,
    fastest: Duration,
    ceiling: Duration,
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
            ceiling: policy.backoff.base,
        })
    }

    /// The deadline of the whole loop.
    pub fn deadline(&self) -> Option<Instant> {
        self.policy.deadline.map(|it| self.started + it)
    }

    /// Counts another attempt and returns its number.
    pub fn start(&mut self) -> u32 {
        self.attempts += 1;
        self.attempt_started = Instant::now();
        self.attempts
    }

    /// Evaluates an attempt, which is `None` if the deadline cut it off. Returns the final result, or `None` after the
    /// pause before the next attempt.
    pub async fn step<T, E>(
        &mut self,
        outcome: Option<Result<T, E>>,
        worth_another: impl Fn(&E) -> bool,
    ) -> Option<Result<T, E>>
    where
        E: From<Error> + Into<BoxError>,
    {
        let err = match outcome {
            None => return Some(Err(self.exhausted(CutOff.into()).into())),
            Some(Err(err)) if worth_another(&err) => err,
            Some(result) => return Some(result),
        };
        let now = Instant::now();
        self.fastest = self.fastest.min(now - self.attempt_started);
        let Backoff { cap, .. } = self.policy.backoff;
        let pause = full_jitter(self.ceiling.min(cap));
        self.ceiling = self.ceiling.saturating_mul(2);
        let left = self.deadline().map(|it| it.saturating_duration_since(now));
        let too_late = left.is_some_and(|it| pause.saturating_add(self.fastest) >= it);
        if self.attempts >= self.policy.most_attempts() || too_late {
            return Some(Err(self.exhausted(err.into()).into()));
        }
        observe::retried(self.attempts, pause, &err.into());
        sleep(pause).await;
        None
    }

    fn exhausted(&self, source: BoxError) -> Error {
        Error::RetriesExhausted { attempts: self.attempts, elapsed: self.started.elapsed(), source }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the deadline passed while the attempt was running")]
struct CutOff;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;

    fn conflict() -> Error {
        Error::Conflict { table: None, expected: None, found: None, source: Raced }
    }

    #[derive(Debug, thiserror::Error)]
    #[error(transparent)]
    struct Wrapped(#[from] Error);

    #[test]
    fn a_conflict_is_seen_through_transparent_and_plain_wrappers() {
        assert!(is_retryable(&conflict()));
        assert!(is_retryable(&Wrapped(conflict())));
        let exhausted = Error::RetriesExhausted { attempts: 1, elapsed: Duration::ZERO, source: Box::new(CutOff) };
        assert!(!is_retryable(&Wrapped(exhausted)));
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
}
