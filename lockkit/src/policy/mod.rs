//! Waits, retries and pauses. Pure: no clock, no I/O, no database.

mod pauses;

pub use self::pauses::Backoff;
pub(crate) use self::pauses::{Pauses, half_jitter, jitter_between};

use std::time::Duration;

use crate::value::error::{Error, Result};

/// Refuses invalid durations: zero, or more than 365 days.
pub(crate) fn check_duration(option: &'static str, value: Duration) -> Result<()> {
    if value.is_zero() {
        return Err(Error::InvalidOption { option, reason: "is zero; give it a duration".to_owned() });
    }
    check_wait(option, value)
}

/// Refuses durations of more than 365 days. Zero means "do not wait".
pub(crate) fn check_wait(option: &'static str, value: Duration) -> Result<()> {
    if value > Wait::MAX {
        return Err(Error::InvalidOption {
            option,
            reason: format!("is {value:?}, more than a year; give it a shorter duration"),
        });
    }
    Ok(())
}

/// How long to wait for the holder of a lock before [`Error::Contended`].
///
/// All locks have the same default: [`Wait::DEFAULT`], 10 s. It applies to single and multiple leases, permits, readers
/// and writers, to row, named and session locks, to stocks, to the write lock that [`begin`](crate::begin) takes on
/// SQLite, and to each of them under `#[with_lock]`. Leases may have another default
/// ([`LeasesBuilder::wait`](crate::lease::LeasesBuilder::wait)). Under an attribute with a `deadline`, the default wait
/// lasts until the deadline. A lock waits without a bound only with [`Wait::Unbounded`].
///
/// The server enforces the wait of row locks, named locks and stocks.
///
/// ```
/// use lockkit::{NamedLock, Wait};
/// use std::time::Duration;
///
/// let bounded = NamedLock::new("order:42").wait(Wait::AtMost(Duration::from_secs(2)));
/// let short = NamedLock::new("order:42").wait(Duration::from_millis(200)); // the same, shorter to write
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Does not wait: fails with [`Error::Contended`] at once.
    Never,
    /// Waits at most this long, then fails with [`Error::Contended`]. At least one millisecond.
    AtMost(Duration),
    /// Waits without a bound set by lockkit. Leases and session locks then wait for ever. Row locks, named locks and
    /// stocks wait as long as the server lets a statement wait: for ever on PostgreSQL unless `lock_timeout` is set,
    /// `innodb_lock_wait_timeout` (50 s) on MySQL and MariaDB, the connection's busy timeout on SQLite.
    Unbounded,
}

impl Wait {
    /// The longest duration that any option accepts: 365 days.
    pub const MAX: Duration = Duration::from_hours(365 * 24);

    /// The default wait of every lock: 10 s.
    pub const DEFAULT: Self = Self::AtMost(Duration::from_secs(10));

    /// The given wait or the default, cut to the time that is left until a deadline. Without a given wait, the deadline
    /// is the only bound.
    pub(crate) fn within(asked: Option<Self>, left: Option<Duration>) -> Self {
        match (asked, left) {
            (None, None) => Self::DEFAULT,
            (None, Some(left)) => Self::AtMost(left),
            (Some(wait), left) => wait.cut(left),
        }
    }

    /// The longest wait as a duration: zero for [`Never`](Self::Never), 365 days for [`Unbounded`](Self::Unbounded).
    pub(crate) fn limit(self) -> Duration {
        match self {
            Self::Never => Duration::ZERO,
            Self::AtMost(bound) => bound,
            Self::Unbounded => Wait::MAX,
        }
    }

    /// The wait in milliseconds: 0 for [`Never`](Self::Never), at least 1 for [`AtMost`](Self::AtMost), `None` for
    /// [`Unbounded`](Self::Unbounded).
    pub(crate) fn millis(self) -> Option<u64> {
        match self {
            Self::Never => Some(0),
            // Rounded up: the server must not give up before the time is over.
            Self::AtMost(bound) => Some(u64::try_from(bound.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)),
            Self::Unbounded => None,
        }
    }

    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::AtMost(bound) => check_wait("wait", bound),
            Self::Never | Self::Unbounded => Ok(()),
        }
    }

    /// This wait, cut to the time that is left until a deadline.
    pub(crate) fn cut(self, left: Option<Duration>) -> Self {
        match (self, left) {
            (Self::Never, _) | (_, None) => self,
            (Self::AtMost(bound), Some(left)) => Self::AtMost(bound.min(left)),
            (Self::Unbounded, Some(left)) => Self::AtMost(left),
        }
    }
}

impl Default for Wait {
    /// [`Wait::DEFAULT`].
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl From<Duration> for Wait {
    fn from(bound: Duration) -> Self {
        if bound.is_zero() { Self::Never } else { Self::AtMost(bound) }
    }
}

/// What happens to a body when its lease is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLost {
    /// The body is dropped at its next await point. If a commit of the body is on its way then (of a
    /// [`Tx`](crate::Tx), or of a lease), its answer is waited for first, for 30 s at most: a caller that gets
    /// [`Error::Lost`](crate::Error::Lost) repeats the work. Without an answer the error is
    /// [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown).
    #[default]
    Stop,
    /// The body runs to its end, for work that must not stop half-way. It can check
    /// [`is_trusted`](crate::Lease::is_trusted). A successful result is replaced by
    /// [`Error::Lost`](crate::Error::Lost).
    Continue,
}

