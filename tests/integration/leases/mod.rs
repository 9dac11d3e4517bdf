//! Leases: who holds them, how fences rise, how they are lost, and what a stale holder can no longer do.

mod bodies;
mod commits;
mod fences;
mod holding;

use std::time::Duration;

use support::TestDb;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Makes the lease's time run out at once, as if its holder had not renewed it.
async fn expire<S: support::Backend>(db: &TestDb<S>, key: &str) {
    assert_eq!(db.execute(&format!("UPDATE lockkit_lease SET expires_us = 1 WHERE name = '{key}'")).await, 1);
}
