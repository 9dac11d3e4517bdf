//! PostgreSQL 12 and later: the statements, and the meaning of SQLSTATEs.
//!
//! A look at the transaction before COMMIT must be cheap. `SAVEPOINT` needs no planner and returns no row: 220 to 230
//! µs of the whole machine for a transaction with a row lock (32 tasks), against 245 to 250 µs with `SELECT 1`.
//! `COMMIT AND CHAIN` leaves an empty transaction for sqlx's queued ROLLBACK, which avoids a warning in the server's
//! log for each commit and travels with the pool's ping.
//!
//! Statements end with the names of the types of their values, in a comment (see `typed`): `by("id", 1_i32)` and
//! `by("id", 1_i64)` would share one prepared statement of sqlx, and the second would fail (22P03) or find another row.
//! A cast would change which index and which comparison is used.

use sha2::{Digest, Sha256};
use std::time::Duration;

use sqlx::{
    Executor, PgConnection, Pool, Postgres, Row, TypeInfo,
    error::DatabaseError,
    postgres::{PgDatabaseError, PgQueryResult, PgRow, PgTransactionManager, PgTypeInfo},
};
use sqlx_core::transaction::TransactionManager;

use crate::{
    policy::Wait,
    sql::{
        AsConnection, Dialect, Driver, FenceGuardOps, Known, LeaseOps, NamedOps, RowOps, RowsAffected, SessionOps,
        Sessions, StockOps, VersionOps, begin_counted, fault::connection_fault, uncount, units::duration,
    },
    value::{
        error::{Error, Fault},
        holder::LockHolder,
        key::Key,
    },
};

/// The server's clock in microseconds, read at each occurrence. `now()` would be the start of the transaction, which is
/// long past in a statement that waited. `date_part` computes in floating point, which is exact for these numbers and
/// cheaper than the `numeric` of `extract`.
const NOW: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint";

/// Notifies the waiters of the lease, if there are any, that it was released. Waiters share an advisory lock with the
/// number `lock`; if that lock cannot be taken exclusively, a waiter exists. NOTIFY takes a lock of the whole server at
/// commit, so a release without waiters does not use it (<https://www.postgresql.org/docs/current/sql-notify.html>).
///
/// An expression for the RETURNING clause of the statement that frees the lease with the key `$1`.
fn notify_waiters(lock: &str) -> String {
    format!("CASE WHEN NOT pg_try_advisory_xact_lock({lock}) THEN pg_notify('lockkit_freed', $1)::text END AS notified")
}

/// Selects a session that holds the advisory lock with the number `$1` and the `objsubid` given, and the time since
/// `start`, a column of `pg_stat_activity`. Prefers a session other than this one. The view stores the halves of the
/// number in two columns: <https://www.postgresql.org/docs/current/view-pg-locks.html>.
fn holder_since(start: &str, subid: &str) -> String {
    format!(
        "SELECT
             l.pid::bigint AS id,
             a.usename::text AS user_name,
             host(a.client_addr) AS host,
             nullif(a.application_name, '') AS application,
             (extract(epoch FROM clock_timestamp() - a.{start}) * 1000000)::bigint AS age_us
         FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a USING (pid)
         WHERE l.locktype = 'advisory' AND l.objsubid = {subid} AND l.granted
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND (l.classid::bigint << 32 | l.objid::bigint) = $1
         ORDER BY l.pid = pg_backend_pid(), age_us DESC NULLS LAST
         LIMIT 1"
    )
}

mod feigned;
mod fence_guard;
#[cfg(feature = "idempotent")]
mod idempotent;
mod lease;
mod listen;
mod migrate;
mod named;
mod pooler;
mod row;
mod session;
#[cfg(feature = "shedlock")]
mod shedlock;
mod stock;
mod version;

pub use pooler::behind_pooler;

pub(super) fn fault_of(err: &PgDatabaseError) -> Fault {
    // https://www.postgresql.org/docs/current/errcodes-appendix.html
    match err.code() {
        // 55P03 is a lock timeout. 57014 is a cancelled statement or a statement timeout, which lockkit never sets.
        // Either way the statement only waited and changed nothing.
        "55P03" | "57014" => Fault::Contended,
        "40P01" => Fault::Deadlock,
        "40001" => Fault::Serialization,
        "23505" => Fault::Duplicate,
        "42P01" | "42703" | "3F000" => Fault::NoTable,
        // The timeout of an idle transaction fires between two statements, so the next statement was not run.
        // 3B001 is a savepoint that does not exist: its transaction has ended, and another one began.
        "25P01" | "25P02" | "25P03" | "3B001" => Fault::NoTransaction,
        "25006" => Fault::ReadOnly,
        "22021" | "22P05" => Fault::Encoding,
        "57P01" | "57P02" | "57P03" | "57P05" | "25P04" | "53300" => Fault::Unavailable,
        // PgBouncer also reports 08P01 when it has no connection to lend.
        code if code.starts_with("08") => Fault::Unavailable,
        _ => Fault::Other,
    }
}

