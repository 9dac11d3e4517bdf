use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k", wait = "30")]
async fn no_unit(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", wait = 30)]
async fn number(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", ttl = "0s")]
async fn zero_ttl(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", ttl = "9000h")]
async fn more_than_a_year(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(version, deadline = "0s")]
async fn zero_deadline() -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, attempts = 0)]
async fn zero_attempts() -> Result<(), Error> {
    Ok(())
}

fn main() {}
