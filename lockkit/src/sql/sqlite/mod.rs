//! SQLite 3.42 and later: the statements, and what its extended result codes mean.
//!
//! SQLite has one lock for all writers of a database file. Every lock that lives in a transaction is that lock here.
//! Names are quoted by backticks: what stands in double quotes and is no column, SQLite takes for a string.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Connection, Executor, Pool, SqlStr, Sqlite, SqliteConnection,
    sqlite::{SqliteError, SqliteQueryResult, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use crate::{
    error::{Error, Fault},
    policy::Wait,
    sql::{AsConnection, Dialect, Known, RowsAffected, fault::connection_fault},
};

/// The clock in microseconds, to the millisecond. It stands still during a statement, and starts after the wait for
/// the write lock.
const NOW: &str = "CAST(unixepoch('subsec') * 1000000 AS INTEGER)";

const MIGRATIONS: [(i64, &str, &str); 3] = [
    (1, "lockkit", include_str!("../../../migrations/sqlite/0001_lockkit.sql")),
    (3, "stock", include_str!("../../../migrations/sqlite/0003_stock.sql")),
    (4, "ttl", include_str!("../../../migrations/sqlite/0004_ttl.sql")),
];

mod lease;
mod migrate;
mod row;
mod stock;
mod version;

pub(super) fn fault_of(err: &SqliteError) -> Fault {
    // https://www.sqlite.org/rescode.html; the low byte of an extended code is the primary one
    let code = sqlx::error::DatabaseError::code(err).and_then(|it| it.parse::<i32>().ok()).unwrap_or(0);
    match (code, code & 0xff) {
        (517, _) => Fault::Serialization,
        (1555 | 2067, _) => Fault::Duplicate,
        (_, 5 | 6) => Fault::Contended,
        // The statement could not be prepared: its table or a column is missing.
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

impl Dialect for Sqlite {
    const IS_REMOTE: bool = false;
    const ONE_WRITER: bool = true;
    const CHANGES_SESSION: bool = false;

    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn waits_for(conn: &mut SqliteConnection) -> sqlx::Result<Option<Duration>> {
        let millis: i64 = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(conn).await?;
        Ok(Some(Duration::from_millis(u64::try_from(millis).unwrap_or(0))))
    }

    async fn wait_for(conn: &mut SqliteConnection, wait: Duration) -> sqlx::Result<()> {
        set_busy_timeout(conn, i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)).await
    }

    async fn greet(_conn: &mut SqliteConnection, _pool: &Pool<Self>) {}

    async fn caveats(_pool: &Pool<Self>, _conn: &mut SqliteConnection) -> Vec<&'static str> {
        Vec::new()
    }

    async fn begin(conn: &mut SqliteConnection, wait: Wait) -> sqlx::Result<()> {
        // IMMEDIATE: a transaction that reads first and writes later fails at once when another one wrote in between.
        let statement = SqlStr::from_static("BEGIN IMMEDIATE");
        let old = busy_timeout(conn, wait).await?;
        let begun = SqliteTransactionManager::begin(conn, Some(statement)).await;
        restore_busy_timeout(conn, old).await?;
        begun
    }

    async fn check_begun(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        // A full disk or `INSERT OR ROLLBACK` ends the transaction, and later statements would commit by themselves.
        // There is no transaction within a transaction, so a BEGIN that works has found none; the second ROLLBACK is
        // the error that says so.
        match conn.execute("BEGIN").await {
            Ok(_) => conn.execute("ROLLBACK; ROLLBACK").await.map(drop),
            Err(_) => Ok(()),
        }
    }

    async fn commit(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        SqliteTransactionManager::commit(conn).await
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
            // What is left to do only ends transactions.
            return Ok(depth);
        }
        // The worker thread rolls back what was dropped, and counts then. It answers in the order of the questions.
        conn.ping().await?;
        Ok(SqliteTransactionManager::get_transaction_depth(conn))
    }

    async fn is_idle(conn: &mut SqliteConnection) -> bool {
        // There is no transaction within a transaction. This one takes no lock.
        conn.execute("BEGIN; ROLLBACK").await.is_ok()
    }

    fn is_denied(_err: &sqlx::Error) -> bool {
        // There are no users. A file that may not be written is read-only.
        false
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), Error> {
        migrate::migrate(pool).await
    }
}

/// Bounds how long the connection waits for the write lock; returns the bound that it had.
async fn busy_timeout(conn: &mut SqliteConnection, wait: Wait) -> sqlx::Result<Option<i64>> {
    let Some(millis) = wait.millis() else {
        return Ok(None);
    };
    let old = sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(&mut *conn).await?;
    set_busy_timeout(conn, i64::try_from(millis).unwrap_or(i64::MAX)).await?;
    Ok(Some(old))
}

async fn restore_busy_timeout(conn: &mut SqliteConnection, old: Option<i64>) -> sqlx::Result<()> {
    match old {
        Some(millis) => set_busy_timeout(conn, millis).await,
        None => Ok(()),
    }
}

async fn set_busy_timeout(conn: &mut SqliteConnection, millis: i64) -> sqlx::Result<()> {
    let millis = millis.clamp(0, i64::from(i32::MAX));
    // A PRAGMA takes no bound value, and is not worth a place among the prepared statements.
    sqlx::query(AssertSqlSafe(format!("PRAGMA busy_timeout = {millis}"))).persistent(false).execute(conn).await?;
    Ok(())
}

/// Takes the write lock for the rest of the transaction, if the transaction does not have it yet.
async fn take_write_lock(conn: &mut SqliteConnection, wait: Wait, no_op: String) -> sqlx::Result<()> {
    let old = busy_timeout(conn, wait).await?;
    let taken = sqlx::query(AssertSqlSafe(no_op)).execute(&mut *conn).await;
    restore_busy_timeout(conn, old).await?;
    taken.map(drop)
}

impl super::sealed::Sealed for SqliteQueryResult {}

impl RowsAffected for SqliteQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

/// How the driver writes the bound value with this number, from 1.
fn placeholder(_number: usize) -> String {
    "?".to_owned()
}
