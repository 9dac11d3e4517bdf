//! Leases of lockkit-redis, on one connection of the process.

use std::sync::Arc;

use anyhow::Result;
use lockkit::Leases;
use lockkit_redis::{RedisStore, redis::Client};
use sqlx::{PgPool, Postgres};

use crate::floors::{Floor, TTL};
use crate::job::Job;
use crate::load::{Step, Work};
use crate::scenarios::{Scenario, WAIT, leased, row_under_lease};

#[derive(Debug)]
pub(crate) struct LockkitRedis {
    leases: Leases<RedisStore>,
    pool: PgPool,
    is_hot_row: bool,
}

/// A new server grants nothing until it is declared new.
pub(crate) async fn declare_new(url: &str) -> Result<()> {
    Ok(RedisStore::connect(Client::open(url)?).await?.declare_new().await?)
}

pub(crate) async fn open(job: &Job, redis: &str) -> Result<Arc<LockkitRedis>> {
    let store = RedisStore::connect(Client::open(redis)?).await?;
    let leases = Leases::builder(store).ttl(TTL).wait(WAIT).build()?;
    let pool = Postgres::open(job).await?;
    Ok(Arc::new(LockkitRedis { leases, pool, is_hot_row: job.scenario == Scenario::HotRow }))
}

impl Work for LockkitRedis {
    async fn once(&self, key: u32) -> Result<Option<Step>> {
        if self.is_hot_row {
            return row_under_lease(&self.leases, &self.pool).await;
        }
        leased(&self.leases, key, async {}).await
    }
}
