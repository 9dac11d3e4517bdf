//! The error type. Its variants name what a caller can act on.

use std::{error::Error as StdError, time::Duration};

pub use crate::value::reason::{Fault, LossReason, Raced};
use crate::value::{
    fence::Fence,
    holder::{self, Holder},
    key::Key,
    version::Version,
};

/// What lockkit's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error, boxed.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a lock could not be taken, kept or committed.
///
/// Most callers need the predicates only: [`is_contended`](Self::is_contended), [`is_lost`](Self::is_lost),
/// [`is_conflict`](Self::is_conflict), [`is_transient`](Self::is_transient).
///
/// There is no `From<sqlx::Error>`: a database error always says what lockkit was doing, and for which lock.
///
/// A web service answers by the predicates. With axum, `LockError` of the crate `lockkit-axum` does; by hand it is the
/// `IntoResponse` of the service's own error:
///
/// ```
/// # struct StatusCode; impl StatusCode { const CONFLICT: u16 = 409;
/// # const SERVICE_UNAVAILABLE: u16 = 503; const INTERNAL_SERVER_ERROR: u16 = 500; }
/// # type Response = (u16, String);
/// # trait IntoResponse { fn into_response(self) -> Response; }
/// # impl IntoResponse for (u16, String) { fn into_response(self) -> Response { self } }
/// struct ApiError(lockkit::Error);
///
/// impl IntoResponse for ApiError {
///     fn into_response(self) -> Response {
///         let status = match &self.0 {
///             err if err.is_contended() || err.is_conflict() => StatusCode::CONFLICT, // try again
///             err if err.is_transient() || err.is_lost() => StatusCode::SERVICE_UNAVAILABLE,
///             _ => StatusCode::INTERNAL_SERVER_ERROR,
///         };
///         (status, self.0.to_string()).into_response()
///     }
/// }
/// # assert_eq!(ApiError(lockkit::Error::conflict()).into_response().0, 409);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another holder has the lock, and the wait is over. Nothing was taken.
    #[error(
        "lock `{key}` is {} (waited {}){}",
        holder::state(holder.as_deref()),
        rounded(*waited),
        holder::details(holder.as_deref())
    )]
    #[non_exhaustive]
    Contended {
        /// The lock, or the table whose row is locked.
        key: Key,
        /// How long the caller waited.
        waited: Duration,
        /// The holder, if known. For leases and session locks: unless the store did not answer the last look in time;
        /// a store that answered with an error is [`Holder::Unknown`]. For named and row locks: on some databases, see
        /// their `lock`.
        holder: Option<Box<Holder>>,
    },

    /// The task already holds the lock and would wait for itself. Nothing was taken, and the task did not wait.
    ///
    /// Locks are not re-entrant. lockkit reports this error where it knows that the task holds the lock: in a function
    /// under `#[with_lock]` and in a body of [`LeaseRequest::run`](crate::LeaseRequest::run). It is a mistake in the
    /// program, so it is neither contended nor transient.
    #[error("this task already holds {lock} `{key}` and would wait for itself: {hint}")]
    #[non_exhaustive]
    Reentrant {
        /// What kind of lock it is, as in "lease".
        lock: &'static str,
        /// The lock.
        key: Key,
        /// What to write instead.
        hint: &'static str,
    },

    /// The lease is no longer held: stop, and do not write what it protected.
    #[error("lease `{key}` with fence {fence} was lost: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The lease.
        key: Key,
        /// Its fencing token.
        fence: Fence,
        /// How it was lost.
        reason: LossReason,
    },

    /// The fence guard refused the transaction: a later holder of the lease has already committed in this database.
    /// Roll it back, and stop.
    #[error("lease `{key}` with fence {fence} is stale: a transaction with fence {seen} has passed the guard")]
    #[non_exhaustive]
    Fenced {
        /// The lease.
        key: Key,
        /// Its fencing token.
        fence: Fence,
        /// The greater fence of the later holder.
        seen: Fence,
    },

    /// An optimistic write matched no row: another writer changed the version, or the row is gone.
    #[error(
        "the row{} changed since it was read (expected version {}, found {})",
        of(table.as_ref()),
        text(expected.as_ref()),
        text(found.as_ref())
    )]
    #[non_exhaustive]
    Conflict {
        /// The table, where lockkit wrote the statement.
        table: Option<Key>,
        /// The version that the write expected, where lockkit wrote the statement.
        expected: Option<Version>,
        /// The version that the row has now; `None` when the row is gone or was not looked at.
        found: Option<Version>,
        /// Marks a conflict, for code that walks an error chain.
        #[source]
        source: Raced,
    },

    /// Each attempt failed with a transient error, and the attempts or the time ran out.
    #[error("gave up after {attempts} {} in {}", plural(*attempts, "attempt", "attempts"), rounded(*elapsed))]
    #[non_exhaustive]
    RetriesExhausted {
        /// How many attempts were started.
        attempts: u32,
        /// From the first attempt to giving up.
        elapsed: Duration,
        /// How the last attempt failed.
        source: BoxError,
    },

    /// [`Leases::close`](crate::Leases::close) was called. These `Leases` grant no more leases.
    #[error("lease `{key}` was not taken: these `Leases` are closed")]
    #[non_exhaustive]
    Closed {
        /// The lease.
        key: Key,
    },

    /// No row matches, so no row was locked.
    #[error("no row of `{table}` matches, so nothing was locked")]
    #[non_exhaustive]
    NoSuchRow {
        /// The table.
        table: Key,
    },

    /// The row lock would read the whole table, and on MySQL and MariaDB lock it. Nothing was locked.
    #[error(
        "locking rows of `{table}` would scan the whole table: create an index on the columns it is locked by (ordered \
         by, if it has no `by`), or allow it with `.check_plan(PlanCheck::Off)`; the plan is: {plan}"
    )]
    #[non_exhaustive]
    FullScan {
        /// The table.
        table: Key,
        /// The plan, in the database's words.
        plan: String,
    },

    /// The text cannot name a lock, or cannot be stored in this database. See [`Key`].
    #[error("`{key}` cannot be a key: {reason}")]
    #[non_exhaustive]
    InvalidKey {
        /// The text, escaped and shortened.
        key: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The text cannot name a table or column.
    #[error("`{name}` cannot be the name of a table or column: {reason}")]
    #[non_exhaustive]
    InvalidIdentifier {
        /// The text, escaped and shortened.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The value of an option is invalid.
    #[error("`{option}` {reason}")]
    #[non_exhaustive]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// What is wrong with it, and what to write instead.
        reason: String,
    },

    /// lockkit's tables are missing or too old in this database.
    #[error("lockkit's tables are missing or out of date: {hint}")]
    #[non_exhaustive]
    NotMigrated {
        /// What to run.
        hint: &'static str,
        /// What the database said.
        source: BoxError,
    },

    /// lockkit's migrations could not be applied. The application's own migrations never cause this error: there is no
    /// `From<MigrateError>`.
    #[error("lockkit's migrations could not be applied{}", hint.map_or_else(String::new, |hint| format!(": {hint}")))]
    #[non_exhaustive]
    Migration {
        /// What to do, where the source does not tell: when a migration was interrupted, or when the history may not be
        /// read.
        hint: Option<&'static str>,
        /// What went wrong.
        source: BoxError,
    },

    /// The database ended the transaction before its commit, so the commit was refused.
    ///
    /// PostgreSQL does so after any failed statement, MySQL and MariaDB when they pick a deadlock victim, SQLite after
    /// `INSERT OR ROLLBACK` or when its disk is full: there each statement after that point was committed by itself. On
    /// MySQL and MariaDB statements after that point were rolled back in a transaction of [`begin`](crate::begin); in a
    /// `sqlx::Transaction` each was committed by itself.
    ///
    /// It is not transient, because a statement of your own may have committed the transaction (COMMIT, or DDL on MySQL
    /// and MariaDB). A transaction of [`begin`](crate::begin) that is known to have been rolled back by a node of a
    /// Galera cluster is a transient [`Error::Database`] instead.
    #[error(
        "the database ended the transaction before its commit (an earlier statement failed, or a statement committed \
         implicitly)"
    )]
    #[non_exhaustive]
    TransactionEnded {
        /// What the database said to the commit.
        source: BoxError,
    },

    /// No connection of the pool came free in time. Callers that hold one (for a transaction or a session lock) may be
    /// waiting for another. Leases report it where they have no connections of their own
    /// ([`own_connections`](crate::lease::LeasesBuilder::own_connections)), and where more statements about them wait
    /// than are served in time.
    #[error(
        "no connection came free: {held} of the pool's {size} {} in use, and {waiting} {} for one; {hint}",
        plural(*held, "is", "are"),
        plural(*waiting, "caller waits", "callers wait")
    )]
    #[non_exhaustive]
    PoolStarved {
        /// How many connections are in use.
        held: u32,
        /// How many callers of lockkit wait for a connection, this one included.
        waiting: u32,
        /// How many connections the pool may have.
        size: u32,
        /// What to change.
        hint: &'static str,
    },

    /// The key was answered for another request. Nothing was done. In HTTP this is 422.
    #[error(
        "`{key}` was answered for another request: a key belongs to one request, so give this one a key of its own"
    )]
    #[non_exhaustive]
    Mismatch {
        /// The key.
        key: Key,
    },

    /// An answer is no JSON that can be stored, or the stored one is no answer of this type.
    #[error("the answer of `{key}` {problem} as `{what}`")]
    #[non_exhaustive]
    Answer {
        /// The key.
        key: Key,
        /// What does not work.
        problem: &'static str,
        /// The type of the answer.
        what: &'static str,
        /// Why.
        source: BoxError,
    },

    /// The stock has too few pieces left. Nothing was taken.
    #[error("stock `{key}` is sold out: {wanted} wanted, {left} left")]
    #[non_exhaustive]
    SoldOut {
        /// The stock.
        key: Key,
        /// How many were wanted.
        wanted: u64,
        /// How many were left.
        left: u64,
    },

    /// The connection that a session lock lives on is gone, and the lock with it: stop, and do not write what it
    /// protected.
    #[error("session lock `{key}` was lost: its connection is gone")]
    #[non_exhaustive]
    SessionLost {
        /// The lock.
        key: Key,
        /// How the connection was lost, where the database or the driver said so.
        source: Option<BoxError>,
    },

    /// A pooler in transaction mode stands between this process and the database, where a session lock would belong to
    /// the next user of the server's connection. Nothing was locked.
    #[error(
        "session lock `{key}` was refused: two statements of one connection ran in two sessions of the server, so a \
         pooler in transaction mode stands in between; connect to the database itself or to a port of the pooler in \
         session mode, or use a lease or a named lock instead"
    )]
    #[non_exhaustive]
    TransactionPooler {
        /// The lock.
        key: Key,
    },

    /// The server answered that it had granted the lock, and no session holds it: this server only pretends to have
    /// such locks.
    #[error(
        "{lock} `{key}` was refused: the server ({server}) says that it grants it, and does not hold it, so it would \
         exclude nobody; lock a row there (`RowLock`), or keep leases in another store"
    )]
    #[non_exhaustive]
    FeignedLock {
        /// What kind of lock it is, as in "session lock".
        lock: &'static str,
        /// The lock.
        key: Key,
        /// What the server calls itself.
        server: String,
    },

    /// The connection broke after COMMIT was sent. The commit may or may not have happened.
    ///
    /// Look at the data before you repeat the work.
    #[error("the connection broke during the commit, which may or may not have happened")]
    #[non_exhaustive]
    OutcomeUnknown {
        /// How the connection broke.
        source: BoxError,
    },

    /// MySQL or MariaDB writes its binary log as statements, and so refuses every write in a READ COMMITTED
    /// transaction, which [`begin`](crate::begin) makes (error 1665).
    #[error(
        "the server refused a write while {doing}{}, because it writes its binary log as statements and the \
         transaction is READ COMMITTED: set `binlog_format` to ROW or MIXED on the server",
        of(key.as_ref())
    )]
    #[non_exhaustive]
    StatementLog {
        /// What lockkit was doing.
        doing: &'static str,
        /// For which lock or table.
        key: Option<Key>,
        /// What the server said.
        source: BoxError,
    },

    /// The database, or another store, failed.
    #[error("database error while {doing}{}", of(key.as_ref()))]
    #[non_exhaustive]
    Database {
        /// What lockkit was doing.
        doing: &'static str,
        /// For which lock or table.
        key: Option<Key>,
        /// What kind of failure it is.
        fault: Fault,
        /// What the driver said.
        source: BoxError,
    },
}

