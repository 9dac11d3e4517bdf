use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, keys = Some("a").is_some())]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["a", 7u8])]
async fn g(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
