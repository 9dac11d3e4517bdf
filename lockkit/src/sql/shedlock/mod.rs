//! ShedLock's table as a store of leases, so that its Java jobs and Rust services exclude each other.
//!
//! Java sends no notice of a release, and the table has no room for tickets. A waiter whose pauses grow to 250 ms is
//! outrun by programs that poll every 5 ms: 20 leases beside 789 (PostgreSQL) to 4,742 (MariaDB) of three such
//! programs. So `lease_freed` looks at the row after an eighth of the time for which the lock has been held, 4 to 250
//! ms: 20 beside 143 to 187. A waiter for a long job looks as rarely as before.

pub(crate) mod ops;

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use sqlx::{Database, Pool};
use tokio::time::{Instant, sleep};

use crate::{
    lease::store::{Acquired, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, Renewal},
    sql::{
        ident::TableName,
        locked::{unless_held, unless_locked},
        pool::{Reach, call, on_living_connection, tried, write},
        shedlock::ops::{Columns, Place, Row, ShedLockOps},
        starved::leases_starved,
    },
    value::{
        error::{Error, Result},
        key::Key,
        token::Token,
    },
};

/// The greatest number of characters in ShedLock's column `name`.
const NAME_CHARS: usize = 64;

/// The shortest and the longest pause of a waiter between two looks at the row.
const LOOKS: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(250));

/// The pause is this part of the time for which the holder has had the lock.
const LOOKS_PER_HOLD: u32 = 8;

/// The table of [ShedLock](https://github.com/lukas-krecan/ShedLock) as a store of leases: Java jobs that lock with
/// ShedLock and Rust services with lockkit exclude each other, by the same row and the database's clock.
///
/// The Java side uses a provider for SQL, such as `JdbcTemplateLockProvider`, with **`usingDbTime()`**. Without it,
/// Java writes the clock and the time zone of its own machine into the table, and before ShedLock 7.0.0 its unlock also
/// frees the lock of others, lockkit's too. Use the pool itself as the store (`Leases::new(pool)`) for leases that no
/// Java program shares.
///
/// The key of a lease is ShedLock's name of the lock, 1 to 64 characters. The ttl is `lockAtMostFor`, `min_hold` is
/// `lockAtLeastFor`. ShedLock's columns have this content:
///
/// | column | content |
/// |---|---|
/// | `lock_until` | when the lease expires, or became free. In UTC, as the other time |
/// | `locked_at` | when it was acquired. In microseconds since 1970 it is the fence: a grant is always later than the one before |
/// | `locked_by` | the name of the holder, `#`, and 32 digits: the token of a lease, or zeros after its release |
///
/// lockkit never creates or alters this table, and never deletes its rows. On PostgreSQL ShedLock's own definition
/// fits; on MySQL and MariaDB name a binary collation, because with the usual one `Job` and `job` are the same lock
/// (for Java too):
///
/// ```sql
/// -- PostgreSQL
/// CREATE TABLE shedlock (name VARCHAR(64) NOT NULL PRIMARY KEY, lock_until TIMESTAMP NOT NULL,
///     locked_at TIMESTAMP NOT NULL, locked_by VARCHAR(255) NOT NULL);
/// -- MySQL: utf8mb4_0900_bin; MariaDB: utf8mb4_nopad_bin
/// CREATE TABLE shedlock (name VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL PRIMARY KEY,
///     lock_until DATETIME(6) NOT NULL, locked_at DATETIME(6) NOT NULL, locked_by VARCHAR(255) NOT NULL);
/// -- SQLite, for tests: times in milliseconds since 1970
/// CREATE TABLE shedlock (name TEXT NOT NULL PRIMARY KEY, lock_until INTEGER NOT NULL,
///     locked_at INTEGER NOT NULL, locked_by TEXT NOT NULL);
/// ```
///
/// Columns that would be misread are refused with [`Error::NotMigrated`]: on PostgreSQL `timestamptz`, because Java
/// then writes in the time zone of its machine; on MySQL and MariaDB `TIMESTAMP` in a session with another time zone
/// than the server's default, which Java's sessions have (connect with [`timezone(None)`][zone], or use `DATETIME`);
/// and times with fewer than three decimals.
///
/// **Rows of other programs** do not end a list. A `locked_at` in the year 9999 or later, such as `infinity`, is an
/// error when the lock is free, because no fence is greater; the row stays as it is. Of a holder's name that lockkit
/// did not write, the first 64 printable characters are shown.
///
/// What the table cannot do:
///
/// - Semaphores, readers and writers, and fair requests are refused. They would leave rows that no process deletes and
///   Java does not know. Waiting requests poll and have no order, as in ShedLock. They look again after an eighth of
///   the time for which the lock has been held, 4 to 250 ms.
/// - There is no column for the number of renewals, so [`LeaseInfo::renewals`](crate::store::LeaseInfo::renewals) is 0,
///   nor for the ttl. So a database clock that is set back prolongs the leases of the moment by that step.
/// - Java does not know fences. If the clock is set back *and* Java has the lock in between, the next fence can be
///   lower than an earlier one. [`Lease::guard`](crate::Lease::guard) then refuses until the clock has caught up.
/// - `verify` and `commit` need lockkit's own table. Use [`Lease::guard`](crate::Lease::guard), in this or another
///   database.
/// - [`Leases::steal`](crate::Leases::steal) takes a lock from Java too, which then still runs: Java asks only when it
///   extends.
///
/// One round trip acquires a lease on PostgreSQL, two elsewhere. On PostgreSQL one statement renews all leases of the
/// process; elsewhere it is one for each.
///
/// # Example
/// ```
/// use lockkit::{Leases, store::ShedLockTable};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE shedlock (name TEXT NOT NULL PRIMARY KEY, lock_until INTEGER NOT NULL,
/// #     locked_at INTEGER NOT NULL, locked_by TEXT NOT NULL)").execute(&pool).await?;
/// let leases = Leases::new(ShedLockTable::new(pool));
/// let job = leases.lease("nightlyInvoices").min_hold(Duration::from_secs(60));
/// if let Some(lease) = job.try_acquire().await? {
///     // … the job; no Java node runs it now …
///     lease.release().await?;
/// }
/// # Ok(()) }
/// ```
///
/// [zone]: https://docs.rs/sqlx/latest/sqlx/mysql/struct.MySqlConnectOptions.html#method.timezone
pub struct ShedLockTable<DB: Database> {
    pool: Pool<DB>,
    table: TableName,
    /// Set once the columns are known to fit.
    step_us: Arc<OnceLock<i64>>,
}