impl Error {
    /// For stores of your own: the failure of a store while it was `doing` something, such as "renewing leases", to the
    /// lease of this key, if it was one.
    ///
    /// ```
    /// use lockkit::{Error, Fault};
    /// use std::io;
    ///
    /// let source = io::Error::from(io::ErrorKind::BrokenPipe);
    /// let err = Error::database("renewing leases", None, Fault::Unavailable, source);
    /// assert_eq!(err.to_string(), "database error while renewing leases");
    /// ```
    pub fn database<'k>(
        doing: &'static str,
        key: impl Into<Option<&'k Key>>,
        fault: Fault,
        source: impl Into<BoxError>,
    ) -> Self {
        Self::Database { doing, key: key.into().cloned(), fault, source: source.into() }
    }

    /// For tests of code that handles it: another holder has the lock, after a wait of `waited`.
    pub fn contended(key: impl Into<Key>, waited: Duration, holder: impl Into<Option<Holder>>) -> Self {
        Self::Contended { key: key.into(), waited, holder: holder.into().map(Box::new) }
    }

    /// For tests of code that handles it: the lease with this fence was lost.
    pub fn lost(key: impl Into<Key>, fence: Fence, reason: LossReason) -> Self {
        Self::Lost { key: key.into(), fence, reason }
    }

    /// For tests of code that handles it: the fence guard refused `fence`, because it has seen the greater fence
    /// `seen`.
    pub fn fenced(key: impl Into<Key>, fence: Fence, seen: Fence) -> Self {
        Self::Fenced { key: key.into(), fence, seen }
    }

    /// An optimistic write that matched no row. For statements of your own whose result is not
    /// [`or_conflict`](crate::OrConflict)'s, and for tests.
    pub fn conflict() -> Self {
        Self::Conflict { table: None, expected: None, found: None, source: Raced { row: None } }
    }

    /// For crates that build on lockkit: the value of an option is invalid. The text is `` `{option}` {reason} ``.
    ///
    /// ```
    /// let err = lockkit::Error::invalid_option("for_user", "needs the name of a user");
    /// assert_eq!(err.to_string(), "`for_user` needs the name of a user");
    /// ```
    pub fn invalid_option(option: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidOption { option, reason: reason.into() }
    }

    /// The lock, the lease, the stock or the table that the error is about, where it is about one.
    ///
    /// ```
    /// use lockkit::{Error, Fence, LossReason};
    ///
    /// let err = Error::lost("nightly", Fence::from(7), LossReason::Expired);
    /// assert_eq!(err.key().unwrap(), "nightly");
    /// ```
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Contended { key, .. }
            | Self::Reentrant { key, .. }
            | Self::Lost { key, .. }
            | Self::Fenced { key, .. }
            | Self::Closed { key }
            | Self::NoSuchRow { table: key }
            | Self::FullScan { table: key, .. }
            | Self::Mismatch { key }
            | Self::Answer { key, .. }
            | Self::SoldOut { key, .. }
            | Self::SessionLost { key, .. }
            | Self::FeignedLock { key, .. }
            | Self::TransactionPooler { key } => Some(key),
            Self::Conflict { table: key, .. } | Self::StatementLog { key, .. } | Self::Database { key, .. } => {
                key.as_ref()
            }
            Self::RetriesExhausted { .. } => self.last().and_then(Self::key),
            Self::InvalidKey { .. }
            | Self::InvalidIdentifier { .. }
            | Self::InvalidOption { .. }
            | Self::NotMigrated { .. }
            | Self::Migration { .. }
            | Self::TransactionEnded { .. }
            | Self::PoolStarved { .. }
            | Self::OutcomeUnknown { .. } => None,
        }
    }

    /// The error of lockkit that retries ended with, where this is [`RetriesExhausted`](Self::RetriesExhausted).
    fn last(&self) -> Option<&Self> {
        match self {
            Self::RetriesExhausted { source, .. } => chain(&**source).find_map(<dyn StdError>::downcast_ref),
            _ => None,
        }
    }

    /// Whether this, or the error that retries ended with, is such an error.
    fn any(&self, is: impl Fn(&Self) -> bool) -> bool {
        std::iter::successors(Some(self), |it| it.last()).any(is)
    }

    /// Another holder has the lock.
    ///
    /// As all of these tests, it looks through [`RetriesExhausted`](Self::RetriesExhausted) at the error of the last
    /// attempt.
    ///
    /// ```
    /// # async fn f(leases: &lockkit::Leases<impl lockkit::LeaseStore>) -> lockkit::Result<()> {
    /// match leases.lease("nightly").acquire().await {
    ///     Ok(lease) => { /* work */ }
    ///     Err(err) if err.is_contended() => { /* another process does it */ }
    ///     Err(err) => return Err(err),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn is_contended(&self) -> bool {
        self.any(|it| matches!(it, Self::Contended { .. }))
    }

    /// The lease or session lock is gone, may no longer be trusted, or has had a later holder.
    pub fn is_lost(&self) -> bool {
        self.any(|it| matches!(it, Self::Lost { .. } | Self::Fenced { .. } | Self::SessionLost { .. }))
    }

    /// An optimistic write met a conflict. A new attempt that reads again may succeed.
    pub fn is_conflict(&self) -> bool {
        self.any(|it| matches!(it, Self::Conflict { .. }))
    }

    /// The database rolled back the work for a transient reason (deadlock victim, serialization failure, stale
    /// snapshot). The same work, run again from its beginning, may succeed.
    pub fn is_transient(&self) -> bool {
        self.any(|it| matches!(it, Self::Database { fault, .. } if fault.is_transient()))
    }

    /// Whether the store may answer a later request: it was away, or another transaction was in the way.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::PoolStarved { .. } => true,
            // Read-only is what a node is that was demoted.
            Self::Database { fault, .. } => {
                matches!(fault, Fault::Unavailable | Fault::ReadOnly) || fault.is_of_the_moment()
            }
            _ => false,
        }
    }
}

