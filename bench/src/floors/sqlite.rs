//! The floors on SQLite.

use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{Sqlite, SqliteConnection, SqlitePool, Transaction};

use super::{Counted, Floor, StoredByHand, pool_options};
use crate::job::Job;

/// Microseconds since 1970.
const LEASE_CLAIM: &str = "
    INSERT INTO bench_lease (name, token, fence, expires_us)
    VALUES (?1, ?2, 1, CAST(unixepoch('subsec') * 1000000 AS INTEGER) + 30000000)
    ON CONFLICT (name) DO UPDATE
    SET token = ?2, fence = fence + 1, expires_us = CAST(unixepoch('subsec') * 1000000 AS INTEGER) + 30000000
    WHERE expires_us <= CAST(unixepoch('subsec') * 1000000 AS INTEGER)
    RETURNING fence";
const LEASE_RELEASE: &str = "UPDATE bench_lease SET token = NULL, expires_us = 0 WHERE name = ?1 AND token = ?2";
// BEGIN IMMEDIATE has locked the whole file.
const ROW_READ: &str = "SELECT value FROM bench_row WHERE id = ?1";
const ROW_WRITE: &str = "UPDATE bench_row SET value = ?2 WHERE id = ?1";
const VERSION_READ: &str = "SELECT value, version FROM bench_row WHERE id = ?1";
const VERSION_WRITE: &str = "UPDATE bench_row SET value = ?2, version = version + 1 WHERE id = ?1 AND version = ?3";
const ANSWER_READ: &str =
    "SELECT fingerprint, answer FROM bench_answer WHERE name = ?1 AND keep_until > unixepoch('subsec')";
const ANSWER_WRITE: &str = "
    INSERT INTO bench_answer (name, fingerprint, answer, keep_until) VALUES (?1, ?2, ?3, unixepoch('subsec') + 86400)
    ON CONFLICT (name) DO UPDATE
    SET fingerprint = excluded.fingerprint, answer = excluded.answer, keep_until = excluded.keep_until";
const STOCK_TAKE: &str = "UPDATE bench_stock SET quantity = quantity - 1 WHERE id = 0 AND quantity >= 1";

impl Floor for Sqlite {
    const TABLES: &'static [&'static str] = &[
        "CREATE TABLE bench_lease (
             name TEXT PRIMARY KEY, token BLOB, fence INTEGER NOT NULL, expires_us INTEGER NOT NULL
         ) STRICT, WITHOUT ROWID",
        "CREATE TABLE bench_row (
             id INTEGER PRIMARY KEY, value INTEGER NOT NULL, version INTEGER NOT NULL
         ) STRICT",
        "CREATE TABLE bench_stock (id INTEGER PRIMARY KEY, quantity INTEGER NOT NULL) STRICT",
        "CREATE TABLE bench_answer (
             name TEXT PRIMARY KEY, fingerprint BLOB NOT NULL, answer TEXT NOT NULL, keep_until REAL NOT NULL
         ) STRICT, WITHOUT ROWID",
        "CREATE INDEX bench_answer_keep ON bench_answer (keep_until)",
    ];

    async fn open(job: &Job) -> sqlx::Result<SqlitePool> {
        let synchronous = if job.durable { SqliteSynchronous::Full } else { SqliteSynchronous::Off };
        let options = job
            .url
            .parse::<SqliteConnectOptions>()?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .busy_timeout(Duration::from_secs(60));
        pool_options(job).connect_with(options).await
    }

    async fn lease_claim(pool: &SqlitePool, name: &str, token: &[u8]) -> sqlx::Result<Option<u64>> {
        let fence: Option<i64> = sqlx::query_scalar(LEASE_CLAIM).bind(name).bind(token).fetch_optional(pool).await?;
        Ok(fence.map(i64::unsigned_abs))
    }

    async fn lease_free(pool: &SqlitePool, name: &str, token: &[u8]) -> sqlx::Result<()> {
        sqlx::query(LEASE_RELEASE).bind(name).bind(token).execute(pool).await.map(drop)
    }

    async fn open_transaction(pool: &SqlitePool) -> sqlx::Result<Transaction<'static, Self>> {
        pool.begin_with("BEGIN IMMEDIATE").await
    }

    async fn end_transaction(tx: Transaction<'static, Self>) -> sqlx::Result<()> {
        tx.commit().await
    }

    async fn row_lock_by_hand(conn: &mut SqliteConnection, id: i64) -> sqlx::Result<i64> {
        Self::row_read(conn, id).await
    }

    async fn row_write(conn: &mut SqliteConnection, id: i64, value: i64) -> sqlx::Result<()> {
        sqlx::query(ROW_WRITE).bind(id).bind(value).execute(conn).await.map(drop)
    }

    async fn row_read(conn: &mut SqliteConnection, id: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar(ROW_READ).bind(id).fetch_one(conn).await
    }

    async fn name_lock(_: &mut SqliteConnection, _: &str) -> sqlx::Result<()> {
        Ok(())
    }

    async fn session_lock(_: &mut SqliteConnection, _: &str) -> sqlx::Result<bool> {
        Ok(false)
    }

    async fn session_unlock(_: &mut SqliteConnection, _: &str) -> sqlx::Result<()> {
        Ok(())
    }

    async fn row_with_version(pool: &SqlitePool, id: i64) -> sqlx::Result<(i64, i64)> {
        sqlx::query_as(VERSION_READ).bind(id).fetch_one(pool).await
    }

    async fn row_write_if(pool: &SqlitePool, id: i64, value: i64, version: i64) -> sqlx::Result<bool> {
        let written = sqlx::query(VERSION_WRITE).bind(id).bind(value).bind(version).execute(pool).await?;
        Ok(written.rows_affected() == 1)
    }

    async fn answer_lock(_: &mut SqliteConnection, _: &str) -> sqlx::Result<()> {
        Ok(())
    }

    async fn answer_read(pool: &SqlitePool, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(pool).await
    }

    async fn answer_read_locked(conn: &mut SqliteConnection, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(conn).await
    }

    async fn answer_write(
        conn: &mut SqliteConnection,
        name: &str,
        fingerprint: &[u8],
        answer: &str,
    ) -> sqlx::Result<()> {
        sqlx::query(ANSWER_WRITE).bind(name).bind(fingerprint).bind(answer).execute(conn).await.map(drop)
    }

    async fn stock_take(pool: &SqlitePool) -> sqlx::Result<bool> {
        Ok(sqlx::query(STOCK_TAKE).execute(pool).await?.rows_affected() == 1)
    }

    async fn counted(_: &mut SqliteConnection) -> sqlx::Result<Option<Counted>> {
        Ok(None)
    }
}
