//! The floors on MySQL and MariaDB.

use sqlx::{MySql, MySqlConnection, MySqlPool, Transaction};

use super::{Counted, Floor, StoredByHand, pool_options};
use crate::job::Job;

// The rows are there: an INSERT … ON DUPLICATE KEY UPDATE could not say whether it took the lease.
const LEASE_CLAIM: &str = "
    UPDATE bench_lease SET token = ?, fence = LAST_INSERT_ID(fence + 1), expires_at = NOW(6) + INTERVAL 30 SECOND
    WHERE name = ? AND expires_at <= NOW(6)";
const LEASE_RELEASE: &str =
    "UPDATE bench_lease SET token = NULL, expires_at = '2000-01-01' WHERE name = ? AND token = ?";
const ROW_LOCK: &str = "SELECT value FROM bench_row WHERE id = ? FOR UPDATE";
const ROW_READ: &str = "SELECT value FROM bench_row WHERE id = ?";
const ROW_WRITE: &str = "UPDATE bench_row SET value = ? WHERE id = ?";
const NAME_LOCK: &str = "SELECT name FROM bench_lease WHERE name = ? FOR UPDATE";
const SESSION_LOCK: &str = "SELECT GET_LOCK(?, 60)";
const SESSION_UNLOCK: &str = "SELECT RELEASE_LOCK(?)";
const VERSION_READ: &str = "SELECT value, version FROM bench_row WHERE id = ?";
const VERSION_WRITE: &str = "UPDATE bench_row SET value = ?, version = version + 1 WHERE id = ? AND version = ?";
// A new row is its lock.
const ANSWER_LOCK: &str = "INSERT INTO bench_answer (name) VALUES (?) ON DUPLICATE KEY UPDATE name = VALUES(name)";
const ANSWER_READ: &str =
    "SELECT fingerprint, CAST(answer AS CHAR) FROM bench_answer WHERE name = ? AND keep_until > NOW(6)";
const ANSWER_WRITE: &str =
    "UPDATE bench_answer SET fingerprint = ?, answer = ?, keep_until = NOW(6) + INTERVAL 24 HOUR WHERE name = ?";
const STOCK_TAKE: &str = "UPDATE bench_stock SET quantity = quantity - 1 WHERE id = 0 AND quantity >= 1";
const STATEMENTS: &str = "SHOW GLOBAL STATUS LIKE 'Questions'";
const COMMITS: &str = "SHOW GLOBAL STATUS LIKE 'Com_commit'";

