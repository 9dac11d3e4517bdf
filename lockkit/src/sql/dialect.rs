//! A database that lockkit supports: its faults, its transactions, its schema, and its connection types.

use std::{
    fmt::Debug,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
    time::Duration,
};

use sqlx::{Database, Pool, Transaction, pool::PoolConnection};
#[cfg(any(feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled"))]
use sqlx::{Executor, SqlSafeStr};
use sqlx_core::transaction::TransactionManager;
use tokio::time::timeout;

use crate::{
    body::task::is_answered,
    policy::Wait,
    sql::failed,
    value::{
        error::{Error, Fault},
        key::Key,
    },
};

pub(crate) mod sealed {
    /// A type for which lockkit implements its traits.
    pub trait Sealed {}
}

/// A database that supports lockkit's locks, or the locks of `Ops`.
///
/// For error messages only. `Itself` has no type for an unsupported database, so rustc reports one error instead of
/// one for each step.
pub trait Known<Ops = ()>: Database {
    /// The same database.
    type Itself: Database;
}

/// Marker for the databases with session locks.
#[derive(Debug)]
pub enum Sessions {}

/// A database that lockkit supports: its faults, its transactions and its schema.
#[diagnostic::on_unimplemented(
    message = "lockkit does not know the database `{Self}`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::Dialect`, or that of the lock, such as `DB: \
            lockkit::dialect::RowOps`"
)]
pub trait Dialect:
    Database<Arguments: Clone + Debug + Sync, ArgumentBuffer: Default, Connection: AsConnection<Self>>
    + Known<Itself = Self>
    + Driver
    + sealed::Sealed
{
}

/// The operations that lockkit needs of every database. Hidden from users.
pub trait Driver: Database {
    /// What the statements on a connection of a pool must know of its server. `()` where all servers read the same
    /// texts.
    type Grammar: Copy + Send + Sync;

    /// What `begin` and `commit_counted` have learned of a session, or changed in it, for the next ones on the same
    /// connection.
    type Session: Copy + Default + Send;

    /// lockkit's migrations: number, name, statements.
    const MIGRATIONS: &'static [(i64, &'static str, &'static str)];

    /// Whether the database is behind a network, so that an answer may never arrive.
    const IS_REMOTE: bool = true;

    /// Whether an open transaction of `begin` blocks all other writers, because the database has one write lock.
    const ONE_WRITER: bool = false;

    /// Whether `commit` fails when the database has already ended the transaction, or sqlx has rolled it back.
    const COMMIT_CHECKS: bool = false;

    /// Whether `check_begun` comes after the last statement before COMMIT, because a statement that fails to report the
    /// end of its transaction runs in another one. Nothing that runs there is committed.
    const CHECKED_LAST: bool = false;

    /// Whether a transaction that has failed refuses every statement until its end. After a statement that succeeded,
    /// sqlx's own COMMIT is enough, which costs less than `commit`.
    const FAILED_REFUSES: bool = false;

    /// Whether a connection can be used after the future of one of its statements was dropped: whether the driver then
    /// skips the rest of the answer.
    const KEEPS_STEP: bool = true;

    /// What a driver's error means. Decided by code; text is never matched.
    fn fault(err: &sqlx::Error) -> Fault;

