use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

struct Id;

#[with_lock(lease, on = leases, key = "order:{id}")]
async fn f(leases: &Pool, id: Id) -> Result<(), Error> {
    let _ = (leases, id);
    Ok(())
}

#[with_lock(lease, on = leases, key = 42)]
async fn not_a_key(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
