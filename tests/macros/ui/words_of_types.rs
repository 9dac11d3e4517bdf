#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

#[with_lock(RowLock, on = db, table = "t", by(id = 1), tx = tx)]
async fn row(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row_lock, on = db, table = "t", by(id = 1), tx = tx)]
async fn snake(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(NamedLock, on = db, key = "k", tx = tx)]
async fn named(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(semaphore, on = leases, key = "k", permits = 3)]
async fn semaphore(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", permits = 3)]
async fn permits(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(read, on = leases, key = "k")]
async fn read(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", shared)]
async fn shared(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
