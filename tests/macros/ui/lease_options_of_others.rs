use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx, on_lost = stop, min_hold = "1m", fair)]
async fn a(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(named, on = db, keys = ["a", "b"], tx = tx, on_lost = stop, min_hold = "1m", fair)]
async fn b(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(version, on_lost = stop, min_hold = "1m", fair, keys = ["a"])]
async fn c(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

fn main() {}
