//! The floors on PostgreSQL.

use sqlx::{PgConnection, PgPool, Pool, Postgres, Row as _, Transaction};

use super::{Counted, Floor, StoredByHand, pool_options};
use crate::job::Job;

const LEASE_CLAIM: &str = "
    INSERT INTO bench_lease (name, token, fence, expires_at) VALUES ($1, $2, 1, now() + interval '30 s')
    ON CONFLICT (name) DO UPDATE SET token = $2, fence = bench_lease.fence + 1, expires_at = now() + interval '30 s'
    WHERE bench_lease.expires_at <= now()
    RETURNING fence";
const LEASE_RELEASE: &str =
    "UPDATE bench_lease SET token = NULL, expires_at = '-infinity' WHERE name = $1 AND token = $2";
const ROW_LOCK: &str = "SELECT value FROM bench_row WHERE id = $1 FOR UPDATE";
const ROW_READ: &str = "SELECT value FROM bench_row WHERE id = $1";
const ROW_WRITE: &str = "UPDATE bench_row SET value = $2 WHERE id = $1";
const NAME_LOCK: &str = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
const SESSION_LOCK: &str = "SELECT pg_advisory_lock(hashtextextended($1, 0))";
const SESSION_UNLOCK: &str = "SELECT pg_advisory_unlock(hashtextextended($1, 0))";
const VERSION_READ: &str = "SELECT value, version FROM bench_row WHERE id = $1";
const VERSION_WRITE: &str = "UPDATE bench_row SET value = $2, version = version + 1 WHERE id = $1 AND version = $3";
const ANSWER_READ: &str = "SELECT fingerprint, answer FROM bench_answer WHERE name = $1 AND keep_until > now()";
const ANSWER_WRITE: &str = "
    INSERT INTO bench_answer (name, fingerprint, answer, keep_until) VALUES ($1, $2, $3, now() + interval '24 h')
    ON CONFLICT (name) DO UPDATE
    SET fingerprint = excluded.fingerprint, answer = excluded.answer, keep_until = excluded.keep_until";
const STOCK_TAKE: &str = "UPDATE bench_stock SET quantity = quantity - 1 WHERE id = 0 AND quantity >= 1";
const COUNTED: &str = "SELECT xact_commit, xact_rollback FROM pg_stat_database WHERE datname = current_database()";

impl Floor for Postgres {
    const TABLES: &'static [&'static str] = &[
        "CREATE TABLE bench_lease (
             name text PRIMARY KEY, token bytea, fence bigint NOT NULL, expires_at timestamptz NOT NULL
         ) WITH (fillfactor = 50)",
        "CREATE TABLE bench_row (
             id bigint PRIMARY KEY, value bigint NOT NULL, version bigint NOT NULL
         ) WITH (fillfactor = 50)",
        "CREATE TABLE bench_stock (id bigint PRIMARY KEY, quantity bigint NOT NULL) WITH (fillfactor = 20)",
        "CREATE TABLE bench_answer (
             name text PRIMARY KEY, fingerprint bytea NOT NULL, answer text NOT NULL, keep_until timestamptz NOT NULL
         )",
        "CREATE INDEX bench_answer_keep ON bench_answer (keep_until)",
    ];

    async fn open(job: &Job) -> sqlx::Result<PgPool> {
        pool_options(job).connect(&job.url).await
    }

    async fn lease_claim(pool: &PgPool, name: &str, token: &[u8]) -> sqlx::Result<Option<u64>> {
        let fence: Option<i64> = sqlx::query_scalar(LEASE_CLAIM).bind(name).bind(token).fetch_optional(pool).await?;
        Ok(fence.map(i64::unsigned_abs))
    }

    async fn lease_free(pool: &PgPool, name: &str, token: &[u8]) -> sqlx::Result<()> {
        sqlx::query(LEASE_RELEASE).bind(name).bind(token).execute(pool).await.map(drop)
    }

    async fn open_transaction(pool: &PgPool) -> sqlx::Result<Transaction<'static, Self>> {
        pool.begin().await
    }

    async fn end_transaction(tx: Transaction<'static, Self>) -> sqlx::Result<()> {
        tx.commit().await
    }

    async fn row_lock_by_hand(conn: &mut PgConnection, id: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar(ROW_LOCK).bind(id).fetch_one(conn).await
    }

    async fn row_write(conn: &mut PgConnection, id: i64, value: i64) -> sqlx::Result<()> {
        sqlx::query(ROW_WRITE).bind(id).bind(value).execute(conn).await.map(drop)
    }

    async fn row_read(conn: &mut PgConnection, id: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar(ROW_READ).bind(id).fetch_one(conn).await
    }

    async fn name_lock(conn: &mut PgConnection, name: &str) -> sqlx::Result<()> {
        sqlx::query(NAME_LOCK).bind(name).execute(conn).await.map(drop)
    }

    async fn session_lock(conn: &mut PgConnection, name: &str) -> sqlx::Result<bool> {
        sqlx::query(SESSION_LOCK).bind(name).execute(conn).await.map(|_| true)
    }

    async fn session_unlock(conn: &mut PgConnection, name: &str) -> sqlx::Result<()> {
        sqlx::query(SESSION_UNLOCK).bind(name).execute(conn).await.map(drop)
    }

    async fn row_with_version(pool: &PgPool, id: i64) -> sqlx::Result<(i64, i64)> {
        sqlx::query_as(VERSION_READ).bind(id).fetch_one(pool).await
    }

    async fn row_write_if(pool: &PgPool, id: i64, value: i64, version: i64) -> sqlx::Result<bool> {
        let written = sqlx::query(VERSION_WRITE).bind(id).bind(value).bind(version).execute(pool).await?;
        Ok(written.rows_affected() == 1)
    }

    async fn answer_lock(conn: &mut PgConnection, name: &str) -> sqlx::Result<()> {
        Self::name_lock(conn, name).await
    }

    async fn answer_read(pool: &PgPool, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(pool).await
    }

    async fn answer_read_locked(conn: &mut PgConnection, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(conn).await
    }

    async fn answer_write(conn: &mut PgConnection, name: &str, fingerprint: &[u8], answer: &str) -> sqlx::Result<()> {
        sqlx::query(ANSWER_WRITE).bind(name).bind(fingerprint).bind(answer).execute(conn).await.map(drop)
    }

    async fn stock_take(pool: &Pool<Self>) -> sqlx::Result<bool> {
        Ok(sqlx::query(STOCK_TAKE).execute(pool).await?.rows_affected() == 1)
    }

    async fn counted(conn: &mut PgConnection) -> sqlx::Result<Option<Counted>> {
        let row = sqlx::query(COUNTED).fetch_one(conn).await?;
        let number = |column| Ok::<_, sqlx::Error>(row.try_get::<i64, _>(column)?.unsigned_abs());
        let commits = number("xact_commit")?;
        Ok(Some(Counted { statements: commits + number("xact_rollback")?, commits }))
    }
}
