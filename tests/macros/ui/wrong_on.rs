use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = db, key = "k")]
async fn f(db: &SqlitePool) -> Result<(), Error> {
    let _ = db;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k")]
async fn g(leases: Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = leases, key = "k", tx = tx)]
async fn h(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
