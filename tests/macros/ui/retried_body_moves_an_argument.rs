use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(version, on = leases.store(), attempts = 3, tx = _tx)]
async fn f(leases: &Pool, list: Vec<u8>) -> Result<Vec<u8>, Error> {
    Ok(list)
}

fn main() {}
