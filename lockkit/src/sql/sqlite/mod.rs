//! SQLite 3.42 and later: the statements, and the meaning of extended result codes.
//!
//! SQLite has one lock for all writers of a database file. Every lock that lasts for a transaction is that lock here.
//! Names are quoted by backticks: SQLite treats a name in double quotes as a string if no such column exists.
//!
//! sqlx runs a connection on a worker thread, so each request costs two changes of threads, some 20 µs. Hence several
//! statements in one message, and short waits that are set without waiting for an answer: the worker runs requests in
//! order. A `Tx` says that it has the write lock, so a row or named lock through `&mut tx` is one request; `&mut *tx`
//! is any connection, where sqlx's count costs a request and the bound two.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, Connection, Executor, Pool, Sqlite, SqliteConnection,
    sqlite::{SqliteError, SqliteQueryResult, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use crate::{
    policy::Wait,
    sql::{
        AsConnection, Dialect, Driver, FenceGuardOps, Known, LeaseOps, NamedOps, RowOps, RowsAffected, StockOps,
        VersionOps, begin_counted, counted_depth, fault::connection_fault, uncount,
    },
    value::error::{Error, Fault},
};

/// The clock in microseconds, with a resolution of a millisecond. It is constant during a statement, and is read after
/// the wait for the write lock.
const NOW: &str = "CAST(unixepoch('subsec') * 1000000 AS INTEGER)";

mod fence_guard;
#[cfg(feature = "idempotent")]
mod idempotent;
mod lease;
mod migrate;
mod named;
mod row;
#[cfg(feature = "shedlock")]
mod shedlock;
mod stock;
mod version;

pub(super) fn fault_of(err: &SqliteError) -> Fault {
    // https://www.sqlite.org/rescode.html; the low byte of an extended code is the primary one
    let code = sqlx::error::DatabaseError::code(err).and_then(|it| it.parse::<i32>().ok()).unwrap_or(0);
    match (code, code & 0xff) {
        (517, _) => Fault::Serialization,
        (1555 | 2067, _) => Fault::Duplicate,
        (_, 5 | 6) => Fault::Contended,
        // The statement could not be prepared: its table or a column does not exist.
        (1, _) => Fault::NoTable,
        (_, 8) => Fault::ReadOnly,
        _ => Fault::Other,
    }
}

impl super::sealed::Sealed for Sqlite {}
impl super::sealed::Sealed for SqliteConnection {}

impl AsConnection<Sqlite> for SqliteConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Known for Sqlite {
    type Itself = Self;
}

impl Dialect for Sqlite {}
impl LeaseOps for Sqlite {}
impl RowOps for Sqlite {}
impl NamedOps for Sqlite {}
impl VersionOps for Sqlite {}
impl StockOps for Sqlite {}
impl FenceGuardOps for Sqlite {}
#[cfg(feature = "idempotent")]
impl crate::sql::IdempotentOps for Sqlite {}
#[cfg(feature = "shedlock")]
impl crate::sql::ShedLockOps for Sqlite {}

impl Driver for Sqlite {
    type Grammar = ();
    type Session = Session;

    const MIGRATIONS: &'static [(i64, &'static str, &'static str)] = &[
        (1, "lockkit", include_str!("../../../migrations/sqlite/0001_lockkit.sql")),
        (3, "stock", include_str!("../../../migrations/sqlite/0003_stock.sql")),
        (4, "ttl", include_str!("../../../migrations/sqlite/0004_ttl.sql")),
        (5, "fence", include_str!("../../../migrations/sqlite/0005_fence.sql")),
        (8, "answer", include_str!("../../../migrations/sqlite/0008_answer.sql")),
    ];
    const IS_REMOTE: bool = false;
    const ONE_WRITER: bool = true;
    const COMMIT_CHECKS: bool = true;

    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn busy_timeout(conn: &mut SqliteConnection) -> sqlx::Result<Duration> {
        let millis = busy_timeout(conn).await?;
        Ok(Duration::from_millis(u64::try_from(millis).unwrap_or(0)))
    }

    async fn set_busy_timeout(conn: &mut SqliteConnection, wait: Duration) -> sqlx::Result<()> {
        set_busy_timeout(conn, i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)).await
    }

    async fn set_busy_timeout_unanswered(conn: &mut SqliteConnection, wait: Duration) {
        // The first poll sends it. The worker thread of the connection runs requests in order, so the next statement
        // comes after it.
        let mut set = pin!(<Self as Driver>::set_busy_timeout(conn, wait));
        let _answer = poll_fn(|cx| Poll::Ready(set.as_mut().poll(cx))).await;
    }

    async fn greet(_conn: &mut SqliteConnection, _pool: &Pool<Self>) -> sqlx::Result<()> {
        Ok(())
    }

    async fn probe_named_locks(_conn: &mut SqliteConnection, _pool: &Pool<Self>) {
        // A named lock is the write lock.
    }

    fn shows_writes_at_once(_pool: &Pool<Self>) -> bool {
        true
    }

    async fn begin(
        conn: &mut SqliteConnection,
        _pool: &Pool<Self>,
        session: &mut Session,
        wait: Wait,
    ) -> sqlx::Result<()> {
        // IMMEDIATE, because a transaction that reads first and writes later fails at once if another one wrote in
        // between.
        let immediate = "BEGIN IMMEDIATE";
        let Some(millis) = wait.millis() else {
            return begin_counted::<Self>(conn, immediate, &mut session.is_counted).await;
        };
        let old = match session.busy_timeout {
            Some(known) => known,
            None => busy_timeout(conn).await?,
        };
        session.busy_timeout = Some(old);
        let statement = bounded(immediate, millis, old);
        let begun = begin_counted::<Self>(conn, AssertSqlSafe(statement), &mut session.is_counted).await;
        if begun.is_err() {
            // If a statement fails, the rest of the message is not run.
            set_busy_timeout(conn, old).await?;
        }
        begun
    }

    async fn check_begun(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // A full disk or `INSERT OR ROLLBACK` ends the transaction, and later statements would commit by themselves.
        // SQLite has no nested transactions, so if BEGIN succeeds, no transaction was open; then the second ROLLBACK
        // fails with the error to return.
        match conn.execute("BEGIN").await {
            Ok(_) => conn.execute("ROLLBACK; ROLLBACK").await.map(drop),
            Err(_) => Ok(()),
        }
    }

    async fn was_undone(_conn: &mut SqliteConnection) -> bool {
        false
    }

    async fn commit(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // The COMMIT of sqlx succeeds without a transaction if sqlx counts none. sqlx rolls back the outermost
        // transaction when it could not begin a nested one, and its count changes later. So the COMMIT is sent as text,
        // which fails then. The second transaction is empty; the queued ROLLBACK, which corrects sqlx's count, ends it.
        conn.execute("COMMIT; BEGIN").await?;
        SqliteTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn commit_counted(conn: &mut SqliteConnection, session: &mut Session) -> sqlx::Result<()> {
        conn.execute("COMMIT").await?;
        session.is_counted = true;
        Ok(())
    }

    async fn roll_back(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // Not the rollback of sqlx that is answered: after one whose future was dropped, sqlx ignores the next that is
        // queued, which may be that of a commit.
        let counted = counted_depth::<Self>(conn);
        SqliteTransactionManager::start_rollback(conn);
        conn.ping().await?;
        if counted_depth::<Self>(conn) < counted {
            return Ok(());
        }
        // There was nothing to roll back, and sqlx goes on counting it. So it gets what it counts.
        let savepoints: Vec<_> = (1..counted).map(|it| format!("; SAVEPOINT _sqlx_savepoint_{it}")).collect();
        conn.execute(AssertSqlSafe(format!("BEGIN{}", savepoints.concat()))).await?;
        SqliteTransactionManager::start_rollback(conn);
        conn.ping().await
    }

    fn must_restore(session: &Session) -> bool {
        session.is_counted
    }

    async fn restore_ended(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        uncount::<Self>(conn, "BEGIN").await
    }

    async fn restore_session(_conn: &mut SqliteConnection) -> sqlx::Result<()> {
        Ok(())
    }

    async fn check_open(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        Self::check_begun(conn).await
    }

    async fn depth(conn: &mut SqliteConnection) -> sqlx::Result<usize> {
        let depth = SqliteTransactionManager::get_transaction_depth(conn);
        if depth == 0 {
            // Pending rollbacks can only lower the count.
            return Ok(depth);
        }
        // The worker thread rolls back dropped transactions and then updates the count. It handles requests in order.
        conn.ping().await?;
        Ok(SqliteTransactionManager::get_transaction_depth(conn))
    }

    async fn is_idle(conn: &mut SqliteConnection) -> bool {
        // SQLite has no nested transactions, so BEGIN fails inside one. This BEGIN takes no lock.
        conn.execute("BEGIN; ROLLBACK").await.is_ok()
    }

    fn is_denied(_err: &sqlx::Error) -> bool {
        // SQLite has no users. A file without write permission is reported as read-only.
        false
    }

    fn accepts_nobody(_err: &sqlx::Error) -> bool {
        false
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), Error> {
        migrate::migrate(pool).await
    }
}

