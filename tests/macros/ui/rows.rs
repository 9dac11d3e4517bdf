#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id = 1), skip_locked, tx = tx)]
async fn skips_without_rows(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), limit = 10, tx = tx)]
async fn limit_without_rows(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), skip_locked = true, tx = tx)]
async fn skip_with_a_value(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", order_by(id), limit = 0, skip_locked, rows = jobs: Vec<(i64,)>, tx = tx)]
async fn no_limit(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", order_by(id), skip_locked, rows = jobs: Vec<(i64,)>, tx = tx)]
async fn all_of_the_table(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), order_by(state desc), tx = tx)]
async fn descending(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), order_by("state"), tx = tx)]
async fn order_in_quotes(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), order_by = state, tx = tx)]
async fn order_assigned(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = jobs, tx = tx)]
async fn rows_without_type(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = job: (i64,), tx = tx)]
async fn rows_that_are_no_vec(db: &SqlitePool) -> Result<(), Error> {
    let _ = (&mut *tx, job);
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = errors: Vec<Error>, tx = tx)]
async fn rows_that_are_no_from_row(db: &SqlitePool) -> Result<(), Error> {
    let _ = (&mut *tx, errors);
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = errors: Vec<Error>, attempts = 2, tx = tx)]
async fn rows_of_attempts_that_are_no_from_row(db: &SqlitePool) -> Result<(), Error> {
    let _ = (&mut *tx, errors);
    Ok(())
}

#[with_lock(named, on = db, key = "k", skip_locked, tx = tx)]
async fn named(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", limit = 1, order_by(id))]
async fn lease(leases: &Leases<SqlitePool>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
