use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx, ttl = "30s", key = "k")]
async fn row(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(named, on = db, key = "k", tx = tx, table = "t", by(id = 1), as = attempt, retry_if = test)]
async fn named(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(version, wait = "2s", on_busy = Ok(()))]
async fn version() -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, on = db)]
async fn version_without_tx(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(version, tx = tx)]
async fn version_without_on() -> Result<(), Error> {
    Ok(())
}

fn main() {}
