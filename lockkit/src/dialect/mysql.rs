//! MySQL 8.0 and later, MariaDB 10.6 and later: the statements, and what their error numbers mean.
//!
//! Where the two servers differ, one statement serves both: MariaDB runs the text of `/*M! … */` and skips
//! `/*!80000 … */`, MySQL the other way round
//! (<https://mariadb.com/kb/en/comment-syntax/>, <https://dev.mysql.com/doc/refman/8.4/en/comments.html>).

use std::time::Duration;

use sqlx::{
    Arguments, AssertSqlSafe, Column, Executor, MySql, MySqlConnection, Pool, Row, SqlStr, TypeInfo,
    mysql::{MySqlArguments, MySqlDatabaseError, MySqlQueryResult, MySqlRow, MySqlTransactionManager},
    pool::PoolOptions,
};
use sqlx_core::transaction::TransactionManager;

use super::{
    AsConnection, Columns, Dialect, LeaseOps, NamedOps, RowOps, RowQuery, RowsAffected, Strength, VersionOps, VersionQuery,
    connection_fault, matching, micros, order_and_limit,
};
use crate::{
    error::Fault,
    key::Key,
    policy::Wait,
    store::{Acquired, Claim, Held, Scoped, Token},
    version::Version,
};

/// The server's clock in microseconds, the same in every session time zone. It stands still during a statement.
macro_rules! now {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    };
}

// ---- faults and transactions ---------------------------------------------------------------------------------

pub(super) fn fault_of(err: &MySqlDatabaseError) -> Fault {
    // https://mariadb.com/kb/en/mariadb-error-code-reference/, https://dev.mysql.com/doc/mysql-errors/8.4/en/
    match err.number() {
        1205 | 3572 | 1969 | 3024 => Fault::Contended,
        1213 => Fault::Deadlock,
        1020 => Fault::Serialization,
        1062 => Fault::Duplicate,
        1146 | 1054 => Fault::NoTable,
        // The savepoint that `commit` sets did not last.
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

    async fn begin(conn: &mut MySqlConnection, _wait: Wait) -> sqlx::Result<()> {
        let begin = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION";
        MySqlTransactionManager::begin(conn, Some(SqlStr::from_static(begin))).await
    }

    async fn commit(conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // A deadlock victim has lost its transaction and runs on in autocommit; a COMMIT would answer success.
        // A savepoint does not last in autocommit, so its release fails then, and the COMMIT is not run.
        conn.execute("SAVEPOINT lockkit; RELEASE SAVEPOINT lockkit; COMMIT").await?;
        // Corrects sqlx's count of open transactions; the queued ROLLBACK finds none.
        MySqlTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), sqlx::migrate::MigrateError> {
        // On a pool of its own: a run that fails would leave its lock on a connection of the application's.
        let own = PoolOptions::<Self>::new().max_connections(1).connect_with((*pool.connect_options()).clone()).await?;
        let done = super::migrator(include_str!("../../migrations/mysql/0001_lockkit.sql")).run(&own).await;
        own.close().await;
        done
    }
}

// ---- leases ----------------------------------------------------------------------------------------------------

/// Bit 63 of the answer says that the lease is held; the rest is then the time left.
const HELD: u64 = 1 << 63;

/// Takes the lease or says how long it is held, in the OK packet alone.
///
/// Assignments run from left to right and see the values already assigned, so their order matters. Should the
/// statement wait for the row after all, its clock is older than the grant, which only makes the lease shorter.
macro_rules! acquire {
    ($source:literal) => {
        concat!(
            "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
             INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
             SELECT c.name, c.token, c.holder, LAST_INSERT_ID(", now!(), "), ", now!(), ", ", now!(), " + c.ttl
             FROM (SELECT ? AS name, ? AS token, ? AS holder, ? AS ttl) AS c ", $source, "
             ON DUPLICATE KEY UPDATE
                 fence = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN LAST_INSERT_ID(lockkit_lease.fence)
                     WHEN lockkit_lease.expires_us <= ", now!(), "
                         THEN LAST_INSERT_ID(GREATEST(lockkit_lease.fence + 1, ", now!(), "))
                     ELSE lockkit_lease.fence
                         + 0 * LAST_INSERT_ID((1 << 63) | (lockkit_lease.expires_us - ", now!(), "))
                 END,
                 acquired_us = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.acquired_us
                     WHEN lockkit_lease.expires_us <= ", now!(), " THEN ", now!(), "
                     ELSE lockkit_lease.acquired_us
                 END,
                 renewals = CASE
                     WHEN lockkit_lease.token <=> VALUES(token) THEN lockkit_lease.renewals + 1
                     WHEN lockkit_lease.expires_us <= ", now!(), " THEN 0
                     ELSE lockkit_lease.renewals
                 END,
                 holder = IF(lockkit_lease.expires_us <= ", now!(), ", VALUES(holder), lockkit_lease.holder),
                 token = IF(lockkit_lease.expires_us <= ", now!(), ", VALUES(token), lockkit_lease.token),
                 expires_us = IF(lockkit_lease.token <=> VALUES(token), VALUES(expires_us), lockkit_lease.expires_us)"
        )
    };
}

/// MariaDB refuses to wait by the setting at the front; MySQL, where INSERT has no such setting, by first locking the
/// row with NOWAIT in the same statement.
const ACQUIRE: &str = acquire!("/*!80000 LEFT JOIN lockkit_lease AS l ON l.name = c.name FOR UPDATE OF l NOWAIT */");

/// Without that lock. Looking for a row that is not there yet locks the gap around it, so two first grants of
/// neighbouring names can deadlock; the insert alone cannot.
const ACQUIRE_NEW: &str = acquire!("");

async fn acquire(conn: &mut MySqlConnection, sql: &'static str, claim: &Claim) -> sqlx::Result<u64> {
    let done = sqlx::query(sql)
        .bind(claim.key.as_bytes())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.holder.as_bytes())
        .bind(micros(claim.ttl))
        .execute(conn)
        .await?;
    Ok(done.last_insert_id())
}

