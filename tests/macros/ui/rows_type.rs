use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

struct Item {
    id: i64,
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = items: Vec<Item>, tx = _tx)]
async fn no_from_row(db: &SqlitePool) -> Result<usize, Error> {
    Ok(items.iter().map(|it: &Item| it.id).count())
}

#[with_lock(row, on = db, table = "t", by(id = 1), rows = items: Item, tx = _tx)]
async fn no_vec(db: &SqlitePool) -> Result<usize, Error> {
    drop(items);
    Ok(1)
}

fn main() {}
