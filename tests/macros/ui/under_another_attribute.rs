#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

#[tokio::main]
#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
