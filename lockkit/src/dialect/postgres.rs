//! PostgreSQL 12 and later: the statements, and what its SQLSTATEs mean.

use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::{
    Arguments, AssertSqlSafe, Column, Executor, PgConnection, Pool, Postgres, Row, SqlStr, TypeInfo,
    pool::PoolOptions,
    postgres::{PgArguments, PgDatabaseError, PgQueryResult, PgRow, PgTransactionManager},
};
use sqlx_core::transaction::TransactionManager;

use super::{
    AsConnection, Columns, Dialect, LeaseOps, NamedOps, RowOps, RowQuery, RowsAffected, Strength, VersionOps, VersionQuery,
    connection_fault, duration, fence, matching, micros, order_and_limit,
};
use crate::{
    error::{Fault, HolderInfo},
    key::Key,
    policy::Wait,
    store::{Acquired, Claim, Held, Scoped, Token},
    version::Version,
};

/// The server's clock in microseconds, read anew wherever it stands: `now()` would be the start of the transaction,
/// long past in a statement that waited.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}

// ---- faults and transactions ---------------------------------------------------------------------------------

pub(super) fn fault_of(err: &PgDatabaseError) -> Fault {
    // https://www.postgresql.org/docs/current/errcodes-appendix.html
    match err.code() {
        "55P03" => Fault::Contended,
        "40P01" => Fault::Deadlock,
        "40001" => Fault::Serialization,
        "23505" => Fault::Duplicate,
        "42P01" | "42703" | "3F000" => Fault::NoTable,
        "25P01" | "25P02" => Fault::NoTransaction,
        "25006" => Fault::ReadOnly,
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "08006" | "08003" => Fault::Unavailable,
        _ => Fault::Other,
    }
}

impl super::sealed::Sealed for Postgres {}
impl super::sealed::Sealed for PgConnection {}

impl AsConnection<Postgres> for PgConnection {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Dialect for Postgres {
    fn fault(err: &sqlx::Error) -> Fault {
        match err {
            sqlx::Error::Database(err) => err.try_downcast_ref().map_or(Fault::Other, fault_of),
            other => connection_fault(other),
        }
    }

    async fn begin(conn: &mut PgConnection, _wait: Wait) -> sqlx::Result<()> {
        PgTransactionManager::begin(conn, Some(SqlStr::from_static("BEGIN ISOLATION LEVEL READ COMMITTED"))).await
    }

    async fn commit(conn: &mut PgConnection) -> sqlx::Result<()> {
        // A COMMIT of a failed transaction answers success and rolls back. In one message with a SELECT before it,
        // the SELECT fails instead and the COMMIT is not run. The chained transaction is empty; it gives the queued
        // ROLLBACK that corrects sqlx's count of open transactions something to end.
        conn.execute("SELECT 1; COMMIT AND CHAIN").await?;
        PgTransactionManager::start_rollback(conn);
        Ok(())
    }

    async fn migrate(pool: &Pool<Self>) -> Result<(), sqlx::migrate::MigrateError> {
        // On a pool of its own: a run that fails would leave its lock on a connection of the application's.
        let own = PoolOptions::<Self>::new().max_connections(1).connect_with((*pool.connect_options()).clone()).await?;
        let done = super::migrator(include_str!("../../migrations/postgres/0001_lockkit.sql")).run(&own).await;
        own.close().await;
        done
    }
}

// ---- leases ----------------------------------------------------------------------------------------------------

impl LeaseOps for Postgres {
    async fn lease_acquire(conn: &mut PgConnection, claim: &Claim) -> sqlx::Result<Acquired> {
        // A held lease is only read: an INSERT … ON CONFLICT DO UPDATE … WHERE would lock the row, take a
        // transaction id and wait for the disk each time it fails.
        let row = sqlx::query(concat!(
            "WITH free AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND (expires_us <= ",
            now!(),
            " OR token = $2)
                 FOR NO KEY UPDATE SKIP LOCKED
             ), taken AS (
                 UPDATE lockkit_lease AS l
                 SET fence = CASE WHEN l.token = $2 THEN l.fence ELSE greatest(l.fence + 1, ",
            now!(),
            ") END,
                     acquired_us = CASE WHEN l.token = $2 THEN l.acquired_us ELSE ",
            now!(),
            " END,
                     renewals = CASE WHEN l.token = $2 THEN l.renewals + 1 ELSE 0 END,
                     token = $2, holder = $3, expires_us = ",
            now!(),
            " + $4
                 FROM free
                 WHERE l.name = free.name
                 RETURNING l.fence
             ), made AS (
                 INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us)
                 SELECT $1, $2, $3, ",
            now!(),
            ", ",
            now!(),
            ", ",
            now!(),
            " + $4
                 WHERE NOT EXISTS (SELECT FROM lockkit_lease WHERE name = $1)
                 ON CONFLICT DO NOTHING
                 RETURNING fence
             )
             SELECT true AS granted, fence, '' AS holder, 0::bigint AS left_us FROM taken
             UNION ALL
             SELECT true, fence, '', 0 FROM made
             UNION ALL
             SELECT false, fence, holder, expires_us - ",
            now!(),
            " FROM lockkit_lease
             WHERE name = $1 AND NOT EXISTS (SELECT FROM taken) AND NOT EXISTS (SELECT FROM made)"
        ))
        .bind(claim.key.as_str())
        .bind(claim.token.as_bytes().as_slice())
        .bind(&*claim.holder)
        .bind(micros(claim.ttl))
        .fetch_optional(conn)
        .await?;
        let Some(row) = row else {
            // Another process made the row at this moment.
            return Ok(Acquired::Held { free_in: None, by: None });
        };
        let number = fence(row.try_get("fence")?);
        if row.try_get("granted")? {
            return Ok(Acquired::Granted(number));
        }
        let left = duration(row.try_get("left_us")?);
        if left.is_zero() {
            // Expired, but somebody has the row locked.
            return Ok(Acquired::Held { free_in: None, by: None });
        }
        let by = HolderInfo::new(row.try_get("holder")?, number, left);
        Ok(Acquired::Held { free_in: Some(left), by: Some(by) })
    }

