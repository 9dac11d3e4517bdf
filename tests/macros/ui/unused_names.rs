#![deny(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), tx = tx)]
async fn row(leases: &Pool) -> Result<(), Error> {
    sqlx::query("UPDATE t SET n = 1").execute(leases.store()).await.unwrap();
    Ok(())
}

#[with_lock(named, on = leases.store(), key = "k", attempts = 2, as = attempt, tx = tx)]
async fn shadowed(leases: &Pool) -> Result<(), Error> {
    let mut tx = lockkit::begin(leases.store()).await?;
    sqlx::query("UPDATE t SET n = 1").execute(&mut *tx).await.unwrap();
    Ok(())
}

#[with_lock(lease, on = leases, key = const "k", as = lease, tx = tx)]
async fn lease(leases: &Pool, unused: u8) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, on = leases.store(), tx = tx)]
async fn version(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), rows = jobs: Vec<(i64,)>, tx = _tx)]
async fn rows(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(row, on = leases.store(), table = "t", by(id = 1), rows = jobs: Vec<(i64,)>, attempts = 2, tx = tx)]
async fn rows_of_attempts(leases: &Pool) -> Result<usize, Error> {
    sqlx::query("UPDATE t SET n = 1").execute(&mut *tx).await.unwrap();
    let jobs = [1, 2];
    Ok(jobs.len())
}

fn main() {}
