#![allow(unreachable_code)]

use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(named, on = db, key = "k", attempts = 3, tx = _tx, on_busy = continue)]
async fn goes_on(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", attempts = 3, tx = _tx, on_busy = { if true { break Ok(()) } Ok(()) })]
async fn leaves(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = break Ok(())), attempts = 3, tx = _tx)]
async fn in_a_value(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

// A loop of its own.
#[with_lock(named, on = db, key = "k", tx = _tx, on_busy = loop { break Ok(()) })]
async fn in_its_own_loop(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
