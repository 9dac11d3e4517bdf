#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(optimistic, retries = 3)]
async fn optimistic() -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, max_retries = 3)]
async fn retries() -> Result<(), Error> {
    Ok(())
}

#[with_lock(advisory, pool = db, name = "k", transaction = tx)]
async fn advisory(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, pool = db, name = "k", transaction = tx)]
async fn named(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", where(id = 1), tx = tx)]
async fn filter(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(LEASE, on = leases, key = "k", TTL = "30s")]
async fn upper_case(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, key = "item:{id}", tx = tx)]
async fn a_row_by_a_key(db: &SqlitePool, id: i64) -> Result<i64, Error> {
    Ok(id)
}

#[with_lock(named, on = db, table = "t", by(id = 1), tx = tx)]
async fn a_name_by_columns(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