impl<DB: ShedLockOps> ShedLockTable<DB> {
    /// The table `shedlock` of this pool's database. Clones share the pool.
    pub fn new(pool: Pool<DB>) -> Self {
        let table = TableName::new("shedlock").expect("BUG: the usual name of the table is a name");
        Self { pool, table, step_us: Arc::default() }
    }

    /// Another name of the table, such as `app.shedlock`. It is sent in quotes, so write it as the database stores it:
    /// on PostgreSQL a table that was created without quotes has a name in lower case.
    ///
    /// # Errors
    /// [`Error::InvalidIdentifier`].
    ///
    /// ```no_run
    /// # fn f(pool: sqlx::SqlitePool) -> Result<(), lockkit::Error> {
    /// let store = lockkit::store::ShedLockTable::new(pool).table("app.shedlock")?;
    /// # Ok(()) }
    /// ```
    pub fn table(self, name: &str) -> Result<Self> {
        Ok(Self { pool: self.pool, table: TableName::new(name)?, step_us: Arc::default() })
    }

    /// The table, with the precision of its times. Asks the database the first time.
    async fn place(&self, conn: &mut DB::Connection) -> sqlx::Result<Place<'_>> {
        let place = |step_us| Place { table: &self.table, step_us };
        if let Some(step_us) = self.step_us.get() {
            return Ok(place(*step_us));
        }
        match DB::shedlock_columns(conn, place(1)).await? {
            Columns::Fit { step_us } => Ok(place(*self.step_us.get_or_init(|| step_us))),
            // The statement reports what is missing.
            Columns::Missing => Ok(place(1)),
            Columns::Unfit { hint, found } => Err(sqlx::Error::Configuration(Box::new(Unfit { hint, found }))),
        }
    }

    /// The row of a held lock, and its meaning.
    async fn record(&self, key: &Key) -> Result<Option<(Row, LeaseRecord)>> {
        check_key(key)?;
        let row = on_living_connection!(
            self.pool,
            call(&self.pool, Reach::LEASE, "looking at ShedLock's lock", Some(key), async |conn, _| {
                let place = self.place(conn).await?;
                DB::shedlock_look(conn, place, key).await
            })
        );
        Ok(understood(row)?.map(|row| (row.clone(), row.record())))
    }
}

/// A key that fits into ShedLock's column.
fn check_key(key: &Key) -> Result<()> {
    if key.chars().count() <= NAME_CHARS {
        return Ok(());
    }
    let reason = "ShedLock's table has names of 64 characters at most; use a shorter name, or a hash of the long part";
    Err(Error::InvalidKey { key: key.escape_debug().take(300).collect(), reason })
}

/// Replaces the errors that lockkit's own tables would have by those of this table.
fn understood<T>(result: Result<T>) -> Result<T> {
    result.map_err(|err| {
        if let Some(sqlx::Error::Configuration(source)) = err.as_sqlx()
            && let Some(unfit) = source.downcast_ref::<Unfit>()
        {
            return Error::NotMigrated { hint: unfit.hint, source: unfit.clone().into() };
        }
        match err {
            Error::NotMigrated { source, .. } => Error::NotMigrated {
                hint: "ShedLock's table is not there, or lacks a column; its definition is in the documentation of \
                       `ShedLockTable`, and `ShedLockTable::table` sets another name",
                source,
            },
            err => err,
        }
    })
}

