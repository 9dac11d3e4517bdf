//! SQLite 3.42 and later: the statements, and what its extended result codes mean.
//!
//! SQLite has one lock for all writers of a database file. Every lock that lives in a transaction is that lock here.
//! Names are quoted by backticks: what stands in double quotes and is no column, SQLite takes for a string.

use std::time::Duration;

use sqlx::{
    Arguments, AssertSqlSafe, Pool, Row, SqlStr, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteError, SqliteQueryResult, SqliteRow, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use super::{
    AsConnection, Columns, Dialect, LeaseOps, NamedOps, RowOps, RowQuery, RowsAffected, VersionOps, VersionQuery, connection_fault,
    fence, matching, micros, order_and_limit,
};
use crate::{
    error::{Fault, HolderInfo},
    key::Key,
    policy::Wait,
    store::{Acquired, Claim, Held, Scoped, Token},
    version::Version,
};

/// The clock in microseconds, to the millisecond. It stands still during a statement, and starts after the wait for
/// the write lock.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000000 AS INTEGER)"
    };
}

// ---- faults and transactions ---------------------------------------------------------------------------------

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

impl Dialect for Sqlite {
    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn begin(conn: &mut SqliteConnection, wait: Wait) -> sqlx::Result<()> {
        // IMMEDIATE: a transaction that reads first and writes later fails at once when another one wrote in between.
        let statement = SqlStr::from_static("BEGIN IMMEDIATE");
        let old = busy_timeout(conn, wait).await?;
        let begun = SqliteTransactionManager::begin(conn, Some(statement)).await;
        restore_busy_timeout(conn, old).await?;
        begun
    }

    async fn commit(conn: &mut SqliteConnection) -> sqlx::Result<()> {
        SqliteTransactionManager::commit(conn).await
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), sqlx::migrate::MigrateError> {
        // On the pool itself: a database in memory is on no other connection.
        super::migrator(include_str!("../../migrations/sqlite/0001_lockkit.sql")).run(pool).await
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

// ---- leases ----------------------------------------------------------------------------------------------------

impl LeaseOps for Sqlite {
    async fn lease_acquire(conn: &mut SqliteConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        let number: Option<i64> = sqlx::query_scalar(concat!(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
             VALUES (?1, ?2, ?3, ",
            now!(),
            ", ",
            now!(),
            ", ",
            now!(),
            " + ?4)
             ON CONFLICT (name) DO UPDATE SET
                 fence = CASE WHEN token IS ?2 THEN fence ELSE max(fence + 1, ",
            now!(),
            ") END,
                 acquired_us = CASE WHEN token IS ?2 THEN acquired_us ELSE ",
            now!(),
            " END,
                 renewals = CASE WHEN token IS ?2 THEN renewals + 1 ELSE 0 END,
                 token = ?2, holder = ?3, expires_us = ",
            now!(),
            " + ?4
             WHERE expires_us <= ",
            now!(),
            " OR token IS ?2
             RETURNING fence"
        ))
        .bind(claim.key.as_str())
        .bind(claim.token.as_bytes().as_slice())
        .bind(&*claim.holder)
        .bind(micros(claim.ttl))
        .fetch_optional(&mut *conn)
        .await?;
        if let Some(number) = number {
            return Ok(Acquired::Granted(fence(number)));
        }
        let by = Self::lease_look(conn, &claim.key).await?.map(|Held { info, .. }| info);
        Ok(Acquired::Held {
            free_in: by.as_ref().map(|it| it.expires_in),
            by: by.map(|it| HolderInfo::new(it.holder, it.fence, it.expires_in)),
        })
    }

    async fn lease_look(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = ?1 AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut SqliteConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = ",
            now!(),
            " + ?3, renewals = renewals + 1
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(scoped(&done))
    }

    async fn lease_release(conn: &mut SqliteConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(scoped(&done))
    }

    async fn lease_pin(conn: &mut SqliteConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = max(expires_us, ",
            now!(),
            " + ?3), renewals = renewals + 1
             WHERE name = ?1 AND token = ?2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut SqliteConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        Ok(Self::lease_release(conn, key, token).await? == Scoped::Done)
    }

    async fn lease_list(conn: &mut SqliteConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT ?2"
        ))
        .bind(prefix)
        .bind(limit)
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut SqliteConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let done = sqlx::query(concat!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM lockkit_lease
                 WHERE expires_us < ",
            now!(),
            " - ?1 AND fence < ",
            now!(),
            " - ?1
                 ORDER BY name
                 LIMIT ?2
             )"
        ))
        .bind(micros(retention))
        .bind(limit)
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }
}

fn held(row: &SqliteRow) -> sqlx::Result<Held> {
    super::held(
        row.try_get("name")?,
        row.try_get("token")?,
        row.try_get("holder")?,
        row.try_get("fence")?,
        row.try_get("acquired_us")?,
        row.try_get("left_us")?,
        row.try_get("renewals")?,
    )
}

fn scoped(done: &SqliteQueryResult) -> Scoped {
    if done.rows_affected() == 1 { Scoped::Done } else { Scoped::Gone }
}

// ---- row locks ---------------------------------------------------------------------------------------------------

impl RowOps for Sqlite {
    async fn row_lock(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        arguments: SqliteArguments,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        let column = &query.by[0].column;
        let no_op = format!("UPDATE `{}` SET `{column}` = `{column}` WHERE 0", query.table);
        take_write_lock(conn, query.wait, no_op).await?;
        sqlx::query_with(AssertSqlSafe(selection(query)), arguments).fetch_all(conn).await
    }

