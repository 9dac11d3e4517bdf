use lockkit::{Leases, with_lock};
use sqlx::SqlitePool;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Leases<SqlitePool>) -> Option<u8> {
    drop(leases.clone());
    Some(1)
}

#[with_lock(named, on = db, key = "k", attempts = 2, tx = tx)]
async fn g(db: &SqlitePool) -> u8 {
    drop(db.clone());
    1
}

fn main() {}
