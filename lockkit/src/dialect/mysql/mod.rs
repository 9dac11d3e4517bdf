//! MySQL 8.0 and later, MariaDB 10.6 and later: the statements, and what their error numbers mean.
//!
//! Where the two servers differ, one statement serves both: MariaDB runs the text of `/*M! … */` and skips
//! `/*!80000 … */`, MySQL the other way round
//! (<https://mariadb.com/kb/en/comment-syntax/>, <https://dev.mysql.com/doc/refman/8.4/en/comments.html>).

use std::time::Duration;

use sqlx::{
    Executor, MySql, MySqlConnection, Pool, SqlStr,
    migrate::MigrateError,
    mysql::{MySqlDatabaseError, MySqlQueryResult, MySqlTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use super::{AsConnection, Dialect, RowsAffected, connection_fault};
use crate::{error::Fault, policy::Wait};

/// The server's clock in microseconds, the same in every session time zone. It stands still during a statement.
macro_rules! now {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    };
}

const MIGRATIONS: [(i64, &str, &str); 3] = [
    (1, "lockkit", include_str!("../../../migrations/mysql/0001_lockkit.sql")),
    (2, "previous", include_str!("../../../migrations/mysql/0002_previous.sql")),
    (3, "stock", include_str!("../../../migrations/mysql/0003_stock.sql")),
];

mod lease;
mod lock;
mod session;
mod stock;
mod version;

pub(super) fn fault_of(err: &MySqlDatabaseError) -> Fault {
    // https://mariadb.com/kb/en/mariadb-error-code-reference/, https://dev.mysql.com/doc/mysql-errors/8.4/en/
    match err.number() {
        1205 | 3572 | 1969 | 3024 => Fault::Contended,
        1213 => Fault::Deadlock,
        1020 => Fault::Serialization,
        1062 => Fault::Duplicate,
        1146 | 1054 => Fault::NoTable,
        // The savepoint is gone: that of `begin`, or that of `check_open`, which does not last in autocommit.
        1305 => Fault::NoTransaction,
        1290 | 1792 | 1836 => Fault::ReadOnly,
        1053 | 1927 | 4031 | 1158..=1161 => Fault::Unavailable,
        _ => Fault::Other,
    }
}

impl super::sealed::Sealed for MySql {}
impl super::sealed::Sealed for MySqlConnection {}

impl AsConnection<MySql> for MySqlConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Dialect for MySql {
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

    async fn begin(conn: &mut MySqlConnection, _wait: Wait) -> sqlx::Result<()> {
        // The savepoint is a mark that the commit checks. The variable tells the statements of the transaction what no
        // system variable tells; it is cleared by the commit, and where a rollback leaves it, it costs others a wait.
        let begin = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION; SAVEPOINT lockkit; \
                     SET @lockkit_read_committed = 1";
        MySqlTransactionManager::begin(conn, Some(SqlStr::from_static(begin))).await
    }

    async fn commit(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // A deadlock victim has lost its transaction and runs on outside of it; a COMMIT would answer success.
        // The savepoint of the beginning is gone then, so its release fails and the COMMIT is not run.
        conn.execute("RELEASE SAVEPOINT lockkit; COMMIT; SET @lockkit_read_committed = NULL").await?;
        // Corrects sqlx's count of open transactions; the queued ROLLBACK finds none.
        MySqlTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn check_open(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit").await?;
        Ok(())
    }

    async fn is_idle(conn: &mut MySqlConnection) -> bool {
        Self::check_open(conn).await.is_err_and(|it| Self::fault(&it) == Fault::NoTransaction)
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), MigrateError> {
        let migrator = super::migrator(MIGRATIONS);
        if super::is_migrated(&mut *pool.acquire().await?, &migrator).await {
            return Ok(());
        }
        // On a pool of its own: a run that fails would leave its lock on a connection of the application's.
        let own = pool.options().clone().min_connections(0).max_connections(1);
        let own = own.connect_with((*pool.connect_options()).clone()).await?;
        // DDL commits as it goes: a run that was cut short leaves a mark for ever, and on MariaDB, where sqlx's lock is
        // none, one that is still at work leaves it for a moment. The statements can be repeated, so the mark is not
        // needed.
        let done = match migrator.run(&own).await {
            Err(MigrateError::Dirty(_)) => {
                sqlx::query("DELETE FROM _lockkit_migrations WHERE NOT success").execute(&own).await?;
                migrator.run(&own).await
            }
            done => done,
        };
        own.close().await;
        done
    }
}

impl super::sealed::Sealed for MySqlQueryResult {}

impl RowsAffected for MySqlQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

/// How the driver writes the bound value with this number, from 1.
fn placeholder(_number: usize) -> String {
    "?".to_owned()
}