    async fn row_scan(
        conn: &mut SqliteConnection,
        query: &RowQuery,
        arguments: &SqliteArguments,
    ) -> sqlx::Result<Option<String>> {
        // An EXPLAIN does not notice that another connection has made an index; a statement that runs does.
        let table = &query.table;
        sqlx::query(AssertSqlSafe(format!("SELECT 1 FROM `{table}` LIMIT 0"))).execute(&mut *conn).await?;
        let sql = format!("EXPLAIN QUERY PLAN {}", selection(query));
        let explain = sqlx::query_with(AssertSqlSafe(sql), arguments.clone()).persistent(false);
        let rows = explain.fetch_all(conn).await?;
        let steps = rows.iter().map(|it| it.try_get("detail")).collect::<sqlx::Result<Vec<String>>>()?;
        Ok(steps.iter().any(|it| it.starts_with("SCAN")).then(|| steps.join("; ")))
    }
}

fn placeholder(_number: usize) -> String {
    "?".to_owned()
}

fn selection(query: &RowQuery) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {columns} FROM `{}` AS r WHERE {} {}",
        query.table,
        matching(&query.by, 1, '`', placeholder),
        order_and_limit(query, '`'),
    )
}

// ---- named locks -------------------------------------------------------------------------------------------------

impl NamedOps for Sqlite {
    async fn named_lock(conn: &mut SqliteConnection, _key: &Key, wait: Wait) -> sqlx::Result<bool> {
        take_write_lock(conn, wait, "UPDATE lockkit_lease SET name = name WHERE 0".to_owned()).await?;
        Ok(true)
    }
}

// ---- versions ----------------------------------------------------------------------------------------------------

impl VersionOps for Sqlite {
    async fn version_read(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        arguments: SqliteArguments,
    ) -> sqlx::Result<Option<(SqliteRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let sql = format!(
            "SELECT *, CAST(`{version}` AS TEXT) AS lockkit_version, typeof(`{version}`) = 'integer' AS lockkit_number
             FROM `{table}` WHERE {}",
            matching(by, 1, '`', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let version = super::version(row.try_get("lockkit_number")?, row.try_get("lockkit_version")?)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut SqliteConnection,
        query: &VersionQuery,
        mut arguments: SqliteArguments,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let filter = matching(by, 1, '`', placeholder);
        let (next, current) = match expected {
            Version::Number(number) => {
                arguments.add(*number).map_err(sqlx::Error::Encode)?;
                (format!("`{version}` + 1"), format!("`{version}` = ?"))
            }
            Version::Timestamp(text) => {
                arguments.add(text.clone()).map_err(sqlx::Error::Encode)?;
                (
                    format!(
                        "max(strftime('%Y-%m-%d %H:%M:%f', 'now'),
                             strftime('%Y-%m-%d %H:%M:%f', `{version}`, '+0.001 seconds'))"
                    ),
                    format!("CAST(`{version}` AS TEXT) = ?"),
                )
            }
        };
        let sql = format!(
            "UPDATE `{table}` SET `{version}` = {next} WHERE {filter} AND {current}
             RETURNING CAST(`{version}` AS TEXT)"
        );
        let text: Option<String> = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await?;
        text.map(|it| super::version(matches!(expected, Version::Number(_)), it)).transpose()
    }
}

impl super::sealed::Sealed for SqliteQueryResult {}

impl RowsAffected for SqliteQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}
