use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id = 1), rows = all: Vec<(i64,)>, row = one: (i64,), tx = tx)]
async fn both(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id = 1), row = one, tx = tx)]
async fn no_type(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

fn main() {}
