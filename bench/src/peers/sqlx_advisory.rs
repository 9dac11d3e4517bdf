//! sqlx's own lock: `PgAdvisoryLock`, on a connection of the pool for as long as it is held.

use std::sync::Arc;

use anyhow::Result;
use sqlx::postgres::{PgAdvisoryLock, PgConnection};
use sqlx::{PgPool, Postgres};

use crate::clock;
use crate::floors::{Floor, name};
use crate::job::Job;
use crate::load::{Step, Work};
use crate::scenarios::Scenario;

#[derive(Debug)]
pub(crate) struct SqlxAdvisory {
    pool: PgPool,
    is_hot_row: bool,
}

pub(crate) async fn open(job: &Job) -> Result<Arc<SqlxAdvisory>> {
    let pool = Postgres::open(job).await?;
    Ok(Arc::new(SqlxAdvisory { pool, is_hot_row: job.scenario == Scenario::HotRow }))
}

impl Work for SqlxAdvisory {
    async fn once(&self, key: u32) -> Result<Option<Step>> {
        let lock = PgAdvisoryLock::new(name(key));
        let mut guard = lock.acquire(self.pool.acquire().await?).await?;
        let granted = clock::now();
        if self.is_hot_row {
            let conn: &mut PgConnection = &mut guard;
            let value = Postgres::row_read(conn, 0).await?;
            Postgres::row_write(conn, 0, value + 1).await?;
        }
        let step = Step::since(granted);
        guard.release_now().await?;
        Ok(Some(step))
    }
}
