use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Pool) -> Result<u8, Error> {
    let _ = leases;
    Ok("text")
}

#[with_lock(lease, on = leases, key = "k", tx = tx)]
async fn no_tail(leases: &Pool) -> Result<u8, Error> {
    let _ = leases;
}

fn main() {}
