#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k", wait = 2s)]
async fn wait(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", ttl = 1.5m)]
async fn ttl(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, deadline = 100ms)]
async fn deadline() -> Result<(), Error> {
    Ok(())
}

fn main() {}