/// How often and how long to retry: a number of attempts and a deadline. Whichever is reached first ends the retries.
///
/// A policy without either stops after [`RetryPolicy::DEFAULT_ATTEMPTS`] attempts, so nothing in lockkit retries for
/// ever. A policy with only a deadline makes as many attempts as fit before it.
///
/// ```
/// use lockkit::RetryPolicy;
/// use std::time::Duration;
///
/// # async fn f(pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
/// let policy = RetryPolicy::new().attempts(3).deadline(Duration::from_millis(100));
/// let left: i64 = policy
///     .retry(async |_attempt| {
///         // read, decide, write with the version that was read
///         Ok::<_, lockkit::Error>(7)
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RetryPolicy {
    /// The maximum number of attempts, including the first one.
    pub attempts: Option<u32>,
    /// The total time for everything: waiting for a connection, lock waits, the body and the pauses.
    pub deadline: Option<Duration>,
    /// The pauses between attempts. With the default they adapt: see [`RetryPolicy::backoff`].
    pub backoff: Backoff,
}

impl RetryPolicy {
    /// The number of attempts of a policy that sets neither attempts nor a deadline.
    pub const DEFAULT_ATTEMPTS: u32 = 5;

    /// A policy with [`RetryPolicy::DEFAULT_ATTEMPTS`] attempts, no deadline, and pauses that adapt.
    pub const fn new() -> Self {
        Self { attempts: None, deadline: None, backoff: Backoff::new() }
    }

    /// Sets the maximum number of attempts, including the first one.
    #[must_use]
    pub const fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = Some(attempts);
        self
    }

    /// Sets the total time for everything.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Sets the pauses between attempts.
    ///
    /// By default the pauses adapt to what the attempts cost: with full jitter, the first lasts at most as long as the
    /// fastest attempt so far (at least 1 ms), the next at most twice as long, and so on up to 250 ms. There is none
    /// where the next attempt first waits for its turn.
    #[must_use]
    pub const fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// The number of attempts after which this policy ends, regardless of the time.
    pub(crate) fn most_attempts(&self) -> u32 {
        match (self.attempts, self.deadline) {
            (Some(attempts), _) => attempts,
            (None, Some(_)) => u32::MAX,
            (None, None) => Self::DEFAULT_ATTEMPTS,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.attempts == Some(0) {
            return Err(Error::InvalidOption {
                option: "attempts",
                reason: "is zero; at least one attempt is needed to do anything".to_owned(),
            });
        }
        if let Some(deadline) = self.deadline {
            check_duration("deadline", deadline)?;
        }
        let Backoff { base, cap } = self.backoff;
        check_wait("backoff", base)?;
        check_wait("backoff", cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_always_ends() {
        assert_eq!(RetryPolicy::new().most_attempts(), RetryPolicy::DEFAULT_ATTEMPTS);
        assert_eq!(RetryPolicy::new().attempts(3).most_attempts(), 3);
        assert_eq!(RetryPolicy::new().deadline(Duration::from_secs(1)).most_attempts(), u32::MAX);
        assert!(RetryPolicy::new().attempts(0).check().is_err());
        assert!(RetryPolicy::new().deadline(Duration::ZERO).check().is_err());
        assert!(RetryPolicy::new().deadline(Duration::MAX).check().is_err());
    }

    #[test]
    fn a_wait_is_cut_to_the_deadline() {
        let second = Duration::from_secs(1);
        assert_eq!(Wait::Unbounded.cut(Some(second)), Wait::AtMost(second));
        assert_eq!(Wait::AtMost(second * 2).cut(Some(second)), Wait::AtMost(second));
        assert_eq!(Wait::Never.cut(Some(second)), Wait::Never);
        assert_eq!(Wait::from(Duration::ZERO), Wait::Never);
        assert_eq!(Wait::within(None, Some(second * 60)), Wait::AtMost(second * 60), "a deadline alone is the bound");
        assert_eq!(Wait::within(None, None), Wait::DEFAULT);
        assert_eq!(Wait::within(Some(Wait::Unbounded), None), Wait::Unbounded);
    }

    #[test]
    fn no_duration_is_longer_than_a_year() {
        let year = Duration::from_secs(365 * 86_400);
        for (bound, fits) in [(year, true), (year + Duration::from_nanos(1), false)] {
            assert_eq!(Wait::AtMost(bound).check().is_ok(), fits, "{bound:?}");
            assert_eq!(RetryPolicy::new().deadline(bound).check().is_ok(), fits, "{bound:?}");
        }
        assert!(Wait::Never.check().is_ok() && Wait::Unbounded.check().is_ok());
        assert_eq!(Wait::Unbounded.limit(), year);
    }

    #[test]
    fn a_wait_in_milliseconds_is_not_shorter_than_the_wait() {
        let millis = |nanos| Wait::AtMost(Duration::from_nanos(nanos)).millis();
        assert_eq!([millis(1), millis(1_000_000), millis(1_000_001)], [Some(1), Some(1), Some(2)]);
        assert_eq!((Wait::Never.millis(), Wait::Unbounded.millis()), (Some(0), None));
    }
}
