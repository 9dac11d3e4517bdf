//! Named locks: a name locked for a transaction, for data that has no row to lock yet.

use std::{future::Future, time::Duration};

use sqlx::Database;
use tokio::time::Instant;

use crate::{
    body::task::{no_answer, until},
    observe::{Strategy, observed},
    policy::Wait,
    sql::{
        AsConnection, Dialect,
        conn::{Finish, On},
        failed, failed_on_own_table, holder, in_transaction, note_answer, still_in_transaction,
    },
    value::{
        error::{Error, Fault, Result},
        holder::LockHolder,
        key::Key,
    },
};

const OUTSIDE: &str = "needs a transaction: outside of one the name would be unlocked at once";

/// Time beyond the bound before the connection counts as broken. MySQL checks bounds once a second.
const BACKSTOP: Duration = Duration::from_secs(2);

/// When a statement that is sent now, and waits so long, counts as lost.
pub(super) fn backstop(wait: Wait) -> Option<Instant> {
    wait.millis().map(|it| Instant::now() + Duration::from_millis(it) + BACKSTOP)
}

/// Locks a name for the rest of a transaction.
///
/// Use it where there is no row to lock yet, as in "at most three orders per user": lock the user's name, count,
/// insert, commit. For at most one row a `UNIQUE` constraint is enough. For rows that exist use
/// [`RowLock`](crate::RowLock); for work that outlives a transaction, a [lease](crate::Leases).
///
/// | database | what is locked |
/// |---|---|
/// | PostgreSQL | an advisory lock on 64 bits of SHA-256 of the key, which two of a million names share with probability 3 in 10^8. No table |
/// | MySQL, MariaDB | a row of `lockkit_named` with the whole name. Rows are kept, so the table grows with the number of different names |
/// | SQLite | the write lock of the database: all names are one lock |
///
/// One round trip. On MySQL and MariaDB a wait of less than a second takes two when the name is new, and longer waits
/// are counted in whole seconds. When two transactions use a new name for the first time in the same instant and wait
/// for less than a second, MySQL refuses the loser up to two seconds late and its connection is closed.
///
/// Lock first, then read, in a transaction from [`begin`](crate::begin). That transaction is READ COMMITTED, so reads
/// after the lock see the commits of the previous holder. A REPEATABLE READ transaction that has already read would not
/// see them.
///
/// # Example
/// ```
/// use lockkit::NamedLock;
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// # sqlx::query("CREATE TABLE orders (user_id INTEGER)").execute(&pool).await?;
/// let user_id = 42;
/// let mut tx = lockkit::begin(&pool).await?;
/// NamedLock::new(format!("order:{user_id}")).wait(Duration::from_secs(2)).lock(&mut tx).await?;
/// let ordered: i64 =
///     sqlx::query_scalar("SELECT count(*) FROM orders WHERE user_id = ?").bind(user_id).fetch_one(&mut *tx).await?;
/// if ordered < 3 {
///     sqlx::query("INSERT INTO orders VALUES (?)").bind(user_id).execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a named lock does nothing until `lock` is awaited"]
pub struct NamedLock {
    of: Names,
    key: Key,
    sharing: Sharing,
    wait: Option<Wait>,
}

impl NamedLock {
    /// Creates a lock with this name.
    pub fn new(key: impl Into<Key>) -> Self {
        Self { of: Names::Locks, key: key.into(), sharing: Sharing::Alone, wait: None }
    }

    /// The lock of the answer with this key.
    #[cfg(feature = "idempotent")]
    pub(super) fn of_answer(key: Key, wait: Wait) -> Self {
        Self { of: Names::Answers { have_begun: false }, key, sharing: Sharing::Alone, wait: Some(wait) }
    }

