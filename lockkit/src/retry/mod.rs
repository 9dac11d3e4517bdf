//! The one retry loop, and the default test for retryable errors.

pub(crate) mod bounds;
pub(crate) mod context;
mod state;
pub(crate) mod turn;

pub use self::state::Retry;

use std::{error::Error as StdError, future::Future, pin::pin};

use crate::{
    policy::RetryPolicy,
    retry::bounds::Bounded,
    value::error::{BoxError, Error, Fault, Raced, Result, chain},
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
    chain(err).find_map(|cause| {
        // lockkit may know more than its source says: what became of the transaction.
        if let Some(Error::Database { fault, .. }) = cause.downcast_ref() {
            return Some(*fault);
        }
        #[cfg(feature = "sql")]
        if let Some(fault) = crate::sql::driver_fault(cause) {
            return Some(fault);
        }
        None
    })
}

impl RetryPolicy {
    /// Runs `attempt` until it succeeds, fails with an error that is not retryable, or this policy ends. The closure
    /// gets the number of the attempt, counted from 1.
    ///
    /// [`is_retryable`] decides whether a failure is retried. The deadline bounds everything but a commit on its way:
    /// an attempt that is still running at the deadline is dropped, and no pause lasts past it. No further attempt is
    /// started if the pause and the fastest attempt so far would not fit before the deadline.
    ///
    /// **Turns.** After a write conflict on a row, the retries of this process write that row one after the other, in
    /// the order of their conflicts. As long as they do, attempts of other retries wait for their turn as well before a
    /// derived `load` of the row on a pool. On a connection, `load` and
    /// [`VersionedRow::read`](crate::VersionedRow::read) fail with [`Error::Conflict`] instead, at most once in a
    /// retry, because the others may need that connection; the attempt starts again when its turn has come, and is not
    /// counted twice. A turn excludes nobody. It ends with its retry, and passes on after 250 ms while others wait. The
    /// wait for a turn ends after 10 s or at the deadline, whichever is first, and holds no connection. A retry in an
    /// attempt of another one does not wait. The row is known where lockkit wrote the statement that conflicted; other
    /// conflicts are followed by a pause, see [`backoff`](Self::backoff).
    ///
    /// Other processes take no turns with this one. Lock a row that several processes write often:
    /// [`RowLock`](crate::RowLock).
    ///
    /// # Errors
    /// The attempt's own error if it is not retryable; [`Error::RetriesExhausted`], with the last error as its source,
    /// when attempts or time ran out; [`Error::OutcomeUnknown`] when the deadline has passed and a COMMIT was not
    /// answered; [`Error::InvalidOption`] for zero attempts or a zero deadline.
    ///
    /// # Cancel safety
    /// As cancel safe as `attempt` is. The deadline does not drop an attempt while a COMMIT of lockkit has no answer
    /// (of a [`Tx`](crate::Tx), or of a lease): it waits for the answer, for 30 s at most, and the result of the
    /// attempt counts. Without an answer the error is [`Error::OutcomeUnknown`]. Other commits, such as that of a
    /// `sqlx::Transaction` by itself, may have happened when the deadline drops them: leave time for them.
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
    ///
    /// # Cancel safety
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
            let outcome = {
                let mut attempt = pin!(attempt(number));
                Bounded::new(None, retry.deadline(), attempt.as_mut()).within(retry.attempts()).await
            };
            if let Some(result) = retry.step(outcome, &worth_another).await {
                return result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn conflict() -> Error {
        Error::conflict()
    }

    #[derive(Debug, thiserror::Error)]
    #[error(transparent)]
    struct Wrapped(#[from] Error);

    #[test]
    fn a_conflict_is_seen_through_transparent_and_plain_wrappers() {
        assert!(is_retryable(&conflict()));
        assert!(is_retryable(&Wrapped(conflict())));
        let exhausted =
            Error::RetriesExhausted { attempts: 1, elapsed: Duration::ZERO, source: Box::new(std::fmt::Error) };
        assert!(!is_retryable(&Wrapped(exhausted)));
    }

    #[test]
    fn work_that_the_database_undid_is_repeated_and_no_other() {
        let failed = |fault| Error::database("testing", None, fault, "?");
        for (fault, is_repeated) in [(Fault::Deadlock, true), (Fault::Serialization, true), (Fault::Duplicate, false)] {
            assert_eq!(is_retryable(&failed(fault)), is_repeated, "{fault:?}");
        }
    }
}
