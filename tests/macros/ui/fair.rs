use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k", fair = true)]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["a", "b"], fair)]
async fn g(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", fiar)]
async fn h(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", fair, fair)]
async fn i(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
