use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k", min_hold = "1 minute")]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", min_hold = 60)]
async fn g(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
