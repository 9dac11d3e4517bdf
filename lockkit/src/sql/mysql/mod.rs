//! MySQL 8.0 and later, MariaDB 10.6 and later: the statements, and what their error numbers mean.
//!
//! Where the two servers differ, one statement serves both: MariaDB runs the text of `/*M! … */` and skips
//! `/*!80000 … */`, MySQL the other way round
//! (<https://mariadb.com/kb/en/comment-syntax/>, <https://dev.mysql.com/doc/refman/8.4/en/comments.html>).

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, Executor, MySql, MySqlConnection, Pool, Row, SqlStr,
    mysql::{MySqlConnectOptions, MySqlDatabaseError, MySqlQueryResult, MySqlRow, MySqlTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use crate::{
    error::{Error, Fault},
    holder::LockHolder,
    policy::Wait,
    sql::{
        AsConnection, Dialect, Driver, Known, LeaseOps, NamedOps, RowOps, RowsAffected, SessionOps, Sessions, StockOps,
        VersionOps, fault::connection_fault,
    },
};

/// The server's clock in microseconds, the same in every session time zone. It stands still during a statement.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

const MIGRATIONS: [(i64, &str, &str); 4] = [
    (1, "lockkit", include_str!("../../../migrations/mysql/0001_lockkit.sql")),
    (2, "previous", include_str!("../../../migrations/mysql/0002_previous.sql")),
    (3, "stock", include_str!("../../../migrations/mysql/0003_stock.sql")),
    (4, "ttl", include_str!("../../../migrations/mysql/0004_ttl.sql")),
];

mod lease;
mod migrate;
mod named;
mod row;
mod session;
mod stock;
mod version;

pub(super) fn fault_of(err: &MySqlDatabaseError) -> Fault {
    // https://mariadb.com/kb/en/mariadb-error-code-reference/, https://dev.mysql.com/doc/mysql-errors/8.4/en/
    match err.number() {
        // The last: KILL QUERY, after which GET_LOCK and lock waits did nothing but wait.
        1205 | 3572 | 1969 | 3024 | 1317 => Fault::Contended,
        1213 => Fault::Deadlock,
        1020 => Fault::Serialization,
        1062 => Fault::Duplicate,
        1146 | 1054 => Fault::NoTable,
        // The savepoint is gone: that of `begin`, or that of `check_open`, which does not last in autocommit.
        1305 => Fault::NoTransaction,
        1290 | 1792 | 1836 => Fault::ReadOnly,
        1665 => Fault::StatementLog,
        // No connection to be had: 1040, 1203, 1226. A node of a Galera cluster that has lost the others: 1047 before
        // a statement, 1180 in a COMMIT, which may or may not have reached them.
        1040 | 1047 | 1053 | 1158..=1161 | 1180 | 1203 | 1226 | 1927 | 4031 => Fault::Unavailable,
        _ => Fault::Other,
    }
}

/// Restores the lock wait timeout after a named lock, also after one that was cut short. MariaDB takes a variable
/// that was never set for text, hence the CAST.
const RESTORE_WAIT: &str = "SET innodb_lock_wait_timeout = \
                            CAST(IFNULL(@lockkit_wait, @@innodb_lock_wait_timeout) AS UNSIGNED), @lockkit_wait = NULL";

impl super::sealed::Sealed for MySql {}
impl super::sealed::Sealed for MySqlConnection {}

impl AsConnection<MySql> for MySqlConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Known for MySql {
    type Itself = Self;
}

impl Known<Sessions> for MySql {
    type Itself = Self;
}

impl Dialect for MySql {}
impl LeaseOps for MySql {}
impl RowOps for MySql {}
impl NamedOps for MySql {}
impl SessionOps for MySql {}
impl VersionOps for MySql {}
impl StockOps for MySql {}

impl Driver for MySql {
    const CHANGES_SESSION: bool = true;

    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn waits_for(_conn: &mut MySqlConnection) -> sqlx::Result<Option<Duration>> {
        Ok(None)
    }

    async fn wait_for(_conn: &mut MySqlConnection, _wait: Duration) -> sqlx::Result<()> {
        Ok(())
    }

    async fn greet(_conn: &mut MySqlConnection, _pool: &Pool<Self>) {}

    async fn caveats(pool: &Pool<Self>, conn: &mut MySqlConnection) -> Vec<&'static str> {
        if !is_first_use(&pool.connect_options()) {
            return Vec::new();
        }
        caveats(conn).await.unwrap_or_default()
    }

    async fn begin(conn: &mut MySqlConnection, _wait: Wait) -> sqlx::Result<()> {
        // A deadlock victim has lost its transaction, and its next statement begins another one, without autocommit:
        // then nothing that follows is committed by itself. The savepoint marks the first transaction. The other
        // variable tells the statements of the transaction what no system variable tells.
        let begin = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION; SAVEPOINT lockkit; \
                     SET @lockkit_autocommit = @@autocommit, autocommit = 0, @lockkit_read_committed = 1";
        MySqlTransactionManager::begin(conn, Some(SqlStr::from_static(begin))).await
    }

    async fn check_begun(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // The savepoint ends with its transaction. In a message of its own: a node of a Galera cluster that must roll
        // back for another node says so in the answer to the message, and where more statements follow in it, that
        // answer is lost and they run in a new transaction.
        conn.execute("RELEASE SAVEPOINT lockkit").await.map(drop)
    }

    async fn commit(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        MySqlTransactionManager::commit(conn).await
    }

    async fn restore_session(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // Switching autocommit on would commit what ran after the transaction ended.
        let restore = format!(
            "ROLLBACK; SET autocommit = IFNULL(@lockkit_autocommit, 1), @lockkit_read_committed = NULL; {RESTORE_WAIT}"
        );
        conn.execute(AssertSqlSafe(restore)).await.map(drop)
    }

    async fn check_open(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit").await?;
        Ok(())
    }

    async fn depth(conn: &mut MySqlConnection) -> sqlx::Result<usize> {
        // Counted when a transaction is dropped, not when its rollback is run.
        Ok(MySqlTransactionManager::get_transaction_depth(conn))
    }

    async fn is_idle(conn: &mut MySqlConnection) -> bool {
        Self::check_open(conn).await.is_err_and(|it| Self::fault(&it) == Fault::NoTransaction)
    }

    fn is_denied(err: &sqlx::Error) -> bool {
        // The whole database, a table, a column.
        let number = err.as_database_error().and_then(|it| it.try_downcast_ref()).map(MySqlDatabaseError::number);
        number.is_some_and(|it| matches!(it, 1044 | 1142 | 1143))
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), Error> {
        migrate::migrate(pool).await
    }
}