impl LeaseOps for MySql {
    async fn lease_acquire(conn: &mut MySqlConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        let answer = match acquire(conn, ACQUIRE, claim).await {
            Err(err) if Self::fault(&err) == Fault::Deadlock => acquire(conn, ACQUIRE_NEW, claim).await?,
            answer => answer?,
        };
        if answer & HELD == 0 {
            return Ok(Acquired::Granted(answer.into()));
        }
        Ok(Acquired::Held { free_in: Some(Duration::from_micros(answer & !HELD)), by: None })
    }

    async fn lease_look(conn: &mut MySqlConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = ? AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_bytes())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE (
                 SELECT name FROM lockkit_lease
                 WHERE name = ? AND token = ? AND expires_us > ",
            now!(),
            "
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l ON l.name = mine.name
             SET l.expires_us = ",
            now!(),
            " + ?, l.renewals = l.renewals + 1"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(&mut *conn)
        .await?;
        scoped(conn, done.rows_affected(), key, token).await
    }

    async fn lease_release(conn: &mut MySqlConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE (
                 SELECT name FROM lockkit_lease
                 WHERE name = ? AND token = ? AND expires_us > ",
            now!(),
            "
                 LIMIT 1
                 FOR UPDATE SKIP LOCKED
             ) AS mine
             STRAIGHT_JOIN lockkit_lease AS l ON l.name = mine.name
             SET l.token = NULL, l.expires_us = 0"
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(&mut *conn)
        .await?;
        scoped(conn, done.rows_affected(), key, token).await
    }

