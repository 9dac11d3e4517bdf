use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[derive(Clone)]
struct Id;

#[with_lock(row, on = db, table = "t", by(id = id), tx = tx)]
async fn f(db: &SqlitePool, id: Id) -> Result<(), Error> {
    Ok(())
}

fn main() {}
