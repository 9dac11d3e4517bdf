//! lockkit's tables on PostgreSQL, created in one transaction. It uses no prepared statement and no session lock, so it
//! works behind a pooler in transaction mode.
//!
//! Tables and history are those of `current_schema()`, where CREATE TABLE puts them. If a table in a later schema of
//! the search path counted, two services would share leases or not depending on which one started first.
//! `sqlx migrate run` keeps the same history but does not wait for a `migrate` at the same moment: one of the two may
//! fail, and can be repeated.

use sqlx::{
    AssertSqlSafe, Executor, PgConnection, Pool, Postgres, Row, SqlStr,
    migrate::{MigrateError, Migrator},
    raw_sql,
};

use super::advisory_number;
use crate::{
    sql::history::{Applied, HISTORY, Schema, failed, hex, migrated, migrator, schema},
    value::error::Error,
};

pub(super) async fn migrate(pool: &Pool<Postgres>) -> Result<(), Error> {
    let migrator = migrator::<Postgres>();
    let mut tx = pool.begin_with(SqlStr::from_static("BEGIN ISOLATION LEVEL READ COMMITTED")).await.map_err(failed)?;
    let home = home(&mut tx).await.map_err(failed)?;
    // In a savepoint: reading a history that does not exist, or may not be read, fails the transaction.
    tx.execute("SAVEPOINT lockkit").await.map_err(failed)?;
    let applied = history(&mut tx, &home).await;
    tx.execute("ROLLBACK TO SAVEPOINT lockkit").await.map_err(failed)?;
    let are_tables_there = are_tables_there(&mut tx).await.map_err(failed)?;
    if let Schema::UpToDate = schema::<Postgres>(&migrator, applied, are_tables_there)? {
        return tx.rollback().await.map_err(failed);
    }
    let done = match run(&mut tx, &home, &migrator).await {
        Ok(()) => tx.commit().await.map_err(MigrateError::from),
        Err(err) => Err(err),
    };
    migrated::<Postgres>(done, are_tables_there)
}

/// The schema of the tables and their history, quoted. It is the first schema of the search path, where a new table is
/// created. Tables further down the search path are not used: the result would depend on which service starts first.
async fn home(conn: &mut PgConnection) -> sqlx::Result<String> {
    let row = raw_sql("SELECT quote_ident(current_schema()) AS home").fetch_one(conn).await?;
    // NULL: creating the first table will fail with the reason.
    Ok(row.try_get::<Option<String>, _>("home")?.unwrap_or_else(|| "public".to_owned()))
}

async fn history(conn: &mut PgConnection, home: &str) -> sqlx::Result<Vec<Applied>> {
    let sql = format!("SELECT version, encode(checksum, 'hex') AS checksum, success FROM {home}.{HISTORY}");
    let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(conn).await?;
    let applied = rows.iter().map(|row| {
        let (number, checksum) = (row.try_get("version")?, row.try_get("checksum")?);
        Ok(Applied { number, checksum, is_complete: row.try_get("success")? })
    });
    applied.collect()
}

/// Whether each table exists with its newest column. Every user can read the catalogue.
async fn are_tables_there(conn: &mut PgConnection) -> sqlx::Result<bool> {
    let row = raw_sql(
        "SELECT count(*) = 5 AS there
         FROM pg_catalog.pg_attribute AS a
         JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid
         JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         WHERE n.nspname = current_schema() AND NOT a.attisdropped
           AND ((c.relname = 'lockkit_lease' AND a.attname = 'ttl_us')
             OR (c.relname = 'lockkit_stock' AND a.attname = 'quantity')
             OR (c.relname = 'lockkit_fence' AND a.attname = 'fence')
             OR (c.relname = 'lockkit_stock_batch' AND a.attname = 'number')
             OR (c.relname = 'lockkit_answer' AND a.attname = 'answer'))",
    )
    .fetch_one(conn)
    .await?;
    row.try_get("there")
}

/// Applies the missing migrations. The history has the same form as sqlx's.
async fn run(conn: &mut PgConnection, home: &str, migrator: &Migrator) -> Result<(), MigrateError> {
    let lock = format!("SELECT pg_advisory_xact_lock({})", advisory_number("migrate", &HISTORY.into()));
    conn.execute(AssertSqlSafe(lock)).await?;
    // While DDL waits for a transaction that has used the table, every other statement on the table queues behind it,
    // including renewals.
    let make = format!(
        "SET LOCAL lock_timeout = '500ms';
         SET LOCAL search_path = {home};
         CREATE TABLE IF NOT EXISTS {HISTORY} (
             version BIGINT PRIMARY KEY,
             description TEXT NOT NULL,
             installed_on TIMESTAMPTZ NOT NULL DEFAULT now(),
             success BOOLEAN NOT NULL,
             checksum BYTEA NOT NULL,
             execution_time BIGINT NOT NULL
         )"
    );
    conn.execute(AssertSqlSafe(make)).await?;
    let mut applied = history(conn, home).await?;
    let are_tables_there = are_tables_there(conn).await?;
    // An incomplete migration is run again; if a table was dropped, all migrations are. The statements are repeatable.
    if applied.iter().any(|it| !it.is_complete) {
        conn.execute(AssertSqlSafe(format!("DELETE FROM {HISTORY} WHERE NOT success"))).await?;
        applied.retain(|it| it.is_complete);
    }
    if migrator.iter().all(|it| applied.iter().any(|done| done.number == it.version)) && !are_tables_there {
        conn.execute(AssertSqlSafe(format!("DELETE FROM {HISTORY}"))).await?;
        applied.clear();
    }
    if let Some(other) = applied.iter().find(|it| !migrator.version_exists(it.number)) {
        return Err(MigrateError::VersionMissing(other.number));
    }
    for migration in migrator.iter() {
        let (number, checksum) = (migration.version, hex(&migration.checksum));
        match applied.iter().find(|it| it.number == number) {
            Some(done) if done.checksum == checksum => continue,
            Some(_) => return Err(MigrateError::VersionMismatch(number)),
            None => {}
        }
        let started = std::time::Instant::now();
        let failed = |err| MigrateError::ExecuteMigration(err, number);
        conn.execute(migration.sql.clone()).await.map_err(failed)?;
        let nanos = started.elapsed().as_nanos();
        let record = format!(
            "INSERT INTO {HISTORY} (version, description, success, checksum, execution_time)
             VALUES ({number}, '{}', true, decode('{checksum}', 'hex'), {nanos})",
            migration.description,
        );
        conn.execute(AssertSqlSafe(record)).await?;
    }
    Ok(())
}
