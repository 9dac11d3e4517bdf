//! What lockkit is asked for, where its types depend on the database.

use std::sync::atomic::{AtomicU32, Ordering};

use lockkit::{RetryPolicy, RowLock, Tx, Versioned, Wait};
use sqlx::{FromRow, MySql, Pool, Postgres, Sqlite};

use super::WAIT;
use crate::floors::Floor;

/// A row with a version.
#[derive(Debug, Clone, FromRow, Versioned)]
#[versioned(table = "bench_row", key = "id", version = "version")]
pub(crate) struct Row {
    id: i64,
    value: i64,
    version: i64,
}

/// A database that lockkit is measured on.
pub(crate) trait Subject: Floor {
    /// Locks a row of `bench_row`, and reads its value.
    fn row_of(tx: &mut Tx<Self>, id: i64, wait: Wait) -> impl Future<Output = lockkit::Result<i64>> + Send;

    /// Raises the value of the row by one, with as many attempts as that takes, and returns how many it took.
    fn raise(pool: &Pool<Self>, id: i64) -> impl Future<Output = lockkit::Result<u32>> + Send;
}

macro_rules! subject {
    ($($database:ty),+) => {$(
        impl Subject for $database {
            async fn row_of(tx: &mut Tx<Self>, id: i64, wait: Wait) -> lockkit::Result<i64> {
                let lock = RowLock::<Self>::table("bench_row").by("id", id).wait(wait);
                let row: Row = lock.fetch_one(tx).await?;
                Ok(row.value)
            }

            async fn raise(pool: &Pool<Self>, id: i64) -> lockkit::Result<u32> {
                let attempts = AtomicU32::new(0);
                let attempt = |_| async {
                    attempts.fetch_add(1, Ordering::Relaxed);
                    let mut row = Row::load(pool, id).await?;
                    row.value += 1;
                    row.save(pool).await
                };
                RetryPolicy::new().deadline(WAIT).retry(attempt).await?;
                Ok(attempts.into_inner())
            }
        }
    )+};
}

subject!(Postgres, MySql, Sqlite);
