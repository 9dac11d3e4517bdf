//! Leases of lockkit: in memory, on Tokio's clock, and in a database whose clock is moved.

use std::time::Duration;

use anyhow::Result;
use lockkit::{LeaseStore, Leases, testing::MemoryStore};
use sqlx::SqlitePool;

use crate::stage::View;

/// A store of leases in memory.
#[derive(Debug, Clone)]
pub(crate) struct LeaseWorld {
    store: MemoryStore,
    ttl: Duration,
}

impl LeaseWorld {
    /// Without leases yet; each will have this ttl.
    pub(crate) fn new(ttl: Duration) -> Self {
        Self { store: MemoryStore::new(), ttl }
    }

    /// The leases of one process, with its own network to the store.
    pub(crate) fn process(&self, name: &str) -> Result<Leases<MemoryStore>> {
        Ok(Leases::builder(self.store.client()).ttl(self.ttl).holder(name).build()?)
    }

    /// For a stage: the holder of the lease.
    pub(crate) async fn view(self, key: &'static str) -> Result<View> {
        holder(&Leases::new(self.store.client()), key).await
    }
}

/// Who has the lease.
pub(crate) async fn holder<S: LeaseStore>(leases: &Leases<S>, key: &str) -> Result<View> {
    Ok(leases.show(key).await?.map_or_else(|| "free".to_owned(), |it| it.holder).into())
}

/// Lets time pass for the leases of a database. None is renewed meanwhile, as if all processes were stopped.
pub(crate) async fn shift_leases(pool: &SqlitePool, time: Duration) -> Result<()> {
    // Without leases there is nothing to write, and so no wait for a recipe that has the database locked.
    if !sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM lockkit_lease)").fetch_one(pool).await? {
        return Ok(());
    }
    let shift = "UPDATE lockkit_lease SET expires_us = expires_us - ?1, acquired_us = acquired_us - ?1";
    sqlx::query(shift).bind(i64::try_from(time.as_micros())?).execute(pool).await?;
    Ok(())
}
