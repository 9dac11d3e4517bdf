use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(version, deadline = seconds)]
async fn f(seconds: u64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", wait = seconds, tx = tx)]
async fn g(db: &SqlitePool, seconds: u64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "k", on_busy = None, tx = tx)]
async fn h(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
