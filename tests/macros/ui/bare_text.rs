#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, "order:{id}", on = leases)]
async fn second(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, "order")]
async fn last(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, "items", by(id = 1), tx = tx)]
async fn a_table(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