    async fn lease_look(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Option<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE name = $1 AND token IS NOT NULL AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .fetch_optional(conn)
        .await?
        .map(|row| held(&row))
        .transpose()
    }

    async fn lease_renew(conn: &mut PgConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<Scoped> {
        let row = sqlx::query(concat!(
            "WITH mine AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            "
                 FOR NO KEY UPDATE SKIP LOCKED
             ), renewed AS (
                 UPDATE lockkit_lease AS l SET expires_us = ",
            now!(),
            " + $3, renewals = l.renewals + 1
                 FROM mine WHERE l.name = mine.name
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM renewed) AS done,
                 EXISTS (SELECT FROM lockkit_lease WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            ") AS held"
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .fetch_one(conn)
        .await?;
        scoped(&row)
    }

    async fn lease_release(conn: &mut PgConnection, key: &Key, token: Token) -> sqlx::Result<Scoped> {
        // Not waiting for the disk is safe here: a release that a crash undoes is one that waits out its ttl.
        let row = sqlx::query(concat!(
            "WITH mine AS MATERIALIZED (
                 SELECT name FROM lockkit_lease
                 WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            "
                   AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
                 FOR NO KEY UPDATE SKIP LOCKED
             ), freed AS (
                 UPDATE lockkit_lease AS l SET token = NULL, expires_us = 0
                 FROM mine WHERE l.name = mine.name
                 RETURNING 1
             )
             SELECT EXISTS (SELECT FROM freed) AS done,
                 EXISTS (SELECT FROM lockkit_lease WHERE name = $1 AND token = $2 AND expires_us > ",
            now!(),
            ") AS held"
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .fetch_one(conn)
        .await?;
        scoped(&row)
    }

    async fn lease_pin(conn: &mut PgConnection, key: &Key, token: Token, ttl: Duration) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET expires_us = greatest(expires_us, ",
            now!(),
            " + $3), renewals = renewals + 1
             WHERE name = $1 AND token = $2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(ttl))
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_give_up(conn: &mut PgConnection, key: &Key, token: Token) -> sqlx::Result<bool> {
        let done = sqlx::query(concat!(
            "UPDATE lockkit_lease
             SET token = NULL, expires_us = 0
             WHERE name = $1 AND token = $2 AND expires_us > ",
            now!()
        ))
        .bind(key.as_str())
        .bind(token.as_bytes().as_slice())
        .execute(conn)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn lease_list(conn: &mut PgConnection, prefix: &str, limit: u32) -> sqlx::Result<Vec<Held>> {
        sqlx::query(concat!(
            "SELECT name, token, holder, fence, acquired_us, expires_us - ",
            now!(),
            " AS left_us, renewals
             FROM lockkit_lease
             WHERE starts_with(name, $1) AND name >= $1 AND token IS NOT NULL AND expires_us > ",
            now!(),
            "
             ORDER BY name
             LIMIT $2"
        ))
        .bind(prefix)
        .bind(i64::from(limit))
        .fetch_all(conn)
        .await?
        .iter()
        .map(held)
        .collect()
    }

    async fn lease_sweep(conn: &mut PgConnection, retention: Duration, limit: u32) -> sqlx::Result<u64> {
        // A fence above the clock must not be forgotten: the next one is made from the clock.
        let done = sqlx::query(concat!(
            "DELETE FROM lockkit_lease
             WHERE name IN (
                 SELECT name FROM lockkit_lease
                 WHERE expires_us < ",
            now!(),
            " - $1 AND fence < ",
            now!(),
            " - $1
                 ORDER BY name
                 LIMIT $2
                 FOR UPDATE SKIP LOCKED
             )"
        ))
        .bind(micros(retention))
        .bind(i64::from(limit))
        .execute(conn)
        .await?;
        Ok(done.rows_affected())
    }
}

fn held(row: &PgRow) -> sqlx::Result<Held> {
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

fn scoped(row: &PgRow) -> sqlx::Result<Scoped> {
    Ok(match (row.try_get("done")?, row.try_get("held")?) {
        (true, _) => Scoped::Done,
        (false, true) => Scoped::Busy,
        (false, false) => Scoped::Gone,
    })
}

// ---- row locks ---------------------------------------------------------------------------------------------------

impl RowOps for Postgres {
    async fn row_lock(
        conn: &mut PgConnection,
        query: &RowQuery,
        mut arguments: PgArguments,
    ) -> sqlx::Result<Vec<PgRow>> {
        let strength = match query.strength {
            Strength::Share => "FOR SHARE",
            Strength::Update => "FOR NO KEY UPDATE",
            Strength::KeyChange => "FOR UPDATE",
        };
        let skip = if query.skip_locked { "SKIP LOCKED" } else { "" };
        let sql = match query.wait {
            Wait::Forever => format!("{} {strength} OF r {skip}", selection(query, "")),
            Wait::Never => {
                let never = if query.skip_locked { skip } else { "NOWAIT" };
                format!("{} {strength} OF r {never}", selection(query, ""))
            }
            Wait::AtMost(_) => {
                // One message: set the bound, lock, put the old bound back. The last filter depends on no row, so it
                // is evaluated once and first; it counts `locked`, which locks every row; and only then resets.
                let bound = arguments.len() + 1;
                let select = selection(query, "bound, ");
                arguments.add(lock_timeout(query.wait)).map_err(sqlx::Error::Encode)?;
                format!(
                    "WITH was AS MATERIALIZED (
                         SELECT current_setting('lock_timeout') AS v
                     ), bound AS MATERIALIZED (
                         SELECT set_config('lock_timeout', ${bound}, true) FROM was
                     ), locked AS MATERIALIZED (
                         {select} {strength} OF r {skip}
                     ), restored AS MATERIALIZED (
                         SELECT set_config('lock_timeout', was.v, true) AS v
                         FROM was, (SELECT count(*) AS n FROM locked) AS c
                         WHERE c.n >= 0
                     )
                     SELECT locked.* FROM locked WHERE (SELECT v FROM restored) IS NOT NULL"
                )
            }
        };
        sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(conn).await
    }

    async fn row_scan(
        conn: &mut PgConnection,
        query: &RowQuery,
        arguments: &PgArguments,
    ) -> sqlx::Result<Option<String>> {
        let lines: Vec<String> = sqlx::query_scalar_with(
            AssertSqlSafe(format!("EXPLAIN (COSTS OFF) {}", selection(query, ""))),
            arguments.clone(),
        )
        .fetch_all(&mut *conn)
        .await?;
        if !lines.iter().any(|it| it.contains("Seq Scan on")) {
            return Ok(None);
        }
        // The planner prefers a scan on a small table even where an index could serve: ask the catalogue.
        let columns: Vec<_> = query.by.iter().map(|it| it.column.as_str().to_owned()).collect();
        let served: bool = sqlx::query_scalar(
            "SELECT EXISTS (
                 SELECT FROM pg_index AS i
                 JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                 WHERE i.indrelid = to_regclass($1) AND i.indisvalid AND i.indpred IS NULL AND a.attname = ANY ($2)
             )",
        )
        .bind(format!("\"{}\"", query.table))
        .bind(columns)
        .fetch_one(conn)
        .await?;
        Ok((!served).then(|| lines.join("; ")))
    }
}

fn placeholder(number: usize) -> String {
    format!("${number}")
}

/// The selection without its lock, from the table joined to what `before` names.
fn selection(query: &RowQuery, before: &str) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {columns} FROM {before}\"{}\" AS r WHERE {} {}",
        query.table,
        matching(&query.by, 1, '"', placeholder),
        order_and_limit(query, '"'),
    )
}

fn lock_timeout(wait: Wait) -> String {
    format!("{}ms", wait.millis().unwrap_or(0))
}

// ---- named locks -------------------------------------------------------------------------------------------------

impl NamedOps for Postgres {
    async fn named_lock(conn: &mut PgConnection, key: &Key, wait: Wait) -> sqlx::Result<bool> {
        let number = advisory_number(key);
        let granted = match wait {
            Wait::Forever => {
                sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(number).execute(conn).await?;
                true
            }
            Wait::Never => {
                sqlx::query_scalar("SELECT pg_try_advisory_xact_lock($1)").bind(number).fetch_one(conn).await?
            }
            Wait::AtMost(_) => {
                // The value that is put back depends on the lock, so it is put back after the wait.
                sqlx::query(
                    "WITH was AS MATERIALIZED (
                         SELECT current_setting('lock_timeout') AS v
                     ), bound AS MATERIALIZED (
                         SELECT was.v, set_config('lock_timeout', $2, true) FROM was
                     )
                     SELECT set_config(
                         'lock_timeout', CASE WHEN pg_advisory_xact_lock($1) IS NULL THEN v ELSE v END, true
                     ) FROM bound",
                )
                .bind(number)
                .bind(lock_timeout(wait))
                .execute(conn)
                .await?;
                true
            }
        };
        Ok(granted)
    }
}

/// 64 bits of SHA-256 of the key, in a namespace of lockkit's own among the advisory locks of the database.
fn advisory_number(key: &Key) -> i64 {
    let digest = Sha256::new().chain_update(b"lockkit:named:").chain_update(key.as_bytes()).finalize();
    let (first, _) = digest.as_slice().split_at(8);
    first.iter().fold(0, |number, byte| number << 8 | i64::from(*byte))
}

// ---- versions ----------------------------------------------------------------------------------------------------

impl VersionOps for Postgres {
    async fn version_read(
        conn: &mut PgConnection,
        query: &VersionQuery,
        arguments: PgArguments,
    ) -> sqlx::Result<Option<(PgRow, Version)>> {
        let VersionQuery { table, by, version } = query;
        let sql = format!(
            "SELECT *, \"{version}\"::text AS lockkit_version FROM \"{table}\" WHERE {}",
            matching(by, 1, '"', placeholder),
        );
        let Some(row) = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await? else {
            return Ok(None);
        };
        let text: String = row.try_get("lockkit_version")?;
        let is_number = row.try_column(version.as_str())?.type_info().name().starts_with("INT");
        let version = super::version(is_number, text)?;
        Ok(Some((row, version)))
    }

    async fn version_bump(
        conn: &mut PgConnection,
        query: &VersionQuery,
        mut arguments: PgArguments,
        expected: &Version,
    ) -> sqlx::Result<Option<Version>> {
        let VersionQuery { table, by, version } = query;
        let (last, filter) = (arguments.len() + 1, matching(by, 1, '"', placeholder));
        let (next, current) = match expected {
            Version::Number(_) => (format!("\"{version}\" + 1"), format!("\"{version}\" = ${last}")),
            // The smallest step that the column's precision keeps; the text is exact where a float would not be.
            Version::Timestamp(_) => (
                format!(
                    "greatest(clock_timestamp(), \"{version}\"::timestamptz + CASE
                         WHEN (extract(microseconds FROM \"{version}\")::bigint) % 1000000 = 0 THEN interval '1 second'
                         WHEN (extract(microseconds FROM \"{version}\")::bigint) % 1000 = 0 THEN interval '1 millisecond'
                         ELSE interval '1 microsecond' END)"
                ),
                format!("\"{version}\"::text = ${last}"),
            ),
        };
        match expected {
            Version::Number(number) => arguments.add(*number),
            Version::Timestamp(text) => arguments.add(text.clone()),
        }
        .map_err(sqlx::Error::Encode)?;
        let sql = format!(
            "UPDATE \"{table}\" SET \"{version}\" = {next} WHERE {filter} AND {current} RETURNING \"{version}\"::text"
        );
        let text: Option<String> = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_optional(conn).await?;
        text.map(|it| super::version(matches!(expected, Version::Number(_)), it)).transpose()
    }
}

impl super::sealed::Sealed for PgQueryResult {}

impl RowsAffected for PgQueryResult {
    fn affected(&self) -> u64 {
        self.rows_affected()
    }
}
