use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(session, on = db, key = "leader", wait = "2s")]
async fn f(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

fn main() {}