impl Floor for MySql {
    const TABLES: &'static [&'static str] = &[
        "CREATE TABLE bench_lease (
             name VARBINARY(255) PRIMARY KEY, token BINARY(16), fence BIGINT NOT NULL, expires_at DATETIME(6) NOT NULL
         ) ENGINE = InnoDB",
        "CREATE TABLE bench_row (
             id BIGINT PRIMARY KEY, value BIGINT NOT NULL, version BIGINT NOT NULL
         ) ENGINE = InnoDB",
        "CREATE TABLE bench_stock (id BIGINT PRIMARY KEY, quantity BIGINT NOT NULL) ENGINE = InnoDB",
        "CREATE TABLE bench_answer (
             name VARBINARY(255) PRIMARY KEY, fingerprint BINARY(32), answer LONGBLOB, keep_until DATETIME(6),
             KEY (keep_until)
         ) ENGINE = InnoDB",
    ];

    async fn open(job: &Job) -> sqlx::Result<MySqlPool> {
        pool_options(job).connect(&job.url).await
    }

    async fn lease_claim(pool: &MySqlPool, name: &str, token: &[u8]) -> sqlx::Result<Option<u64>> {
        let written = sqlx::query(LEASE_CLAIM).bind(token).bind(name).execute(pool).await?;
        Ok((written.rows_affected() > 0).then(|| written.last_insert_id()))
    }

    async fn lease_free(pool: &MySqlPool, name: &str, token: &[u8]) -> sqlx::Result<()> {
        sqlx::query(LEASE_RELEASE).bind(name).bind(token).execute(pool).await.map(drop)
    }

    async fn open_transaction(pool: &MySqlPool) -> sqlx::Result<Transaction<'static, Self>> {
        pool.begin().await
    }

    async fn end_transaction(tx: Transaction<'static, Self>) -> sqlx::Result<()> {
        tx.commit().await
    }

    async fn row_lock_by_hand(conn: &mut MySqlConnection, id: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar(ROW_LOCK).bind(id).fetch_one(conn).await
    }

    async fn row_write(conn: &mut MySqlConnection, id: i64, value: i64) -> sqlx::Result<()> {
        sqlx::query(ROW_WRITE).bind(value).bind(id).execute(conn).await.map(drop)
    }

    async fn row_read(conn: &mut MySqlConnection, id: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar(ROW_READ).bind(id).fetch_one(conn).await
    }

    async fn name_lock(conn: &mut MySqlConnection, name: &str) -> sqlx::Result<()> {
        sqlx::query(NAME_LOCK).bind(name).execute(conn).await.map(drop)
    }

    async fn session_lock(conn: &mut MySqlConnection, name: &str) -> sqlx::Result<bool> {
        let granted: Option<i64> = sqlx::query_scalar(SESSION_LOCK).bind(name).fetch_one(conn).await?;
        if granted == Some(1) { Ok(true) } else { Err(sqlx::Error::Protocol("GET_LOCK gave up".to_owned())) }
    }

    async fn session_unlock(conn: &mut MySqlConnection, name: &str) -> sqlx::Result<()> {
        sqlx::query(SESSION_UNLOCK).bind(name).execute(conn).await.map(drop)
    }

    async fn row_with_version(pool: &MySqlPool, id: i64) -> sqlx::Result<(i64, i64)> {
        sqlx::query_as(VERSION_READ).bind(id).fetch_one(pool).await
    }

    async fn row_write_if(pool: &MySqlPool, id: i64, value: i64, version: i64) -> sqlx::Result<bool> {
        let written = sqlx::query(VERSION_WRITE).bind(value).bind(id).bind(version).execute(pool).await?;
        Ok(written.rows_affected() == 1)
    }

    async fn answer_lock(conn: &mut MySqlConnection, name: &str) -> sqlx::Result<()> {
        sqlx::query(ANSWER_LOCK).bind(name).execute(conn).await.map(drop)
    }

    async fn answer_read(pool: &MySqlPool, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(pool).await
    }

    async fn answer_read_locked(conn: &mut MySqlConnection, name: &str) -> sqlx::Result<Option<StoredByHand>> {
        sqlx::query_as(ANSWER_READ).bind(name).fetch_optional(conn).await
    }

    async fn answer_write(
        conn: &mut MySqlConnection,
        name: &str,
        fingerprint: &[u8],
        answer: &str,
    ) -> sqlx::Result<()> {
        sqlx::query(ANSWER_WRITE).bind(fingerprint).bind(answer).bind(name).execute(conn).await.map(drop)
    }

    async fn stock_take(pool: &MySqlPool) -> sqlx::Result<bool> {
        Ok(sqlx::query(STOCK_TAKE).execute(pool).await?.rows_affected() == 1)
    }

    async fn counted(conn: &mut MySqlConnection) -> sqlx::Result<Option<Counted>> {
        Ok(Some(Counted { statements: status(conn, STATEMENTS).await?, commits: status(conn, COMMITS).await? }))
    }
}

async fn status(conn: &mut MySqlConnection, sql: &'static str) -> sqlx::Result<u64> {
    let (_, value): (String, String) = sqlx::query_as(sql).fetch_one(&mut *conn).await?;
    value.parse().map_err(|err| sqlx::Error::Decode(Box::new(err)))
}
