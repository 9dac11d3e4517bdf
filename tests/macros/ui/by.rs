#![allow(unused_variables)]

use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id == id), tx = tx)]
async fn compared(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id: id), tx = tx)]
async fn colon(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id > 5), tx = tx)]
async fn greater(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id in ids), tx = tx)]
async fn one_of(db: &SqlitePool, ids: Vec<i64>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by("id" = id), tx = tx)]
async fn quoted(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(t.id = id), tx = tx)]
async fn qualified(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = id && kind = 1), tx = tx)]
async fn and(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = id, kind = 1 state = 2), tx = tx)]
async fn no_comma(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by = id, tx = tx)]
async fn assigned(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = id, kind = 1, id = 2), tx = tx)]
async fn twice(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = id), by_any(id = [1, 2]), tx = tx)]
async fn twice_in_two_ways(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = ids), tx = tx)]
async fn several_values(db: &SqlitePool, ids: Vec<i64>) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by_any(id = id), tx = tx)]
async fn one_value(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
