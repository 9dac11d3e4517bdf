use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, keys = ["a", "b"], key = "c")]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, keys = [])]
async fn g(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, keys = "a:{leases}")]
async fn h(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = ["a", "b"])]
async fn i(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["a{x}{y}", "b", ""])]
async fn j(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, kyes = ["a", "b"])]
async fn k(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
