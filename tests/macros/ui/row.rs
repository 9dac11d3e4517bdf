use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

#[with_lock(row, on = db, table = "t", by(id = 1))]
async fn without_tx(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(row, on = db, table = "t", tx = tx)]
async fn without_by(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(), tx = tx)]
async fn empty_by(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(row, on = db, table = "t", by(id), tx = tx)]
async fn by_without_value(db: &SqlitePool, id: i64) -> Result<i64, Error> {
    let _ = db;
    Ok(id)
}

#[with_lock(row, on = db, table = "db.public.t", by(id = 1), tx = tx)]
async fn bad_table(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(row, on = db, table = t, by(schlüssel = 1), tx = tx)]
async fn bad_column(db: &SqlitePool, t: &str) -> Result<(), Error> {
    let _ = (db, t);
    Ok(())
}

fn main() {}