    async fn lease_pin(conn: &mut MySqlConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = GREATEST(expires_us, ",
            now!(),
            " + ?), renewals = renewals + 1
             WHERE name = ? AND token = ? AND expires_us > ",
            now!()
        ))
        .bind(micros(ttl))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut MySqlConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = ? AND token = ? AND expires_us > ",
            now!()
        ))
        .bind(key.as_bytes())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut MySqlConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name >= ? AND LEFT(name, LENGTH(?)) = ? AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT ?"
        ))
        .bind(prefix.as_bytes())
        .bind(prefix.as_bytes())
        .bind(prefix.as_bytes())
        .bind(limit)
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut MySqlConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A DELETE by expiry alone would lock every row that it reads, so the names are read first, without locks.
        let names: Vec<Vec<u8>> = sqlx::query_scalar(concat!(
            "SELECT name FROM lockkit_lease
             WHERE expires_us < ",
            now!(),
            " - ? AND fence < ",
            now!(),
            " - ?
             ORDER BY name
             LIMIT ?"
        ))
        .bind(micros(retention))
        .bind(micros(retention))
        .bind(limit)
        .fetch_all(&mut *conn)
        .await?;
        if names.is_empty() {
            return Ok(0);
        }
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let sql = format!(
            concat!(
                "DELETE FROM lockkit_lease
                 WHERE expires_us < ",
                now!(),
                " - ? AND fence < ",
                now!(),
                " - ? AND name IN ({})"
            ),
            vec!["?"; names.len()].join(", "),
        );
        let mut delete = sqlx::query(AssertSqlSafe(sql)).bind(micros(retention)).bind(micros(retention));
        for name in names {
            delete = delete.bind(name);
        }
        Ok(delete.execute(conn).await?.rows_affected())
    }
}

fn held(row: &MySqlRow) -> sqlx::Result<Held> {
    // Text in VARBINARY columns is bytes to the driver.
    let text = |column| row.try_get::<Vec<u8>, _>(column).map(|it| String::from_utf8_lossy(&it).into_owned());
    super::held(
        &text("name")?,
        row.try_get("token")?,
        text("holder")?,
        row.try_get("fence")?,
        row.try_get("acquired_us")?,
        row.try_get("left_us")?,
        row.try_get("renewals")?,
    )
}

/// No row was changed: was the lease lost, or is its row locked by a transaction that pins it?
async fn scoped(conn: &mut MySqlConnection, changed: u64, key: &Key, token: Token) -> sqlx::Result<Scoped> {
    if changed > 0 {
        return Ok(Scoped::Done);
    }
    let held = MySql::lease_look(conn, key).await?;
    Ok(if held.is_some_and(|it| it.token == token) { Scoped::Busy } else { Scoped::Gone })
}

// ---- row locks ---------------------------------------------------------------------------------------------------

impl RowOps for MySql {
    async fn row_lock(
        conn: &mut MySqlConnection,
        query: &RowQuery,
        arguments: MySqlArguments,
    ) -> sqlx::Result<Vec<MySqlRow>> {
        let (before, hint) = bounded(query.wait);
        let strength = match query.strength {
            Strength::Share => "/*M! LOCK IN SHARE MODE */ /*!80000 FOR SHARE */",
            Strength::Update | Strength::KeyChange => "FOR UPDATE",
        };
        let waiting = match query.wait {
            _ if query.skip_locked => "SKIP LOCKED",
            Wait::Never => "NOWAIT",
            Wait::AtMost(_) | Wait::Forever => "",
        };
        let sql = format!("{before}{} {strength} {waiting}", selection(query, &hint));
        sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(conn).await
    }

    async fn row_scan(
        conn: &mut MySqlConnection,
        query: &RowQuery,
        arguments: &MySqlArguments,
    ) -> sqlx::Result<Option<String>> {
        // Without the locking clause: MariaDB's EXPLAIN of a locking read by key waits for the row itself.
        let sql = format!("EXPLAIN FORMAT=TRADITIONAL {}", selection(query, ""));
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments.clone()).fetch_all(conn).await?;
        for row in &rows {
            let text = |column| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
            let (access, keys) = (text("type")?, text("possible_keys")?);
            // The optimizer prefers a scan on a small table even where an index could serve.
            if matches!(&*access, "ALL" | "index") && keys.is_empty() {
                return Ok(Some(format!("type={access}, possible_keys=NULL, extra={}", text("Extra")?)));
            }
        }
        Ok(None)
    }
}

