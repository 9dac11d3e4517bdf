//! A shop on a database: SQLite in a temporary file.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use sqlx::{
    AssertSqlSafe, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tempfile::TempDir;

use super::shift_leases;

#[derive(Debug, Clone)]
pub(crate) struct Shop {
    pub(crate) pool: SqlitePool,
    /// The clock of the database, for recipes that store times.
    seconds: Arc<AtomicI64>,
    _folder: Arc<TempDir>,
}

impl Shop {
    /// A shop with these tables, and lockkit's.
    pub(crate) async fn open(tables: &str) -> Result<Self> {
        Self::with_connections(tables, 8).await
    }

    /// A shop whose services share so many connections.
    pub(crate) async fn with_connections(tables: &str, connections: u32) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("shop.db"))
            .create_if_missing(true)
            // Readers do not wait for a writer, as on a server.
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off)
            // A statement waits for a lock, as on a server. A schedule is over before that.
            .busy_timeout(Duration::from_secs(60));
        let pool = SqlitePoolOptions::new().max_connections(connections).connect_with(options).await?;
        lockkit::migrate(&pool).await?;
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(&pool).await?;
        // A connection comes back to its pool a moment after its last use.
        while pool.num_idle() < usize::try_from(pool.size())? {
            tokio::task::yield_now().await;
        }
        Ok(Self { pool, seconds: Arc::default(), _folder: Arc::new(folder) })
    }

    /// A number in the database.
    pub(crate) async fn number(&self, sql: &'static str) -> sqlx::Result<i64> {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await
    }

    /// Lets time pass for the database: for the recipes, and for lockkit's leases in it.
    pub(crate) async fn pass(self, time: Duration) -> Result<()> {
        self.seconds.fetch_add(i64::try_from(time.as_secs())?, Ordering::Relaxed);
        shift_leases(&self.pool, time).await
    }

    /// The clock of the database.
    pub(crate) fn now(&self) -> i64 {
        self.seconds.load(Ordering::Relaxed)
    }
}
