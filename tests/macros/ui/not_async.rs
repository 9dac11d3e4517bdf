use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k")]
fn f(leases: &Pool) -> Result<(), Error> {
    drop(leases.clone());
    Ok(())
}

fn main() {}
