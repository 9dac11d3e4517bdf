use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(version, on = leases.store(), attempts = 3, tx = tx)]
async fn f(leases: &Pool, stop: bool) -> Result<(), Error> {
    if stop {
        break;
    }
    Ok(())
}

fn main() {}
