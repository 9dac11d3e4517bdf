use lockkit::{Leases, with_lock};
use sqlx::SqlitePool;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Leases<SqlitePool>) {
    drop(leases.clone());
}

fn main() {}
