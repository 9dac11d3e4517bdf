#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

#[with_lock(lease, on = leases, key = "k", crate = nope)]
async fn unknown(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", crate = "not a path")]
async fn no_path(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
