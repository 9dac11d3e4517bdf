use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(session)]
async fn a(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(session, on = db, key = "leader", tx = tx)]
async fn b(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(session, on = db, key = "leader", ttl = "30s", on_lost = continue, min_hold = "1m", fair)]
async fn c(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(session, on = db, keys = ["a", "b"], attempts = 3)]
async fn d(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(session, on = db, key = ["a", "b"], wait = "2")]
async fn e(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

fn main() {}
