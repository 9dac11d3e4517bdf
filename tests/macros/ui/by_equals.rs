#![allow(unused_variables)]

use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id == 1), tx = tx)]
async fn one(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id == order.id), tx = tx)]
async fn field(db: &SqlitePool, order: Order) -> Result<(), Error> {
    Ok(())
}

struct Order {
    id: i64,
}

fn main() {}
