#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = 42)]
async fn key_is_a_number(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = id)]
async fn key_is_no_text(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", wait = "forever", tx = tx)]
async fn forever(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", wait = "Forever")]
async fn forever_for_a_lease(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", wait = seconds, tx = tx)]
async fn wait_is_a_number(db: &SqlitePool, seconds: u64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", wait = -1, ttl = 30 s)]
async fn durations(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, attempts = "3")]
async fn attempts_in_quotes() -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, attempts = -1, retry_if = true)]
async fn attempts_and_test() -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", tx = "tx")]
async fn tx_in_quotes(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", tx = &mut tx)]
async fn tx_by_reference(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", as = "lease")]
async fn as_in_quotes(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
