use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[derive(Clone)]
struct Id(i64);

#[with_lock(row, on = db, table = "t", by(id = id), tx = _tx)]
async fn f(db: &SqlitePool, id: Id) -> Result<i64, Error> {
    Ok(id.0)
}

#[with_lock(row, on = db, table = "t", by_any(id = ids), tx = _tx)]
async fn g(db: &SqlitePool, ids: Vec<Id>) -> Result<usize, Error> {
    Ok(ids.len())
}

struct Unique(i64);

#[with_lock(row, on = db, table = "t", by(id = id), tx = _tx)]
async fn h(db: &SqlitePool, id: Unique) -> Result<i64, Error> {
    Ok(id.0)
}

fn main() {}