/// The error and its sources, outermost first.
pub(crate) fn chain<'a>(err: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    let mut next = Some(err);
    std::iter::from_fn(move || {
        let err = next?;
        next = err.source();
        Some(err)
    })
}

/// A duration for people to read, to two digits or more: `12 ms`, `2.0 s`, `28 s`, `3 min`.
pub(crate) fn rounded(duration: Duration) -> String {
    const SECOND: u128 = 1000;
    const MINUTE: u128 = 60 * SECOND;
    const HOUR: u128 = 60 * MINUTE;
    let millis = (duration.as_micros() + 500) / 1000;
    let whole = |unit: u128| (millis + unit / 2) / unit;
    match millis {
        0..SECOND => format!("{millis} ms"),
        // Below what rounds to 10.0 s.
        SECOND..9950 => format!("{}.{} s", whole(100) / 10, whole(100) % 10),
        9950..120_000 => format!("{} s", whole(SECOND)),
        120_000..7_200_000 => format!("{} min", whole(MINUTE)),
        7_200_000..172_800_000 => format!("{} h", whole(HOUR)),
        _ => format!("{} days", whole(24 * HOUR)),
    }
}

fn plural(number: u32, one: &'static str, more: &'static str) -> &'static str {
    if number == 1 { one } else { more }
}

