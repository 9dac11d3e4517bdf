//! Applies lockkit's migrations at run time.

use std::time::Duration;

use sqlx::{Pool, migrate::MigrateError};

use crate::{
    error::{Error, Fault, Result},
    lease::{Leases, store::LeaseStore},
    policy::{Backoff, RetryPolicy},
    sql::{Dialect, fault_in_chain},
    task::finished,
};

/// Creates lockkit's tables, or brings them up to date.
///
/// Does nothing when they are up to date; a table that was dropped is made again. Any number of processes may call it at once. The history is kept in
/// `_lockkit_migrations`, so it does not mix with the application's own migrations, and is the same that
/// `sqlx migrate run --source migrations/<database> --config migrations/sqlx.toml` keeps: both ways can be mixed.
///
/// On PostgreSQL the tables and their history are in the first schema of the connection's `search_path`
/// (`current_schema()`), whatever is in the others: services share leases if that is the same. On MySQL and MariaDB it opens
/// one connection of its own with the pool's options.
///
/// A change of a table waits for transactions that have used it, on servers for up to a second at a time and about a minute in
/// all. In between the leases of other processes go on.
///
/// # Errors
/// [`Error::Migration`](crate::Error::Migration), for instance when the user may not create tables and some are missing, or
/// such a transaction does not end;
/// [`Error::HistoryDenied`](crate::Error::HistoryDenied),
/// [`Error::MigrationCutShort`](crate::Error::MigrationCutShort).
///
/// # Cancel safety
/// Once begun it goes on in a task of its own, whether or not this future is dropped; it can be run again at any time.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// lockkit::migrate(&pool).await?;
/// # Ok(()) }
/// ```
pub async fn migrate<DB: Dialect>(pool: &Pool<DB>) -> Result<()> {
    // Processes that migrate at once can collide while they write the same history: MariaDB does not know the endless
    // GET_LOCK by which sqlx would serialise them, and SQLite has no such lock. The loser finds the work done.
    // Those who wait for a transaction of the application's try again, too.
    let policy = RetryPolicy::new()
        .attempts(50)
        .backoff(Backoff { base: Duration::from_millis(20), cap: Duration::from_millis(200) });
    let collided = |err: &Error| {
        if let Error::Migration { source } = err
            && let Some(MigrateError::Dirty(_)) = source.downcast_ref()
        {
            return true;
        }
        let fault = fault_in_chain(err);
        matches!(fault, Some(Fault::Duplicate | Fault::Contended | Fault::Deadlock | Fault::Serialization))
    };
    let pool = pool.clone();
    // In a task of its own: a run that is dropped half-way keeps the lock by which migrations wait for each other.
    let running = tokio::spawn(async move { policy.retry_if(collided, |_| async { DB::migrate(&pool).await }).await });
    finished("migrating", running).await
}

impl<DB: Dialect> Leases<Pool<DB>>
where
    Pool<DB>: LeaseStore,
{
    /// Creates lockkit's tables, or brings them up to date. See [`migrate`](crate::migrate()).
    ///
    /// # Errors
    /// [`Error::Migration`].
    pub async fn migrate(&self) -> Result<()> {
        migrate(self.store()).await
    }
}
