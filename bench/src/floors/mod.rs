//! The floors: what each kind of lock costs at least, written by hand with sqlx. Each database has its statements in
//! one file, with as few round trips as the work allows.

mod mysql;
mod postgres;
mod sqlite;

use std::time::Duration;

use lockkit::dialect::{IdempotentOps, LeaseOps, NamedOps, RowOps, StockOps, VersionOps};
use sqlx::pool::PoolOptions;
use sqlx::{Pool, Transaction};
use support::PlainSql;

use crate::job::Job;

/// The most keys that tasks can share.
pub(crate) const KEYS: u32 = 10_000;

/// What the guarded counter starts with: more than can be taken.
pub(crate) const STOCK: u64 = 1_000_000_000;

/// The ttl of leases, of lockkit and of the floor.
pub(crate) const TTL: Duration = Duration::from_secs(30);

/// A database with the tables of the floors.
pub(crate) trait Floor: IdempotentOps + LeaseOps + NamedOps + PlainSql + RowOps + StockOps + VersionOps {
    /// Makes the tables. Each is one statement.
    const TABLES: &'static [&'static str];

    /// The pool of a worker.
    fn open(job: &Job) -> impl Future<Output = sqlx::Result<Pool<Self>>> + Send;

    /// One statement: takes the lease if it is free, and returns its fence.
    fn lease_claim(
        pool: &Pool<Self>,
        name: &str,
        token: &[u8],
    ) -> impl Future<Output = sqlx::Result<Option<u64>>> + Send;

    /// One statement: gives it back.
    fn lease_free(pool: &Pool<Self>, name: &str, token: &[u8]) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// A transaction that may write.
    fn open_transaction(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Transaction<'static, Self>>> + Send;

    /// Commits it.
    fn end_transaction(tx: Transaction<'static, Self>) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One statement: locks a row of `bench_row` until the transaction ends, and reads its value.
    fn row_lock_by_hand(conn: &mut Self::Connection, id: i64) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// One statement: writes a value.
    fn row_write(conn: &mut Self::Connection, id: i64, value: i64) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One statement: reads a value without a lock.
    fn row_read(conn: &mut Self::Connection, id: i64) -> impl Future<Output = sqlx::Result<i64>> + Send;

    /// One statement, or none where a transaction that writes is alone: locks a name until the transaction ends.
    fn name_lock(conn: &mut Self::Connection, name: &str) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One statement: waits for a lock on a name, which the session keeps. `false`: this database has none.
    fn session_lock(conn: &mut Self::Connection, name: &str) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// One statement: unlocks it.
    fn session_unlock(conn: &mut Self::Connection, name: &str) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One statement: a value and its version.
    fn row_with_version(pool: &Pool<Self>, id: i64) -> impl Future<Output = sqlx::Result<(i64, i64)>> + Send;

    /// One statement: writes the value if the row still has the version.
    fn row_write_if(
        pool: &Pool<Self>,
        id: i64,
        value: i64,
        version: i64,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// One statement, or none where a transaction that writes is alone: locks the name of an answer until the
    /// transaction ends.
    fn answer_lock(conn: &mut Self::Connection, name: &str) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One statement: the answer with this name, unless it has expired, and the hash of its request.
    fn answer_read(pool: &Pool<Self>, name: &str) -> impl Future<Output = sqlx::Result<Option<StoredByHand>>> + Send;

    /// The same in the transaction that has the lock.
    fn answer_read_locked(
        conn: &mut Self::Connection,
        name: &str,
    ) -> impl Future<Output = sqlx::Result<Option<StoredByHand>>> + Send;

    /// One statement: stores the answer for 24 h, in place of one that has expired.
    fn answer_write(
        conn: &mut Self::Connection,
        name: &str,
        fingerprint: &[u8],
        answer: &str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// One guarded statement: takes a piece from the counter if one is left.
    fn stock_take(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// What the server has counted so far, if it counts.
    fn counted(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<Option<Counted>>> + Send;
}

/// The hash of a request, and its answer.
pub(crate) type StoredByHand = (Vec<u8>, String);

/// What a server counts, of all sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Statements; on PostgreSQL, which does not count them, transactions. A statement by itself is one.
    pub(crate) statements: u64,
    pub(crate) commits: u64,
}

/// The same options for every pool of a job, whoever uses it.
fn pool_options<DB: sqlx::Database>(job: &Job) -> PoolOptions<DB> {
    PoolOptions::new()
        .max_connections(job.connections)
        .min_connections(job.connections)
        .test_before_acquire(job.ping)
        .acquire_timeout(Duration::from_secs(60))
}

/// The name of a key, in all tables.
pub(crate) fn name(key: u32) -> String {
    format!("key:{key}")
}