fn of(key: Option<&Key>) -> String {
    key.map_or_else(String::new, |it| format!(" `{it}`"))
}

fn text(version: Option<&Version>) -> String {
    version.map_or_else(|| "unknown".to_owned(), Version::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_for_people() {
        let text = |micros| rounded(Duration::from_micros(micros));
        assert_eq!([text(0), text(499), text(500), text(50_120)], ["0 ms", "0 ms", "1 ms", "50 ms"]);
        assert_eq!([text(999_499), text(999_500), text(2_018_861)], ["999 ms", "1.0 s", "2.0 s"]);
        assert_eq!([text(9_949_499), text(9_950_000), text(27_981_145)], ["9.9 s", "10 s", "28 s"]);
        let text = |seconds| rounded(Duration::from_secs(seconds));
        assert_eq!([text(119), text(120), text(7_199), text(7_200)], ["119 s", "2 min", "120 min", "2 h"]);
        assert_eq!([text(172_800), rounded(Duration::MAX)], ["2 days", "213503982334601 days"]);
    }

    #[test]
    fn a_result_stays_small() {
        // An error as large as several cache lines would be moved through every call that cannot fail, too.
        assert!(size_of::<Error>() <= 120, "{} bytes", size_of::<Error>());
    }

    #[test]
    fn what_retries_ended_with_is_seen_through_them() {
        let exhausted = |source: BoxError| Error::RetriesExhausted { attempts: 2, elapsed: Duration::ZERO, source };
        let lost = exhausted(Box::new(exhausted(Box::new(Error::lost("k", Fence::from(1), LossReason::Stolen)))));
        assert!(lost.is_lost() && !lost.is_contended() && !lost.is_conflict() && !lost.is_transient());
        assert_eq!(lost.key().map(Key::as_str), Some("k"));
        assert!(exhausted(Box::new(Error::contended("k", Duration::ZERO, None))).is_contended());
        assert!(exhausted(Box::new(Error::conflict())).is_conflict());
        assert!(exhausted(Box::new(Error::database("x", None, Fault::Deadlock, "y"))).is_transient());
        assert!(!exhausted("not of lockkit".into()).is_contended());
    }

    #[test]
    fn an_error_passes_if_another_server_or_a_later_moment_has_none() {
        let passes = |fault| Error::database("acquiring lease", None, fault, "?").may_pass();
        assert!([Fault::Unavailable, Fault::Contended, Fault::ReadOnly, Fault::Deadlock].into_iter().all(passes));
        assert!(![Fault::Other, Fault::Encoding, Fault::NoTable].into_iter().any(passes));
        assert!(Error::PoolStarved { held: 1, waiting: 1, size: 1, hint: "?" }.may_pass());
        assert!(!Error::OutcomeUnknown { source: "?".into() }.may_pass());
    }

    #[test]
    fn one_is_not_many() {
        let starved = |held, waiting| Error::PoolStarved { held, waiting, size: 4, hint: "…" }.to_string();
        assert!(
            starved(1, 1).contains("1 of the pool's 4 is in use, and 1 caller waits for one;"),
            "{}",
            starved(1, 1)
        );
        assert!(
            starved(4, 2).contains("4 of the pool's 4 are in use, and 2 callers wait for one;"),
            "{}",
            starved(4, 2)
        );
        let elapsed = Duration::from_millis(2018);
        let exhausted =
            |attempts| Error::RetriesExhausted { attempts, elapsed, source: Box::new(Raced { row: None }) }.to_string();
        assert_eq!(exhausted(1), "gave up after 1 attempt in 2.0 s");
        assert_eq!(exhausted(3), "gave up after 3 attempts in 2.0 s");
    }

    #[test]
    fn a_conflict_names_the_versions_that_are_known() {
        let conflict = |expected: Option<i64>, found: Option<i64>| {
            let (expected, found) = (expected.map(Version::from), found.map(Version::from));
            Error::Conflict { table: Some("stock".into()), expected, found, source: Raced { row: None } }.to_string()
        };
        let text = "the row `stock` changed since it was read (expected version ";
        assert_eq!(conflict(Some(7), None), format!("{text}7, found unknown)"));
        assert_eq!(conflict(None, Some(8)), format!("{text}unknown, found 8)"));
    }
}
