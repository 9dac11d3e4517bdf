//! MySQL 8.0 and later, MariaDB 10.6 and later: the statements, and the meaning of error numbers.
//!
//! Where the grammars of the two servers differ, each has its own text (`text`). Which one a connection of a pool needs
//! is learned with the first answer of the pool's server (`server`). A connection that the caller hands in cannot say
//! it, so its statements differ in a clause at most, which `text` writes for both servers.
//!
//! Autocommit is off in a transaction of `begin`: the statement after a deadlock then begins another transaction, which
//! `commit` refuses for lack of the savepoint. A READ ONLY session with a READ WRITE transaction was tried instead: the
//! first statement after the deadlock still passes, on both servers. COMMIT and the check before it each have their own
//! message, on every server: behind a pool, a server may become a node of a Galera cluster. `SERVER_STATUS_IN_TRANS`
//! would save the check, but is private in sqlx 0.9.
//!
//! A node of a Galera cluster reports a rollback for another node in its next answer, as a deadlock (1213). Some of
//! these reports are lost beside a PREPARE: 23 of about 8,000 rollbacks on new connections, none of 1,900 where the
//! statements were prepared. What follows then runs in a new transaction, and the look at the savepoint fails (1305),
//! as after a COMMIT or DDL of the application. `WSREP_LAST_WRITTEN_GTID()` distinguishes the two: it changes with each
//! write that the session commits, and with no rollback. If it is the same afterwards, the error is a deadlock, which
//! is retried; otherwise, and on other servers, `TransactionEnded`, which never is.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Executor, MySql, MySqlConnection, Pool, Row, SqlStr,
    mysql::{MySqlDatabaseError, MySqlQueryResult, MySqlRow, MySqlTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use self::text::{Grammar, for_each, settings_on_maria};
use crate::{
    policy::Wait,
    sql::{
        AsConnection, Dialect, Driver, FenceGuardOps, Known, LeaseOps, NamedOps, RowOps, RowsAffected, SessionOps,
        Sessions, StockOps, VersionOps, fault::connection_fault,
    },
    value::{
        error::{Error, Fault},
        holder::LockHolder,
    },
};

/// The server's clock in microseconds, the same in every session time zone. It is constant during a statement.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

mod fence_guard;
#[cfg(feature = "idempotent")]
mod idempotent;
mod lease;
mod migrate;
mod named;
mod row;
mod server;
mod session;
#[cfg(feature = "shedlock")]
mod shedlock;
mod stock;
mod text;
mod version;

pub(super) fn fault_of(err: &MySqlDatabaseError) -> Fault {
    // https://mariadb.com/kb/en/mariadb-error-code-reference/, https://dev.mysql.com/doc/mysql-errors/8.4/en/
    match err.number() {
        // 1317 is KILL QUERY. It interrupted a GET_LOCK or a lock wait, and nothing was changed.
        1205 | 3572 | 1969 | 3024 | 1317 => Fault::Contended,
        1213 => Fault::Deadlock,
        1180 if is_victim(err) => Fault::Deadlock,
        // 3101: a replication group with several primaries committed a conflicting transaction of another one first.
        1020 | 3101 => Fault::Serialization,
        1062 => Fault::Duplicate,
        1146 | 1054 => Fault::NoTable,
        // The savepoint does not exist: either that of `begin`, or that of `check_open`, which does not last in
        // autocommit.
        1305 => Fault::NoTransaction,
        1290 | 1792 | 1836 => Fault::ReadOnly,
        1665 => Fault::StatementLog,
        // 1040, 1203 and 1226: no connection is available. 1047 and 1180: a node of a Galera cluster has lost the other
        // nodes, before a statement (1047) or in a COMMIT (1180), which may have reached them; 3100 says the same of a
        // member of a replication group, and 3032 that it then refuses clients. A proxy reports the loss of its own
        // connection with a number of the client library (2000) or its own (ProxySQL, 9000).
        1040
        | 1047
        | 1053
        | 1158..=1161
        | 1180
        | 1203
        | 1226
        | 1927
        | 2000..=2999
        | 3032
        | 3100
        | 4031
        | 9000..=9999 => Fault::Unavailable,
        _ => Fault::Other,
    }
}

/// The number of the server's error.
fn number(err: &sqlx::Error) -> Option<u16> {
    err.as_database_error().and_then(|it| it.try_downcast_ref()).map(MySqlDatabaseError::number)
}

/// Whether COMMIT found that the engine had rolled the transaction back for a conflicting one, as a member of a
/// replication group does for another primary's. Only the text has the engine's own number, before its words.
fn is_victim(err: &MySqlDatabaseError) -> bool {
    // https://github.com/mysql/mysql-server/blob/trunk/include/my_base.h
    const HA_ERR_LOCK_DEADLOCK: &str = "149";
    err.message().split(|it: char| !it.is_ascii_digit()).find(|it| !it.is_empty()) == Some(HA_ERR_LOCK_DEADLOCK)
}

/// Restores the lock wait timeout after a named lock, also after an interrupted one. The CAST is needed because MariaDB
/// treats a variable that was never set as text.
const RESTORE_WAIT: &str = "SET innodb_lock_wait_timeout = \
                            CAST(IFNULL(@lockkit_wait, @@innodb_lock_wait_timeout) AS UNSIGNED), @lockkit_wait = NULL";

/// How often a node of a cluster is asked what it did, each time in a transaction that may be rolled back as well.
const UNDONE_TRIES: u32 = 3;

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
impl FenceGuardOps for MySql {}
#[cfg(feature = "idempotent")]
impl crate::sql::IdempotentOps for MySql {}
#[cfg(feature = "shedlock")]
impl crate::sql::ShedLockOps for MySql {}

/// Whose settings a session has.
#[derive(Debug, Clone, Copy, Default)]
pub enum Session {
    #[default]
    OfUser,
    /// Until `restore_ended` or `restore_session`.
    OfBegin,
}

impl Driver for MySql {
    type Grammar = Grammar;
    type Session = Session;

    const MIGRATIONS: &'static [(i64, &'static str, &'static str)] = &[
        (1, "lockkit", include_str!("../../../migrations/mysql/0001_lockkit.sql")),
        (2, "previous", include_str!("../../../migrations/mysql/0002_previous.sql")),
        (3, "stock", include_str!("../../../migrations/mysql/0003_stock.sql")),
        (4, "ttl", include_str!("../../../migrations/mysql/0004_ttl.sql")),
        (5, "fence", include_str!("../../../migrations/mysql/0005_fence.sql")),
        (6, "stock batch", include_str!("../../../migrations/mysql/0006_stock_batch.sql")),
        (8, "answer", include_str!("../../../migrations/mysql/0008_answer.sql")),
    ];
    // A node of a Galera cluster does not always report to PREPARE that it has rolled the transaction back for another
    // node, and then executes the statement in a new transaction.
    const CHECKED_LAST: bool = true;

    /// sqlx 0.9 reads a packet in two steps, and does not count the packets of a PREPARE. After a dropped future it
    /// takes the rest of one answer for the next one, and panics.
    const KEEPS_STEP: bool = false;

    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn busy_timeout(_conn: &mut MySqlConnection) -> sqlx::Result<Duration> {
        Ok(Duration::ZERO)
    }

    async fn set_busy_timeout(_conn: &mut MySqlConnection, _wait: Duration) -> sqlx::Result<()> {
        Ok(())
    }

    async fn set_busy_timeout_unanswered(_conn: &mut MySqlConnection, _wait: Duration) {}

    async fn greet(conn: &mut MySqlConnection, pool: &Pool<Self>) -> sqlx::Result<Grammar> {
        server::look_at(conn, pool).await
    }

    async fn probe_named_locks(_conn: &mut MySqlConnection, _pool: &Pool<Self>) {
        // A named lock is a row.
    }

    fn shows_writes_at_once(pool: &Pool<Self>) -> bool {
        server::is_alone(pool)
    }

    async fn begin(
        conn: &mut MySqlConnection,
        pool: &Pool<Self>,
        session: &mut Session,
        _wait: Wait,
    ) -> sqlx::Result<()> {
        // The server rolls back the transaction of a deadlock victim. With autocommit off, its next statement begins
        // another transaction, so nothing that follows is committed by itself. The savepoint marks the first
        // transaction. `@lockkit_read_committed` tells later statements the isolation level, which no system variable
        // shows: an assignment to `@@` without a scope counts for the next transaction only.
        macro_rules! begin {
            ($settings:literal, $mark:literal, $isolation:literal) => {
                concat!(
                    "SET ",
                    $settings,
                    $mark,
                    $isolation,
                    " = 'READ-COMMITTED'; START TRANSACTION; SAVEPOINT lockkit"
                )
            };
            ($mark:literal, $isolation:literal) => {
                match *session {
                    Session::OfUser => begin!(
                        "@lockkit_autocommit = @@autocommit, @lockkit_read_committed = 1, autocommit = 0, ",
                        $mark,
                        $isolation
                    ),
                    // The body of the last transaction may have changed them.
                    Session::OfBegin => begin!(
                        "@lockkit_read_committed = 1, autocommit = 0, innodb_lock_wait_timeout = \
                         CAST(IFNULL(@lockkit_wait, @@innodb_lock_wait_timeout) AS UNSIGNED), @lockkit_wait = NULL, ",
                        $mark,
                        $isolation
                    ),
                }
            };
        }
        // The mark is for `was_undone`. Only servers that were built for Galera know the function. Before MariaDB 11.1,
        // `tx_isolation` is the only name there.
        let text = match (server::look_at(conn, pool).await?, server::is_galera(pool)) {
            (Grammar::MySql, false) => begin!("", "@@transaction_isolation"),
            (Grammar::MySql, true) => {
                begin!("@lockkit_written = WSREP_LAST_WRITTEN_GTID(), ", "@@transaction_isolation")
            }
            (Grammar::MariaDb, false) => begin!("", "@@tx_isolation"),
            (Grammar::MariaDb, true) => begin!("@lockkit_written = WSREP_LAST_WRITTEN_GTID(), ", "@@tx_isolation"),
        };
        *session = Session::OfBegin;
        MySqlTransactionManager::begin(conn, Some(SqlStr::from_static(text))).await
    }

    async fn check_begun(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // The savepoint ends with its transaction. RELEASE is sent in a message of its own: if a node of a Galera
        // cluster must roll back for another node, it reports that in the answer to this message. If more statements
        // followed in the message, that answer would be lost and they would run in a new transaction.
        conn.execute("RELEASE SAVEPOINT lockkit").await.map(drop)
    }

    async fn was_undone(conn: &mut MySqlConnection) -> bool {
        // The number changes with each write that this session commits, also by DDL. Writes that are not replicated do
        // not change it. https://mariadb.com/kb/en/wsrep_last_written_gtid/
        let same = "SELECT @lockkit_written = WSREP_LAST_WRITTEN_GTID() AND @@wsrep_on AND @@sql_log_bin";
        for _ in 0..UNDONE_TRIES {
            match conn.fetch_one(same).await {
                Ok(row) => return row.try_get_unchecked(0).is_ok_and(|it: Option<i64>| it == Some(1)),
                // The transaction in which statements ran since then was rolled back as well.
                Err(err) if Self::fault(&err) == Fault::Deadlock => {}
                Err(_) => return false,
            }
        }
        false
    }

    async fn commit(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        MySqlTransactionManager::commit(conn).await
    }

    async fn commit_counted(conn: &mut MySqlConnection, _session: &mut Session) -> sqlx::Result<()> {
        // There, the correction costs nothing.
        <Self as Driver>::commit(conn).await
    }

    async fn roll_back(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        MySqlTransactionManager::rollback(conn).await
    }

    fn must_restore(session: &Session) -> bool {
        matches!(session, Session::OfBegin)
    }

    async fn restore_ended(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        conn.execute(
            "SET autocommit = IFNULL(@lockkit_autocommit, 1), @lockkit_read_committed = NULL, \
             innodb_lock_wait_timeout = CAST(IFNULL(@lockkit_wait, @@innodb_lock_wait_timeout) AS UNSIGNED), \
             @lockkit_wait = NULL",
        )
        .await
        .map(drop)
    }

    async fn restore_session(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // ROLLBACK comes first: switching autocommit on would commit the statements that ran after the transaction
        // ended.
        let restore = format!(
            "ROLLBACK; SET autocommit = IFNULL(@lockkit_autocommit, 1), @lockkit_read_committed = NULL; {RESTORE_WAIT}"
        );
        conn.execute(AssertSqlSafe(restore)).await.map(drop)
    }

    async fn check_open(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // The second savepoint is for `check_begun`.
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit; SAVEPOINT lockkit").await.map(drop)
    }

    async fn depth(conn: &mut MySqlConnection) -> sqlx::Result<usize> {
        // sqlx counts a dropped transaction at once, before its rollback runs.
        Ok(MySqlTransactionManager::get_transaction_depth(conn))
    }

    async fn is_idle(conn: &mut MySqlConnection) -> bool {
        let open = conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit").await;
        open.is_err_and(|it| Self::fault(&it) == Fault::NoTransaction)
    }

    fn is_denied(err: &sqlx::Error) -> bool {
        // Access denied to the database, a table or a column.
        number(err).is_some_and(|it| matches!(it, 1044 | 1142 | 1143))
    }

    fn accepts_nobody(err: &sqlx::Error) -> bool {
        number(err).is_some_and(|it| matches!(it, 1053 | 3032))
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), Error> {
        migrate::migrate(pool).await
    }
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

/// The bound of a wait: a prefix of the statement on MariaDB, a hint inside it on MySQL. Neither accepts a bound value.
/// The time is rounded up to two digits, which limits the number of prepared statements.
fn bounded(wait: Wait) -> (String, String) {
    let Wait::AtMost(_) = wait else {
        return (String::new(), String::new());
    };
    let exact = wait.millis().unwrap_or(1);
    let step = 10_u64.pow(exact.ilog10().saturating_sub(1));
    let millis = exact.div_ceil(step) * step;
    (
        settings_on_maria(&format!("max_statement_time = {}.{:03}", millis / 1000, millis % 1000)),
        format!("/*+ MAX_EXECUTION_TIME({}) */ ", millis.min(u64::from(u32::MAX))),
    )
}

/// The locking clause of a shared lock. MySQL allows no `NOWAIT` or `SKIP LOCKED` after the words of MariaDB.
fn shared() -> String {
    for_each("FOR SHARE", "LOCK IN SHARE MODE")
}
