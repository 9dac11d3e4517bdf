use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(named, on = leases.store(), key = "k", tx = tx)]
async fn f(leases: &Pool) -> Result<(), Error> {
    tx.commit().await
}

fn main() {}