/// Whether this process asks the server for the first time.
fn is_first_use(server: &MySqlConnectOptions) -> bool {
    static USED: Mutex<Vec<(String, u16)>> = Mutex::new(Vec::new());

    // No code panics while it holds the lock.
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    let (host, port) = (server.get_host(), server.get_port());
    let is_first = !used.iter().any(|it| (&*it.0, it.1) == (host, port));
    if is_first {
        used.push((host.to_owned(), port));
    }
    is_first
}

/// What this server is not suited for.
async fn caveats(conn: &mut MySqlConnection) -> sqlx::Result<Vec<&'static str>> {
    let asked = "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'; SHOW VARIABLES LIKE 'log_bin'; \
                 SHOW VARIABLES LIKE 'binlog_format'";
    let mut caveats = Vec::new();
    let mut has_log = false;
    for row in sqlx::raw_sql(asked).fetch_all(conn).await? {
        let (name, value): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        match &*name.to_ascii_lowercase() {
            "wsrep_cluster_size" if value.parse().is_ok_and(|nodes: u32| nodes > 1) => caveats.push(
                "the server is a node of a Galera cluster: row locks, named locks and session locks exclude nobody who \
                 uses another node; a transaction that loses is a deadlock victim, at the latest in its commit",
            ),
            "log_bin" => has_log = value == "ON",
            "binlog_format" if has_log && value == "STATEMENT" => caveats.push(
                "the server writes its binary log as statements, and refuses writes in the READ COMMITTED transactions \
                 of `begin` (error 1665): set `binlog_format` to ROW or MIXED",
            ),
            _ => {}
        }
    }
    Ok(caveats)
}

impl super::sealed::Sealed for MySqlQueryResult {}

impl RowsAffected for MySqlQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

fn holder(row: &MySqlRow) -> sqlx::Result<LockHolder> {
    let (user, host) = (row.try_get("user")?, row.try_get("host")?);
    Ok(LockHolder { id: row.try_get("id")?, user, host, application: None, held_at_most: None })
}

/// The placeholder of the bound value with this number, counted from 1.
fn placeholder(_number: usize) -> String {
    "?".to_owned()
}

/// The bound of a wait: on MariaDB a prefix of the statement, on MySQL a hint inside it. Neither takes a bound value,
/// so the time is rounded up to two digits, which keeps the number of prepared statements small.
fn bounded(wait: Wait) -> (String, String) {
    let Wait::AtMost(_) = wait else {
        return (String::new(), String::new());
    };
    let exact = wait.millis().unwrap_or(1);
    let step = 10_u64.pow(exact.ilog10().saturating_sub(1));
    let millis = exact.div_ceil(step) * step;
    (
        format!("/*M! SET STATEMENT max_statement_time = {}.{:03} FOR */ ", millis / 1000, millis % 1000),
        format!("/*+ MAX_EXECUTION_TIME({}) */ ", millis.min(u64::from(u32::MAX))),
    )
}

/// The same, in the words of each server.
const SHARED: &str = "/*M! LOCK IN SHARE MODE */ /*!80000 FOR SHARE */";