/// What is known of a session.
#[derive(Debug, Clone, Copy, Default)]
pub struct Session {
    /// How long it waits for the write lock when no statement bounds that, in milliseconds. `None` if not known.
    busy_timeout: Option<i64>,
    /// Whether sqlx counts a transaction that has ended.
    is_counted: bool,
}

/// How long the connection waits for the write lock, in milliseconds.
async fn busy_timeout(conn: &mut SqliteConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(conn).await
}

/// The statement with a bound on its wait for the write lock, in one message: each costs a change of threads.
fn bounded(statement: &str, millis: u64, old: i64) -> String {
    let millis = millis.min(i32::MAX as u64);
    format!("PRAGMA busy_timeout = {millis}; {statement}; PRAGMA busy_timeout = {old}")
}

async fn set_busy_timeout(conn: &mut SqliteConnection, millis: i64) -> sqlx::Result<()> {
    let millis = millis.clamp(0, i64::from(i32::MAX));
    // A PRAGMA takes no bound value, and does not need caching as a prepared statement.
    sqlx::query(AssertSqlSafe(format!("PRAGMA busy_timeout = {millis}"))).persistent(false).execute(conn).await?;
    Ok(())
}

/// Takes the write lock for the rest of the transaction, unless the transaction already has it.
async fn take_write_lock(conn: &mut SqliteConnection, wait: Wait, no_op: String) -> sqlx::Result<()> {
    let Some(millis) = wait.millis() else {
        return sqlx::query(AssertSqlSafe(no_op)).execute(conn).await.map(drop);
    };
    let old = busy_timeout(conn).await?;
    let sql = bounded(&no_op, millis, old);
    let taken = sqlx::query(AssertSqlSafe(sql)).persistent(false).execute(&mut *conn).await;
    if taken.is_err() {
        // If a statement fails, the rest of the message is not run.
        set_busy_timeout(conn, old).await?;
    }
    taken.map(drop)
}

impl super::sealed::Sealed for SqliteQueryResult {}

impl RowsAffected for SqliteQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

/// The placeholder of the bound value with this number, counted from 1.
fn placeholder(_number: usize) -> String {
    "?".to_owned()
}
