use lockkit::{Error, Leases, with_lock, with_lock as locked};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), tx = tx)]
#[with_lock(named, on = leases.store(), key = "k", tx = tx)]
async fn one_name_for_two_transactions(leases: &Pool) -> Result<(), Error> {
    sqlx::query("UPDATE t SET n = 1").execute(&mut *tx).await.unwrap();
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", as = lease)]
#[with_lock(lease, on = leases, key = "l", as = lease)]
async fn one_name_for_two_leases(leases: &Pool) -> Result<bool, Error> {
    Ok(lease.is_trusted())
}

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), tx = tx)]
#[with_lock(version, attempts = 3)]
async fn attempts_in_one_transaction(leases: &Pool) -> Result<(), Error> {
    sqlx::query("UPDATE t SET n = 1").execute(&mut *tx).await.unwrap();
    Ok(())
}

#[with_lock(lease, on = leases, key = "k")]
#[locked(lease, on = leases, key = "l")]
async fn under_another_name(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "k")]
#[with_lock(lease, on = leases)]
async fn a_mistake_in_the_lower_one(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