    /// Takes the lock shared, as readers do. It excludes exclusive holders only, so no reader sees a half-finished
    /// write.
    ///
    /// | database | shared by several transactions |
    /// |---|---|
    /// | PostgreSQL | yes |
    /// | MySQL, MariaDB | yes, except with the transaction that uses the name for the first time ever, which inserts its row |
    /// | SQLite | no: every named lock holds the exclusive write lock of the database |
    ///
    /// A transaction that shares the lock and then requests it exclusively waits for the other sharers. Two
    /// transactions that do so deadlock, and the database ends one of them.
    ///
    /// ```
    /// # use lockkit::NamedLock;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # lockkit::migrate(&pool).await?;
    /// let mut tx = lockkit::begin(&pool).await?;
    /// NamedLock::new("prices").share().lock(&mut tx).await?; // writers lock the name without `share`
    /// # Ok(()) }
    /// ```
    pub fn share(mut self) -> Self {
        self.sharing = Sharing::Shared;
        self
    }

    /// Longest wait for another holder. Defaults to [`Wait::DEFAULT`], 10 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = Some(wait.into());
        self
    }

    /// This lock, with its wait limited to the time left until a deadline.
    pub(crate) fn until(mut self, deadline: Option<Instant>) -> Self {
        self.wait = Some(Wait::within(self.wait, deadline.map(|it| it.saturating_duration_since(Instant::now()))));
        self
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn bound(&self) -> Option<Wait> {
        self.wait
    }

    /// Takes the lock until the transaction ends. Taking it again in the same transaction succeeds at once.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait; [`Error::InvalidKey`]; [`Error::InvalidOption`], also outside a
    /// transaction; [`Error::NotMigrated`] on MySQL, MariaDB and SQLite; [`Error::FeignedLock`] on a server behind
    /// PostgreSQL's protocol that has no advisory locks; [`Error::Database`], also on a standby of PostgreSQL. Roll the
    /// transaction back after an error.
    ///
    /// [`Error::Contended`] names the holder where it is known. On PostgreSQL that is for [`Wait::Never`] and under
    /// `#[with_lock]`: after a wait that timed out, the transaction answers no further statement. For the other
    /// databases see [`holder`](Self::holder).
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the name; roll it back.
    pub async fn lock<DB: NamedOps>(self, conn: &mut impl AsConnection<DB>) -> Result<()> {
        self.locked(conn).await.map(drop)
    }

    /// As [`lock`](Self::lock). Returns how the lock was granted.
    pub(super) async fn locked<DB: NamedOps>(self, conn: &mut impl AsConnection<DB>) -> Result<Granted> {
        let is_begun = conn.is_begun();
        let wait = self.wait.unwrap_or_default();
        self.key.check()?;
        wait.check()?;
        let inside = in_transaction::<DB>(conn.for_query(), is_begun, self.of.kind(), OUTSIDE).await;
        note_answer(conn, inside)?;
        // It has the lock already that stands for all names.
        let wait = if is_begun && DB::ONE_WRITER { Wait::Unbounded } else { wait };
        let started = Instant::now();
        let waited = || started.elapsed();
        // The server enforces the bound. The backstop is for the one statement that MySQL cannot bound.
        let backstop = backstop(wait);
        let taking = async {
            let inside = conn.for_query();
            let Some(taken) = until(backstop, DB::named_lock(inside, self.of, &self.key, self.sharing, wait)).await
            else {
                // The statement has not been answered.
                return Err(if DB::named_ends(self.of, self.sharing, wait) {
                    no_answer(self.of.taking(), Some(&self.key))
                } else {
                    Error::Contended { key: self.key.clone(), waited: waited(), holder: None }
                });
            };
            let taken = match taken {
                Ok(Some(granted)) => check_held::<DB>(inside, self.of, &self.key).await.map(|()| Some(granted)),
                Err(err) if DB::fault(&err) != Fault::Contended => {
                    Err(failed_on_own_table::<DB>(self.of.taking(), Some(&self.key), err))
                }
                _ => Ok(None),
            };
            if let Some(granted) = note_answer(conn, taken)? {
                return Ok(granted);
            }
            let waited = waited();
            let holder = holder::seen(conn, async |conn| DB::named_holder(conn, self.of, &self.key).await).await;
            Err(Error::Contended { key: self.key.clone(), waited, holder })
        };
        let granted = observed(self.of.strategy(), &self.key, taking).await?;
        conn.locked(self.of.kind(), &self.key);
        Ok(granted)
    }

    /// [`lock`](Self::lock) as a text for a client that is not sqlx (`SeaORM`, Diesel, psql). It takes the lock in that
    /// client's transaction, and excludes `lock` of the same key in others. It fails if another transaction keeps the
    /// lock for longer than the wait.
    ///
    /// Send it first in a transaction; outside of one it locks nothing. Send it as plain text in one message, by
    /// `execute_unprepared` of `SeaORM` or `batch_execute` of Diesel: on MySQL and MariaDB it has three statements,
    /// which set, use and restore a bound. Its values are literals: numbers and hexadecimal digits.
    ///
    /// | database | waits at most | fails after the wait | fails in a deadlock |
    /// |---|---|---|---|
    /// | PostgreSQL | the [wait](Self::wait), at least 1 ms | SQLSTATE 55P03 | 40P01 |
    /// | MySQL, MariaDB | the wait in whole seconds, at least 1 s unless it is [`Wait::Never`] | 1205; on MySQL 3572 for [`Wait::Never`] | 1213 |
    /// | SQLite | the connection's busy timeout, whatever the wait is | `SQLITE_BUSY` (5) | `SQLITE_BUSY`, at once |
    ///
    /// What `lock` does, and this text leaves to the caller:
    /// - Roll the transaction back after an error; a new one may succeed. In a deadlock, MySQL and MariaDB have rolled
    ///   it back already: they would commit the next statement by itself.
    /// - When two transactions use a new name for the first time in the same instant, [`Wait::Never`] waits on MySQL as
    ///   [`Wait::Unbounded`] does.
    /// - After an error on MySQL, `innodb_lock_wait_timeout` stays at the wait in this session. The next text restores
    ///   it, and so does `SET innodb_lock_wait_timeout = DEFAULT, @lockkit_wait = NULL`.
    /// - [`Wait::Unbounded`] leaves the bound to the session: `lock_timeout`, `innodb_lock_wait_timeout`.
    /// - Use READ COMMITTED on PostgreSQL: in REPEATABLE READ, a transaction that has waited reads what was committed
    ///   before its wait. On SQLite, `SQLITE_BUSY` comes without a wait once the transaction has read.
    /// - [`share`](Self::share) has an effect on PostgreSQL alone. Elsewhere the text takes the lock exclusively.
    /// - A server that only pretends to lock is not detected, nor a task that waits for its own lock.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidOption`].
    ///
    /// # Example
    /// ```
    /// # fn main() -> Result<(), lockkit::Error> {
    /// let lock = lockkit::NamedLock::new("order:42").wait(std::time::Duration::from_secs(2));
    /// let sql: String = lock.sql::<sqlx::Sqlite>()?;
    /// assert_eq!(sql, "DELETE FROM lockkit_lease WHERE 0"); // takes the write lock, and changes nothing
    /// # Ok(()) }
    /// ```
    pub fn sql<DB: NamedOps>(&self) -> Result<String> {
        let wait = self.wait.unwrap_or_default();
        self.key.check()?;
        wait.check()?;
        Ok(DB::named_text(self.of, &self.key, self.sharing, wait))
    }

    /// The session that holds the lock now, or one of the sessions that share it. `None` when the server reports no
    /// holder. For operators: the lock may be released before the answer arrives.
    ///
    /// | database | holders that are visible |
    /// |---|---|
    /// | PostgreSQL | all |
    /// | MySQL | all; of a name locked for the first time ever, once another waits. Needs PROCESS, and SELECT on `performance_schema.data_locks` |
    /// | MariaDB | only a holder with a waiter, from data up to 0.1 s old. Needs the privilege PROCESS |
    /// | SQLite | none |
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; [`Error::PoolStarved`]; [`Error::Database`], also where a privilege is missing.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// if let Some(holder) = lockkit::NamedLock::new("order:42").holder(&pool).await? {
    ///     println!("{holder}; it ends with SELECT pg_terminate_backend({})", holder.id);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn holder<DB: NamedOps>(&self, on: impl On<DB>) -> Result<Option<LockHolder>> {
        let doing = "looking for the holder of named lock";
        self.key.check()?;
        let mut conn = on.reach(doing).await?;
        let holder = DB::named_holder(&mut conn, self.of, &self.key).await;
        conn.finish();
        holder.map_err(|err| failed::<DB>(doing, Some(&self.key), err))
    }
}

