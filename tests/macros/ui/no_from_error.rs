use lockkit::{Leases, with_lock};
use sqlx::SqlitePool;

#[derive(Debug)]
struct MyError;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Leases<SqlitePool>) -> Result<u8, MyError> {
    drop(leases.clone());
    Err(MyError)
}

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn g(db: &SqlitePool) -> Result<u8, MyError> {
    drop(db.clone());
    Err(MyError)
}

fn main() {}
