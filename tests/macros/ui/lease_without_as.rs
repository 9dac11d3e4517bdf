use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Pool) -> Result<bool, Error> {
    Ok(lease.is_trusted())
}

fn main() {}
