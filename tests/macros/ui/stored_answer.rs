//! What an answer must be, and which arguments it has.

use lockkit::with_lock;
use sqlx::SqlitePool;

struct Receipt;

#[with_lock(idempotent, on = db, key = "pay:{id}", tx = tx)]
async fn no_answer(db: &SqlitePool, id: i64) -> Result<Receipt, lockkit::Error> {
    let _ = &mut tx;
    Ok(Receipt)
}

#[with_lock(idempotent, on = db, key = "pay:{id}", request = &receipt, tx = tx)]
async fn no_request(db: &SqlitePool, id: i64, receipt: Receipt) -> Result<(), lockkit::Error> {
    let _ = (&mut tx, receipt);
    Ok(())
}

#[with_lock(idempotent, on = db, key = "pay:{id}", keep = "0s", attempts = 3, tx = tx)]
async fn not_kept(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = &mut tx;
    Ok(())
}

#[with_lock(named, on = db, key = "pay:{id}", request = &id, tx = tx)]
async fn not_stored(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = &mut tx;
    Ok(())
}

#[with_lock(once, on = db)]
async fn misnamed(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    Ok(())
}

#[with_lock(named, on = db, key = "user:{id}", tx = user)]
#[with_lock(idempotent, on = db, key = "pay:{id}", tx = tx)]
async fn below(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = (&mut tx, &mut user);
    Ok(())
}

#[with_lock(idempotent, on = db, key = "pay:{id}", tx = tx)]
#[with_lock(row, on = db, table = "users", by(id = id), tx = user)]
async fn above(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = (&mut tx, &mut user);
    Ok(())
}

#[with_lock(idempotent, on = db, key = "pay:{id}", map_err = |err| err.to_string(), tx = tx)]
async fn mapped(db: &SqlitePool, id: i64) -> Result<Receipt, String> {
    let _ = &mut tx;
    Ok(Receipt)
}

#[with_lock(idempotent, on = db, key = "pay:{id}", tx = tx)]
async fn no_error(db: &SqlitePool, id: i64) -> Result<i64, String> {
    let _ = &mut tx;
    Ok(id)
}

#[with_lock(idempotent, on = db, key = "pay", request = &id, tx = tx)]
async fn one_key(db: &SqlitePool, id: i64) -> Result<i64, lockkit::Error> {
    let _ = &mut tx;
    Ok(id)
}

#[with_lock(idempotent, on = db, key = "pay:{id}", max_answer = 0, store_err = true, tx = tx)]
async fn no_room(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = &mut tx;
    Ok(())
}

#[with_lock(named, on = db, key = "pay:{id}", store_err = is_declined, tx = tx)]
async fn no_error_stored(db: &SqlitePool, id: i64) -> Result<(), lockkit::Error> {
    let _ = &mut tx;
    Ok(())
}

fn is_declined(err: &lockkit::Error) -> bool {
    err.is_conflict()
}

#[with_lock(idempotent, on = db, key = "pay:{id}", store_err = is_declined, tx = tx)]
async fn unwritten(db: &SqlitePool, id: i64) -> Result<i64, lockkit::Error> {
    let _ = &mut tx;
    Ok(id)
}

fn main() {}
