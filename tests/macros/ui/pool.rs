//! `pool`, the database of a guarded transaction, in wrong places.

use lockkit::{Error, Leases, testing::MemoryStore, with_lock};
use sqlx::{AnyPool, SqlitePool};

#[with_lock(lease, on = leases, pool = db, key = "k")]
async fn without_a_transaction(leases: &Leases<MemoryStore>, db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, pool = db, table = "t", by(id = id), tx = tx)]
async fn twice(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(session, pool = db, key = "k")]
async fn instead_of_on(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, pool = leases, key = "k", tx = tx)]
async fn no_pool(leases: &Leases<MemoryStore>) -> Result<(), Error> {
    let _ = &mut *tx;
    Ok(())
}

#[with_lock(lease, on = leases, pool = db, key = "k", tx = tx)]
async fn any_pool(leases: &Leases<MemoryStore>, db: &AnyPool) -> Result<(), Error> {
    let _ = &mut *tx;
    Ok(())
}

fn main() {}