fn placeholder(_number: usize) -> String {
    "?".to_owned()
}

fn selection(query: &RowQuery, hint: &str) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {hint}{columns} FROM `{}` AS r WHERE {} {}",
        query.table,
        matching(&query.by, 1, '`', placeholder),
        order_and_limit(query, '`'),
    )
}

/// How each server is told to give up waiting: MariaDB before the statement, MySQL by a hint inside it.
/// Neither takes a bound value, so the text is rounded up to two digits to keep the number of statements small.
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

// ---- named locks -------------------------------------------------------------------------------------------------

impl NamedOps for MySql {
    async fn named_lock(conn: &mut MySqlConnection, key: &Key, wait: Wait) -> sqlx::Result<bool> {
        let (before, hint) = bounded(wait);
        if wait != Wait::Forever {
            let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
            let sql = format!("{before}SELECT {hint}1 FROM lockkit_named WHERE name = ? FOR UPDATE {waiting}");
            let row = sqlx::query(AssertSqlSafe(sql)).bind(key.as_bytes()).fetch_optional(&mut *conn).await?;
            if row.is_some() {
                return Ok(true);
            }
        }
        // One statement locks the row whether or not it is there: no look before it that would lock the gap, and an
        // exclusive lock on the duplicate where a plain INSERT takes a shared one.
        let sql = format!("{before}INSERT INTO lockkit_named (name) VALUES (?) ON DUPLICATE KEY UPDATE name = name");
        sqlx::query(AssertSqlSafe(sql)).bind(key.as_bytes()).execute(conn).await?;
        Ok(true)
    }
}

// ---- versions ----------------------------------------------------------------------------------------------------

impl VersionOps for MySql {
    async fn version_read(
        conn: &mut MySqlConnection,
        query: &VersionQuery,
        arguments: MySqlArguments,
    ) -> sqlx::Result<Option<(MySqlRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let sql = format!(
            "SELECT r.*, CAST(r.`{version}` AS CHAR) AS lockkit_version FROM `{table}` AS r WHERE {}",
            matching(by, 1, '`', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let text: String = row.try_get("lockkit_version")?;
        let is_number = row.try_column(version.as_str())?.type_info().name().contains("INT");
        let version = super::version(is_number, text)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut MySqlConnection,
        query: &VersionQuery,
        mut arguments: MySqlArguments,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let filter = matching(by, 1, '`', placeholder);
        let again = arguments.clone();
        let (next, current) = match expected {
            Version::Number(number) => {
                arguments.add(*number).map_err(sqlx::Error::Encode)?;
                (format!("`{version}` + 1"), format!("`{version}` = ?"))
            }
            Version::Timestamp(text) => {
                arguments.add(text.as_str()).map_err(sqlx::Error::Encode)?;
                // The smallest step that the column's precision keeps.
                (
                    format!(
                        "GREATEST(UTC_TIMESTAMP(6), `{version}` + INTERVAL CASE
                             WHEN MICROSECOND(`{version}`) = 0 THEN 1000000
                             WHEN MICROSECOND(`{version}`) % 1000 = 0 THEN 1000
                             ELSE 1 END MICROSECOND)"
                    ),
                    format!("CAST(`{version}` AS CHAR) = ?"),
                )
            }
        };
        let sql = format!("UPDATE `{table}` SET `{version}` = {next} WHERE {filter} AND {current}");
        let done = sqlx::query_with(AssertSqlSafe(sql), arguments).execute(&mut *conn).await?;
        match expected {
            _ if done.rows_affected() == 0 => Ok(None),
            Version::Number(number) => Ok(number.checked_add(1).map(Version::Number)),
            Version::Timestamp(_) => {
                let sql = format!("SELECT CAST(`{version}` AS CHAR) FROM `{table}` WHERE {filter}");
                let text = sqlx::query_scalar_with(AssertSqlSafe(sql), again).fetch_one(conn).await?;
                Ok(Some(Version::Timestamp(text)))
            }
        }
    }
}

impl super::sealed::Sealed for MySqlQueryResult {}

impl RowsAffected for MySqlQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}
