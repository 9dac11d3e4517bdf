use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

fn of_another_error(err: &std::io::Error) -> bool {
    err.raw_os_error().is_some()
}

#[with_lock(version, on = db, tx = _tx, attempts = 3, retry_if = of_another_error)]
async fn a_function(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, on = db, tx = _tx, attempts = 3, retry_if = |err: &std::io::Error| err.raw_os_error().is_some())]
async fn a_closure(db: &SqlitePool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(version, attempts = 3, retry_if = lockkit::is_retryable)]
async fn not_a_std_error() -> anyhow::Result<()> {
    Ok(())
}

#[with_lock(version, attempts = 3, retry_if = is_retryable())]
async fn called() -> Result<(), Error> {
    Ok(())
}

fn is_retryable() -> bool {
    true
}

fn main() {}
