use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases)]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

// The function is still there.
async fn g(leases: &Pool) -> Result<(), Error> {
    f(leases).await
}

fn main() {}