/// The server has advisory locks of its own, which exclude nobody on its primary.
#[derive(Debug, thiserror::Error)]
#[error("the server is a standby, whose locks are not those of its primary")]
struct Standby;

impl super::sealed::Sealed for Postgres {}
impl super::sealed::Sealed for PgConnection {}

impl AsConnection<Postgres> for PgConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Known for Postgres {
    type Itself = Self;
}

impl Known<Sessions> for Postgres {
    type Itself = Self;
}

impl Dialect for Postgres {}
impl LeaseOps for Postgres {}
impl RowOps for Postgres {}
impl NamedOps for Postgres {}
impl SessionOps for Postgres {}
impl VersionOps for Postgres {}
impl StockOps for Postgres {}
impl FenceGuardOps for Postgres {}
#[cfg(feature = "idempotent")]
impl crate::sql::IdempotentOps for Postgres {}
#[cfg(feature = "shedlock")]
impl crate::sql::ShedLockOps for Postgres {}

/// What is known of a session.
#[derive(Debug, Clone, Copy, Default)]
pub struct Session {
    /// Whether sqlx counts a transaction that has ended.
    is_counted: bool,
}

impl Driver for Postgres {
    type Grammar = ();
    type Session = Session;

    const MIGRATIONS: &'static [(i64, &'static str, &'static str)] = &[
        (1, "lockkit", include_str!("../../../migrations/postgres/0001_lockkit.sql")),
        (3, "stock", include_str!("../../../migrations/postgres/0003_stock.sql")),
        (4, "ttl", include_str!("../../../migrations/postgres/0004_ttl.sql")),
        (5, "fence", include_str!("../../../migrations/postgres/0005_fence.sql")),
        (6, "stock batch", include_str!("../../../migrations/postgres/0006_stock_batch.sql")),
        (7, "unchecked", include_str!("../../../migrations/postgres/0007_unchecked.sql")),
        (8, "answer", include_str!("../../../migrations/postgres/0008_answer.sql")),
    ];
    const FAILED_REFUSES: bool = true;

    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            sqlx::Error::Configuration(err) if err.is::<Standby>() => Fault::ReadOnly,
            other => connection_fault(other),
        }
    }

    async fn busy_timeout(_conn: &mut PgConnection) -> sqlx::Result<Duration> {
        Ok(Duration::ZERO)
    }

    async fn set_busy_timeout(_conn: &mut PgConnection, _wait: Duration) -> sqlx::Result<()> {
        Ok(())
    }

    async fn set_busy_timeout_unanswered(_conn: &mut PgConnection, _wait: Duration) {}

    async fn greet(conn: &mut PgConnection, pool: &Pool<Self>) -> sqlx::Result<()> {
        // An error is not reported here: the first statement fails in the same way.
        pooler::look_for(conn, pool).await;
        Ok(())
    }

    async fn probe_named_locks(conn: &mut PgConnection, pool: &Pool<Self>) {
        feigned::look_for(conn, pool).await;
    }

    fn shows_writes_at_once(_pool: &Pool<Self>) -> bool {
        true
    }

    async fn begin(
        conn: &mut PgConnection,
        _pool: &Pool<Self>,
        session: &mut Session,
        _wait: Wait,
    ) -> sqlx::Result<()> {
        begin_counted::<Self>(conn, "BEGIN ISOLATION LEVEL READ COMMITTED", &mut session.is_counted).await
    }

    async fn check_begun(_conn: &mut PgConnection) -> sqlx::Result<()> {
        // A transaction that has failed refuses every statement.
        Ok(())
    }

    async fn was_undone(_conn: &mut PgConnection) -> bool {
        false
    }

    async fn commit(conn: &mut PgConnection) -> sqlx::Result<()> {
        // A COMMIT of a failed transaction reports success and rolls back. So another statement precedes it in the same
        // message: if the transaction has failed, that fails and the COMMIT is not run. A savepoint needs no planner
        // and returns no row. The chained transaction is empty; the queued ROLLBACK, which corrects sqlx's count of
        // open transactions, ends it.
        conn.execute("SAVEPOINT lockkit; COMMIT AND CHAIN").await?;
        PgTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn commit_counted(conn: &mut PgConnection, session: &mut Session) -> sqlx::Result<()> {
        // As in `commit`.
        conn.execute("SAVEPOINT lockkit; COMMIT").await?;
        session.is_counted = true;
        Ok(())
    }

    async fn roll_back(conn: &mut PgConnection) -> sqlx::Result<()> {
        PgTransactionManager::rollback(conn).await
    }

    fn must_restore(session: &Session) -> bool {
        session.is_counted
    }

    async fn restore_ended(conn: &mut PgConnection) -> sqlx::Result<()> {
        uncount::<Self>(conn, "BEGIN").await
    }

    async fn restore_session(_conn: &mut PgConnection) -> sqlx::Result<()> {
        Ok(())
    }

    async fn check_open(conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit").await?;
        Ok(())
    }

    async fn depth(conn: &mut PgConnection) -> sqlx::Result<usize> {
        // sqlx counts a dropped transaction at once, before its rollback runs.
        Ok(PgTransactionManager::get_transaction_depth(conn))
    }

    async fn is_idle(conn: &mut PgConnection) -> bool {
        // 25P01 means that no transaction is open. A failed transaction reports 25P02.
        let err = Self::check_open(conn).await.err();
        err.and_then(sqlx::Error::into_database_error).is_some_and(|it| it.code().as_deref() == Some("25P01"))
    }

    fn is_denied(err: &sqlx::Error) -> bool {
        err.as_database_error().and_then(DatabaseError::code).is_some_and(|it| it == "42501")
    }

    fn accepts_nobody(err: &sqlx::Error) -> bool {
        let code = err.as_database_error().and_then(DatabaseError::code);
        code.is_some_and(|it| matches!(&*it, "57P01" | "57P02" | "57P03"))
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), Error> {
        migrate::migrate(pool).await
    }
}