/// Fails if the lock that the server has just granted excludes no other session.
async fn check_held<DB: NamedOps>(conn: &mut DB::Connection, of: Names, key: &Key) -> Result<()> {
    let feigned = DB::named_feigned(conn, of, key).await;
    match feigned.map_err(|err| failed::<DB>("looking for named lock", Some(key), err))? {
        Some(server) => Err(Error::FeignedLock { lock: of.kind(), key: key.clone(), server }),
        None => still_in_transaction::<DB>(conn, of.kind(), OUTSIDE),
    }
}

/// Named locks for a transaction.
#[diagnostic::on_unimplemented(
    message = "lockkit has no named locks in the database `{Self}`",
    label = "named locks need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::NamedOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::NamedOps`"
)]
pub trait NamedOps: Dialect + NamedStatements {}

/// The statements of named locks. Hidden from the docs: users call the strategy.
pub trait NamedStatements: Database {
    /// Takes the lock for the rest of the transaction. `None` when another session holds it and `wait` is
    /// [`Wait::Never`].
    fn named_lock(
        conn: &mut Self::Connection,
        of: Names,
        key: &Key,
        sharing: Sharing,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<Option<Granted>>> + Send;

    /// Whether the server itself ends this wait in time, so that no answer means a server that is silent.
    fn named_ends(of: Names, sharing: Sharing, wait: Wait) -> bool;

    /// The same as a text with literals, which fails where the lock is not granted within the wait.
    fn named_text(of: Names, key: &Key, sharing: Sharing, wait: Wait) -> String;

    /// What the server calls itself, if it only pretends to hold the lock that it has just granted to this transaction.
    /// Asks nothing once the server is known to lock.
    fn named_feigned(
        conn: &mut Self::Connection,
        of: Names,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<String>>> + Send;

    /// The session that holds the lock, preferably one other than this. `None` too where the server does not report
    /// it.
    fn named_holder(
        conn: &mut Self::Connection,
        of: Names,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;
}

/// How a named lock was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granted {
    /// The name may have had a holder before.
    Known,
    /// The name had no row, and this transaction has inserted it.
    New,
}

/// Whose names they are: two locks of one name in different sets are two locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Of [`NamedLock`]s.
    Locks,
    /// Of stored answers. The row of work outside of the database that has begun is there.
    Answers { have_begun: bool },
}

impl Names {
    /// What such a lock is called.
    fn kind(self) -> &'static str {
        match self {
            Self::Locks => "named lock",
            Self::Answers { .. } => "the lock of the answer",
        }
    }

    fn taking(self) -> &'static str {
        match self {
            Self::Locks => "taking named lock",
            Self::Answers { .. } => "taking the lock of the answer",
        }
    }

    fn strategy(self) -> Strategy {
        match self {
            Self::Locks => Strategy::Named,
            Self::Answers { .. } => Strategy::Idempotent,
        }
    }
}

/// How a named or session lock is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Exclusive: with no other holder.
    Alone,
    /// Together with all other shared holders.
    Shared,
}
