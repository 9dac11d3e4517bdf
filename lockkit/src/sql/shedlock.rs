//! ShedLock's table as a store of leases, so that its Java jobs and Rust services exclude each other.

use std::{
    fmt,
    future::Future,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use sqlx::{Database, Pool};

use crate::{
    error::{Error, Result},
    key::Key,
    lease::store::{
        Acquired, Answer, Claim, LeaseInfo, LeaseRecord, LeaseStore, Previous, Profile, Release, Renewal, Token,
    },
    sql::{
        Dialect,
        ident::TableName,
        pool::{PING_LIMIT, call, is_of_ended_runtime, on_living_connection, ping_limit, tried, unless_locked, write},
        starved,
        units::{duration, fence},
    },
};

/// The greatest number of characters in ShedLock's columns `name` and `locked_by`.
const NAME_CHARS: usize = 64;
const LOCKED_BY_CHARS: usize = 255;

/// The end of `locked_by` in a row that lockkit has released. Its lease is free, even before `lock_until`.
pub(crate) const RELEASED: &str = "#00000000000000000000000000000000";

/// The table of [ShedLock](https://github.com/lukas-krecan/ShedLock) as a store of leases: Java jobs that lock with ShedLock and Rust
/// services with lockkit exclude each other, by the same row and the database's clock.
///
/// The Java side uses a provider for SQL, such as `JdbcTemplateLockProvider`, with **`usingDbTime()`**. Without it, Java writes the
/// clock and the time zone of its own machine into the table, and before ShedLock 7.0.0 its unlock also frees the lock of others,
/// lockkit's too. Use the pool itself as the store (`Leases::new(pool)`) for leases that no Java program shares.
///
/// The key of a lease is ShedLock's name of the lock, 1 to 64 characters. The ttl is `lockAtMostFor`, `min_hold` is `lockAtLeastFor`.
/// ShedLock's columns have this content:
///
/// | column | content |
/// |---|---|
/// | `lock_until` | when the lease expires, or became free. In UTC, as the other time |
/// | `locked_at` | when it was acquired. In microseconds since 1970 it is the fence: a grant is always later than the one before |
/// | `locked_by` | the name of the holder, `#`, and 32 digits: the token of a lease, or zeros after its release |
///
/// lockkit never creates or alters this table, and never deletes its rows. On PostgreSQL ShedLock's own definition fits; on MySQL and
/// MariaDB name a binary collation, because with the usual one `Job` and `job` are the same lock (for Java too):
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
/// Columns that would be misread are refused with [`Error::NotMigrated`]: on PostgreSQL `timestamptz`, because Java then writes in the
/// time zone of its machine; on MySQL and MariaDB `TIMESTAMP` in a session with another time zone than the server's default, which
/// Java's sessions have (connect with [`timezone(None)`][zone], or use `DATETIME`); and times with fewer than three decimals.
///
/// What the table cannot do:
///
/// - Semaphores, readers and writers, and fair requests are refused. They would leave rows that nobody deletes and Java does not know.
///   Waiting requests poll and have no order, as in ShedLock.
/// - There is no column for the number of renewals, so [`LeaseInfo::renewals`] is 0, nor for the ttl. So a database clock that is set
///   back prolongs the leases of the moment by that step.
/// - Java does not know fences. If the clock is set back *and* Java has the lock in between, the next fence can be lower than an
///   earlier one. [`Lease::guard`](crate::Lease::guard) then refuses until the clock has caught up.
/// - `verify` and `commit` need lockkit's own table. Use [`Lease::guard`](crate::Lease::guard), in this or another database.
/// - [`Leases::steal`](crate::Leases::steal) takes a lock from Java too, which then still runs: Java asks only when it extends.
///
/// One round trip acquires a lease on PostgreSQL, two elsewhere. On PostgreSQL one statement renews all leases of the process; elsewhere
/// it is one for each.
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

    /// Another name of the table, such as `app.shedlock`. It is sent in quotes, so write it as the database stores it: on PostgreSQL a
    /// table that was created without quotes has a name in lower case.
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

    /// The rows of one key or with a prefix.
    async fn record(&self, key: &Key) -> Result<Option<(Row, LeaseRecord)>> {
        check_key(key)?;
        let row = on_living_connection!(
            self.pool,
            call(&self.pool, PING_LIMIT, "looking at ShedLock's lock", Some(key), async |conn| {
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
                ping_limit(claim.ttl),
                "acquiring ShedLock's lock",
                Some(&claim.key),
                async |conn, tries| {
                    let place = self.place(conn).await?;
                    tried!(tries, DB::shedlock_acquire(conn, place, claim))
                }
            )
        );
        unless_locked(understood(answer), Acquired::Held { free_in: None })
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
                ping_limit(first.ttl),
                "renewing ShedLock's locks",
                Some(&first.key),
                async |conn, tries| {
                    let place = self.place(conn).await?;
                    tried!(tries, DB::shedlock_renew(conn, place, renewals))
                }
            )
        );
        unless_locked(understood(answer), vec![Answer::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        check_key(key)?;
        let release = Release::new(key, token, min_hold);
        let answer = on_living_connection!(
            self.pool,
            write(&self.pool, PING_LIMIT, "releasing ShedLock's lock", Some(key), async |conn, tries| {
                let place = self.place(conn).await?;
                tried!(tries, DB::shedlock_release(conn, place, &release))
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
        let taken = on_living_connection!(
            self.pool,
            write(&self.pool, PING_LIMIT, "taking ShedLock's lock away", Some(key), async |conn, tries| {
                let place = self.place(conn).await?;
                tried!(tries, DB::shedlock_take_away(conn, place, &row))
            })
        );
        // If nothing was changed, Java has the row locked or has changed it: the next question tells.
        let taken = unless_locked(understood(taken), false)?;
        Ok(if taken { Answer::Done } else { Answer::Busy })
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let rows = on_living_connection!(
            self.pool,
            call(&self.pool, PING_LIMIT, "listing ShedLock's locks", None, async |conn| {
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

    async fn unanswered(&self) -> Option<Error> {
        starved(&self.pool).await
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

/// ShedLock's table.
#[diagnostic::on_unimplemented(
    message = "lockkit does not know ShedLock's table in the database `{Self}`",
    label = "`ShedLockTable` needs sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is `lockkit::dialect::ShedLockOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::ShedLockOps`"
)]
pub trait ShedLockOps: Dialect + ShedLockStatements {}

/// The statements on ShedLock's table. Hidden from the docs: users call [`ShedLockTable`].
pub trait ShedLockStatements: Database {
    /// Whether the columns of the times can be used.
    fn shedlock_columns(
        conn: &mut Self::Connection,
        place: Place<'_>,
    ) -> impl Future<Output = sqlx::Result<Columns>> + Send;

    /// See [`LeaseStore::lease_acquire`].
    fn shedlock_acquire(
        conn: &mut Self::Connection,
        place: Place<'_>,
        claim: &Claim,
    ) -> impl Future<Output = sqlx::Result<Acquired>> + Send;

    /// The row of a held lock.
    fn shedlock_look(
        conn: &mut Self::Connection,
        place: Place<'_>,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<Row>>> + Send;

    /// See [`LeaseStore::lease_renew`].
    fn shedlock_renew(
        conn: &mut Self::Connection,
        place: Place<'_>,
        renewals: &[Renewal],
    ) -> impl Future<Output = sqlx::Result<Vec<Answer>>> + Send;

    /// Releases a lease of lockkit. See [`LeaseStore::lease_release`].
    fn shedlock_release(
        conn: &mut Self::Connection,
        place: Place<'_>,
        release: &Release,
    ) -> impl Future<Output = sqlx::Result<Answer>> + Send;

    /// Frees the lock, if the row still has this holder and time of acquisition.
    fn shedlock_take_away(
        conn: &mut Self::Connection,
        place: Place<'_>,
        row: &Row,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The rows of the held locks with this prefix, in the order of their names.
    fn shedlock_list(
        conn: &mut Self::Connection,
        place: Place<'_>,
        prefix: &str,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<Vec<Row>>> + Send;
}

/// A table, and the step in microseconds between two times that its columns can tell apart.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub(crate) table: &'a TableName,
    #[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code))]
    pub(crate) step_us: i64,
}

/// Whether the columns of the times can be used.
#[derive(Debug)]
pub enum Columns {
    /// They can.
    Fit {
        /// The step of their times.
        step_us: i64,
    },
    /// There is no such table, or no such column in it.
    Missing,
    /// They would be misread.
    Unfit {
        /// What to change.
        hint: &'static str,
        /// What was found.
        found: String,
    },
}

impl Columns {
    /// The columns with so many decimals of a second.
    #[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code))]
    pub(crate) fn with_decimals(decimals: u32) -> Self {
        if decimals < 3 {
            let hint = "the times in ShedLock's table need milliseconds: give `lock_until` and `locked_at` three decimals or more";
            return Self::Unfit { hint, found: format!("its times have {decimals} decimals of a second") };
        }
        Self::Fit { step_us: 10_i64.pow(6_u32.saturating_sub(decimals)) }
    }
}

/// Columns that would be misread.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{found}")]
struct Unfit {
    hint: &'static str,
    found: String,
}

/// One row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    pub(crate) name: String,
    pub(crate) locked_by: String,
    pub(crate) locked_at_us: i64,
    pub(crate) lock_until_us: i64,
    pub(crate) now_us: i64,
}

impl Row {
    /// The token in `locked_by`. `None` for a lock of Java.
    pub(crate) fn token(&self) -> Option<Token> {
        self.parts().1
    }

    /// The name of the holder, and its token.
    fn parts(&self) -> (&str, Option<Token>) {
        let text = &*self.locked_by;
        let parts = text.len().checked_sub(RELEASED.len()).and_then(|at| text.split_at_checked(at));
        let token = parts.and_then(|(_, tag)| token_of(tag));
        match (parts, token) {
            (Some((holder, _)), Some(token)) => (holder, Some(token)),
            _ => (text, None),
        }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.locked_by.ends_with(RELEASED)
    }

    /// How long the lock is held, if the claim with this token cannot have it.
    #[cfg_attr(not(any(feature = "mysql", feature = "sqlite", feature = "sqlite-unbundled")), allow(dead_code))]
    pub(crate) fn in_the_way_of(&self, token: Token) -> Option<Duration> {
        let is_free = self.lock_until_us <= self.now_us || self.is_released() || self.token() == Some(token);
        (!is_free).then(|| self.left())
    }

    pub(crate) fn left(&self) -> Duration {
        duration(self.lock_until_us - self.now_us)
    }

    /// The holder before the claim with this token. `None` if the lock was released, or was Java's: its rows do not tell.
    pub(crate) fn previous(&self, by: Token) -> Option<Previous> {
        let (holder, token) = self.parts();
        token.filter(|it| !it.is_nobody() && *it != by)?;
        Some(Previous::new(holder, fence(self.locked_at_us), duration(self.now_us - self.lock_until_us)))
    }

    fn record(&self) -> LeaseRecord {
        let (holder, token) = self.parts();
        let info = LeaseInfo {
            key: Key::from(&*self.name),
            holder: holder.to_owned(),
            fence: fence(self.locked_at_us),
            acquired_at: SystemTime::UNIX_EPOCH + duration(self.locked_at_us),
            held_for: duration(self.now_us - self.locked_at_us),
            expires_in: self.left(),
            renewals: 0,
            ttl: None,
            is_this_process: false,
        };
        LeaseRecord::new(token.unwrap_or_else(|| self.token_of_java()), info)
    }

    /// Stands for a lock of Java: when it was taken, and a hash (FNV-1a) of who did.
    fn token_of_java(&self) -> Token {
        let mut bytes = [0; 16];
        let (when, who) = bytes.split_at_mut(8);
        // Zeros would mean that nobody holds it.
        when.copy_from_slice(&self.locked_at_us.max(1).to_be_bytes());
        let hash = self
            .locked_by
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        who.copy_from_slice(&hash.to_be_bytes());
        Token::from_bytes(bytes)
    }
}

/// The end of `locked_by` for this token.
pub(crate) fn tag(token: Token) -> String {
    token.as_bytes().iter().fold("#".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

fn token_of(tag: &str) -> Option<Token> {
    let digits = tag.strip_prefix('#')?.as_bytes();
    let mut bytes = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = pair.iter().try_fold(0, |byte, digit| {
            let value = char::from(*digit).to_digit(16).filter(|_| !digit.is_ascii_uppercase())?;
            Some(byte << 4 | u8::try_from(value).ok()?)
        })?;
    }
    Some(Token::from_bytes(bytes))
}

/// `locked_by` for this holder with this end, shortened to fit.
pub(crate) fn locked_by(holder: &str, tag: &str) -> String {
    let holder: String = holder.chars().take(LOCKED_BY_CHARS - RELEASED.len()).collect();
    holder + tag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(locked_by: String) -> Row {
        Row { name: "job".into(), locked_by, locked_at_us: 7, lock_until_us: 9, now_us: 8 }
    }

    #[test]
    fn a_token_is_found_at_the_end_of_locked_by_and_nowhere_else() {
        let token = Token::random();
        for holder in ["", "host", "a#b", "é", &"ß".repeat(300)] {
            let row = row(locked_by(holder, &tag(token)));
            assert!(row.locked_by.chars().count() <= LOCKED_BY_CHARS);
            assert_eq!(row.parts(), (&*holder.chars().take(222).collect::<String>(), Some(token)));
        }
        let digits = &tag(token)[1..];
        for java in ["", "host", digits, &format!("host#{}", &digits[1..]), &format!("#{}", "é".repeat(16)), "#"] {
            assert_eq!(row(java.to_owned()).parts(), (java, None));
        }
        assert_eq!(row(format!("host#{}", "A".repeat(32))).parts().1, None);
    }

    #[test]
    fn a_lock_of_java_has_a_token_that_changes_with_who_and_when() {
        let one = row("host".into());
        let other = Row { locked_at_us: 8, ..one.clone() };
        assert_eq!(one.record().token, one.record().token);
        assert_ne!(one.record().token, other.record().token);
        assert_ne!(one.record().token, row("other".into()).record().token);
        assert!(!Row { locked_at_us: 0, ..one }.record().token.is_nobody());
    }

    #[test]
    fn a_released_lock_is_nobodys() {
        let row = row(locked_by("host", RELEASED));
        assert!(row.is_released() && row.token().is_some_and(|it| it.is_nobody()));
        assert!(row.previous(Token::random()).is_none() && row.in_the_way_of(Token::random()).is_none());
    }
}