impl<DB: ShedLockOps> LeaseStore for ShedLockTable<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        check_key(&claim.key)?;
        let answer = on_living_connection!(
            self.pool,
            write(
                &self.pool,
                Reach::lease(claim.ttl),
                "acquiring ShedLock's lock",
                Some(&claim.key),
                async |conn, grammar, tries| {
                    let place = self.place(conn).await?;
                    tried!(tries, DB::shedlock_acquire(conn, grammar, place, claim))
                }
            ),
            final: |it: &_| matches!(it, Acquired::Granted(_))
        );
        unless_held::<DB, _>(understood(answer), &claim.key, Acquired::Held { free_in: None })
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        Ok(self.record(key).await?.map(|(_, record)| record))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let Some(first) = renewals.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self.pool,
            write(
                &self.pool,
                Reach::renewal(first.ttl),
                "renewing ShedLock's locks",
                Some(&first.key),
                async |conn, grammar, tries| {
                    let place = self.place(conn).await?;
                    tried!(tries, DB::shedlock_renew(conn, grammar, place, renewals))
                }
            ),
            // The one before may have rows locked.
            final: |it: &Vec<_>| it.iter().all(|it| *it == Answer::Done)
        );
        unless_locked(understood(answer), vec![Answer::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        check_key(key)?;
        let release = Release::new(key, token, min_hold);
        let answer = on_living_connection!(
            self.pool,
            write(&self.pool, Reach::RELEASE, "releasing ShedLock's lock", Some(key), async |conn, grammar, tries| {
                let place = self.place(conn).await?;
                tried!(tries, DB::shedlock_release(conn, grammar, place, &release))
            })
        );
        let answer = unless_locked(understood(answer), Answer::Busy)?;
        if answer != Answer::Gone {
            return Ok(answer);
        }
        // A lock of Java has no token of its own in the table.
        let Some((row, record)) = self.record(key).await? else { return Ok(Answer::Gone) };
        if row.token().is_some() || record.token != token {
            return Ok(Answer::Gone);
        }
        let freed = on_living_connection!(
            self.pool,
            write(
                &self.pool,
                Reach::RELEASE,
                "taking ShedLock's lock away",
                Some(key),
                async |conn, grammar, tries| {
                    let place = self.place(conn).await?;
                    tried!(tries, DB::shedlock_take_away(conn, grammar, place, &row))
                }
            )
        );
        // If nothing was changed, Java has the row locked or has changed it: the next question tells.
        let freed = unless_locked(understood(freed), false)?;
        Ok(if freed { Answer::Done } else { Answer::Busy })
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let rows = on_living_connection!(
            self.pool,
            call(&self.pool, Reach::LEASE, "listing ShedLock's locks", None, async |conn, _| {
                let place = self.place(conn).await?;
                DB::shedlock_list(conn, place, prefix, limit).await
            })
        );
        Ok(understood(rows)?.iter().map(Row::record).collect())
    }

    /// Deletes nothing: the rows belong to Java too.
    async fn lease_sweep(&self, _retention: Duration, _limit: u32) -> Result<u64> {
        Ok(0)
    }

    /// Completes when a look finds the lock free. Java sends no notice of a release, so a waiter whose pauses are
    /// longer than those of the programs that poll would hardly ever find it free.
    async fn lease_freed(&self, key: &Key) {
        let (mut pause, longest) = LOOKS;
        let (mut holder, mut since) = (None, Instant::now());
        loop {
            sleep(pause).await;
            pause = match self.lease_look(key).await {
                Ok(None) => return,
                Ok(Some(held)) => {
                    // Each holder is looked at anew: a waiter that counted its own wait would be outrun the longer it
                    // waits.
                    if holder.replace(held.info.fence) != Some(held.info.fence) {
                        since = Instant::now();
                    }
                    // Java may have written a time of another zone, or of a clock that is ahead.
                    (held.info.held_for.max(since.elapsed()) / LOOKS_PER_HOLD).clamp(LOOKS.0, longest)
                }
                // The request itself reports it.
                Err(_) => longest,
            };
        }
    }

    async fn unanswered(&self) -> Option<Error> {
        leases_starved(&self.pool).await
    }

    fn profile(&self) -> Profile {
        Profile {
            sweeps: false,
            side_leases: false,
            counts_renewals: false,
            longest_key: NAME_CHARS,
            fence_domain: "shedlock",
            always_answers: !DB::IS_REMOTE,
            ..Profile::default()
        }
    }
}

impl<DB: Database> Clone for ShedLockTable<DB> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), table: self.table.clone(), step_us: self.step_us.clone() }
    }
}

impl<DB: Database> fmt::Debug for ShedLockTable<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShedLockTable").field("table", &self.table.to_string()).finish_non_exhaustive()
    }
}

/// Columns that would be misread.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{found}")]
struct Unfit {
    hint: &'static str,
    found: String,
}