impl super::sealed::Sealed for PgQueryResult {}

impl RowsAffected for PgQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}

/// The placeholder of the bound value with this number, counted from 1.
fn placeholder(number: usize) -> String {
    format!("${number}")
}

/// The lowest number of a type that is not built in.
const FIRST_OF_USERS: u32 = 16384;

/// The types of the bound values, as a comment.
///
/// sqlx caches prepared statements by their text, with the types of the first values. The server would misread values
/// of other types in such a statement, so a statement with other types needs another text.
fn typed(types: &[PgTypeInfo]) -> String {
    let mut names: Vec<_> = types.iter().map(type_name).collect();
    if names.windows(2).all(|two| two[0] == two[1]) {
        names.truncate(1);
    }
    format!("/* {} */", names.join(", "))
}

/// The name of a built-in type. For another type, its number if known, otherwise the name that the user gave it.
fn type_name(type_info: &PgTypeInfo) -> String {
    let name = type_info.name();
    match type_info.oid() {
        Some(oid) if oid.0 >= FIRST_OF_USERS || name == "?" => oid.0.to_string(),
        _ => name.chars().map(plain).collect(),
    }
}

/// Escapes characters that could end a comment.
fn plain(char: char) -> String {
    if char.is_ascii_alphanumeric() || "_.[] \"".contains(char) {
        return char.to_string();
    }
    char.escape_unicode().collect()
}

/// 64 bits of SHA-256 of the key, in a namespace of its own among the advisory locks of the database.
fn advisory_number(namespace: &str, key: &Key) -> i64 {
    let digest = Sha256::new().chain_update(format!("lockkit:{namespace}:")).chain_update(key.as_bytes()).finalize();
    let (first, _) = digest.as_slice().split_at(8);
    first.iter().fold(0, |number, byte| number << 8 | i64::from(*byte))
}

/// A bound for `lock_timeout`.
fn lock_timeout(wait: Wait) -> String {
    format!("{}ms", wait.millis().unwrap_or(0).min(i32::MAX as u64))
}

fn holder(row: &PgRow) -> sqlx::Result<LockHolder> {
    Ok(LockHolder {
        id: row.try_get("id")?,
        user: row.try_get("user_name")?,
        host: row.try_get("host")?,
        application: row.try_get("application")?,
        held_at_most: row.try_get::<Option<i64>, _>("age_us")?.map(duration),
    })
}

/// The number of the advisory lock that waiters share while they listen for the release of the lease.
fn waiters_lock(key: &Key) -> i64 {
    // The text is part of the number, which processes of other versions compute too.
    advisory_number("bell", key)
}