    /// How long the connection waits for the lock of the whole database. Zero where there is no such lock.
    fn busy_timeout(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<Duration>> + Send;

    /// Sets how long the connection waits for the lock of the whole database.
    fn set_busy_timeout(conn: &mut Self::Connection, wait: Duration) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// As `set_busy_timeout`, without waiting for the answer. Has no effect if the driver has no room for the request.
    fn set_busy_timeout_unanswered(conn: &mut Self::Connection, wait: Duration) -> impl Future<Output = ()> + Send;

    /// Probes the database before the first statement on a connection of this pool, and warns of what it is not suited
    /// for. Sends nothing once the database is known.
    fn greet(
        conn: &mut Self::Connection,
        pool: &Pool<Self>,
    ) -> impl Future<Output = sqlx::Result<Self::Grammar>> + Send;

    /// Probes, before the first transaction of this pool, whether the server only pretends to have the locks of which
    /// named locks are made.
    fn probe_named_locks(conn: &mut Self::Connection, pool: &Pool<Self>) -> impl Future<Output = ()> + Send;

    /// Whether what one connection of this pool has committed is known to be seen by all others at once. Not where they
    /// may be connected to different nodes of a cluster.
    fn shows_writes_at_once(pool: &Pool<Self>) -> bool;

    /// Begins a READ COMMITTED transaction on a connection of this pool. On SQLite it takes the write lock.
    fn begin(
        conn: &mut Self::Connection,
        pool: &Pool<Self>,
        session: &mut Self::Session,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Fails when the database has already ended the transaction of `begin`, unless it refuses every further statement
    /// then.
    fn check_begun(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// After `check_begun` has failed: whether the database is known to have rolled the transaction of `begin` back, so
    /// that nothing of it was committed. `false` if a statement of the application may have committed it.
    fn was_undone(conn: &mut Self::Connection) -> impl Future<Output = bool> + Send;

    /// Commits the transaction of `begin`, which `check_begun` found open unless `COMMIT_CHECKS`.
    fn commit(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// As `commit`, and may leave sqlx's count at one: its correction costs another statement, which the next `begin`
    /// in this session does not need.
    fn commit_counted(
        conn: &mut Self::Connection,
        session: &mut Self::Session,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back the innermost transaction that sqlx counts.
    fn roll_back(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Whether `restore_ended` must run before the connection returns to its pool.
    fn must_restore(session: &Self::Session) -> bool;

    /// Restores what `begin` and `commit_counted` have changed in the session. Its transaction was committed or rolled
    /// back by the last statement.
    fn restore_ended(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Restores the settings of the session that `begin` changed, and rolls back statements that ran after the
    /// transaction ended.
    fn restore_session(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Fails when sqlx counts an open transaction of the application and the database has already ended it.
    fn check_open(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Depth of the transactions that sqlx began on the connection: zero outside of any. Where sqlx's count is wrong
    /// until a dropped transaction is rolled back, this waits for the rollback.
    fn depth(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<usize>> + Send;

    /// Asks the server whether no transaction is open; does not trust sqlx's count.
    fn is_idle(conn: &mut Self::Connection) -> impl Future<Output = bool> + Send;

    /// Whether the user lacks a privilege. Decided by code.
    fn is_denied(err: &sqlx::Error) -> bool;

    /// Whether the server accepts no client, because it starts or ends. Decided by code.
    fn accepts_nobody(err: &sqlx::Error) -> bool;

    /// Applies lockkit's migrations.
    fn migrate(pool: &Pool<Self>) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A connection or transaction. Its type determines the database, so `RowLock::table("t").by("id", 7).lock(&mut tx)`
/// needs no type annotation.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a connection to a database that lockkit knows",
    label = "pass the transaction, `&mut tx`, or the connection inside it, `&mut *tx`"
)]
pub trait AsConnection<DB: Database>: Send + sealed::Sealed {
    /// The connection.
    fn as_connection(&mut self) -> &mut DB::Connection;

    /// Whether it is a [`Tx`](crate::Tx), which on SQLite has the write lock unless its transaction was ended behind
    /// its back.
    #[doc(hidden)]
    fn is_begun(&self) -> bool {
        false
    }

    /// The connection, for statements of lockkit, which call [`answered`](Self::answered) when all of them were. A
    /// [`Tx`](crate::Tx) notes a statement without an answer.
    #[doc(hidden)]
    fn for_query(&mut self) -> &mut DB::Connection {
        self.as_connection()
    }

    /// Every statement since [`for_query`](Self::for_query) was answered.
    #[doc(hidden)]
    fn answered(&mut self) {}

    /// The transaction has taken this lock.
    #[doc(hidden)]
    fn locked(&self, _kind: &'static str, _key: &Key) {}
}

/// Notes that the statements since [`for_query`](AsConnection::for_query) were answered, unless this result says that
/// they were not.
pub(crate) fn note_answer<DB, T>(conn: &mut impl AsConnection<DB>, result: Result<T, Error>) -> Result<T, Error>
where
    DB: Dialect,
{
    if result.as_ref().err().is_none_or(is_answered) {
        conn.answered();
    }
    result
}

/// Runs statements of lockkit on a connection that the application has had. Where the driver does not
/// [keep step](Driver::KEEPS_STEP), it waits for ever or panics here if the application has dropped the future of a
/// statement: the statements have no answer then.
pub(crate) async fn in_step<DB: Dialect, T>(
    doing: &'static str,
    key: Option<&Key>,
    statements: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    if DB::KEEPS_STEP {
        return statements.await;
    }
    let mut statements = pin!(statements);
    let lost_step = || Error::database(doing, key, Fault::Unavailable, LostStep);
    let answered = poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| statements.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(Err(lost_step())))
    });
    timeout(STEP_LIMIT, answered).await.unwrap_or_else(|_| Err(lost_step()))
}

/// Longest wait for an answer on a connection whose driver may have lost its step.
const STEP_LIMIT: Duration = Duration::from_secs(10);

/// Why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "no answer came, as when the future of a statement on this connection was dropped before its answer, after which \
     sqlx cannot use it: do not put `timeout` around a statement of a transaction that continues"
)]
struct LostStep;

impl<DB: Dialect> sealed::Sealed for Transaction<'_, DB> {}

impl<DB: Dialect> AsConnection<DB> for Transaction<'_, DB> {
    fn as_connection(&mut self) -> &mut DB::Connection {
        self
    }
}

impl<DB: Dialect> sealed::Sealed for PoolConnection<DB> {}

impl<DB: Dialect> AsConnection<DB> for PoolConnection<DB> {
    fn as_connection(&mut self) -> &mut DB::Connection {
        self
    }
}

/// Begins a transaction with this text, and counts it. `is_counted` says whether sqlx still counts one that has ended.
#[cfg(any(feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled"))]
pub(crate) async fn begin_counted<DB: Database>(
    conn: &mut DB::Connection,
    text: impl SqlSafeStr,
    is_counted: &mut bool,
) -> sqlx::Result<()>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    let text = text.into_sql_str();
    if std::mem::take(is_counted) {
        return conn.execute(text).await.map(drop);
    }
    DB::TransactionManager::begin(conn, Some(text)).await
}

/// Corrects sqlx's count of a transaction that has ended, by one that is empty. It begins with this text, because a
/// server would warn of a ROLLBACK outside of any.
#[cfg(any(feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled"))]
pub(crate) async fn uncount<DB: Database>(conn: &mut DB::Connection, text: impl SqlSafeStr) -> sqlx::Result<()>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    conn.execute(text.into_sql_str()).await?;
    DB::TransactionManager::start_rollback(conn);
    Ok(())
}

/// Depth of the transactions on the connection: zero outside of any.
pub(crate) async fn depth<DB: Dialect>(conn: &mut DB::Connection) -> Result<usize, Error> {
    DB::depth(conn).await.map_err(|err| failed::<DB>("counting the open transactions", None, err))
}

/// Fails outside of a transaction, with this reason. For a [`Tx`](crate::Tx) on SQLite call [`still_in_transaction`]
/// again after the next statement: a request that would tell now costs as much as that statement.
pub(crate) async fn in_transaction<DB: Dialect>(
    conn: &mut DB::Connection,
    is_begun: bool,
    option: &'static str,
    reason: &str,
) -> Result<(), Error> {
    if !is_begun {
        let _counted = depth::<DB>(conn).await?;
    }
    still_in_transaction::<DB>(conn, option, reason)
}

/// As [`in_transaction`], right after the connection has answered.
pub(crate) fn still_in_transaction<DB: Dialect>(
    conn: &DB::Connection,
    option: &'static str,
    reason: &str,
) -> Result<(), Error> {
    if counted_depth::<DB>(conn) == 0 {
        return Err(Error::InvalidOption { option, reason: reason.to_owned() });
    }
    Ok(())
}

/// As [`depth`], without waiting. On SQLite the count is reliable only right after the connection has answered a
/// statement.
pub(crate) fn counted_depth<DB: Database>(conn: &DB::Connection) -> usize {
    DB::TransactionManager::get_transaction_depth(conn)
}
