#![allow(unused_variables)]

use lockkit::{Leases, dialect::SessionOps, with_lock};
use sqlx::{Pool, SqlitePool};

#[derive(Debug, thiserror::Error)]
#[error("refused")]
struct Refused;

#[with_lock(row, on = db, table = "t", by(id = 1), tx = tx)]
async fn of_sqlx(db: &SqlitePool) -> Result<u8, sqlx::Error> {
    Ok(1)
}

#[with_lock(named, on = db, key = "k", tx = tx)]
async fn of_sqlx_by_its_alias(db: &SqlitePool) -> sqlx::Result<u8> {
    Ok(1)
}

#[with_lock(named, on = db, key = "k", tx = tx)]
async fn text(db: &SqlitePool) -> Result<u8, String> {
    Ok(1)
}

#[with_lock(lease, on = leases, keys = ["a", "b"], wait = "0s", on_busy = Ok(0), tx = tx)]
async fn of_the_application(leases: &Leases<SqlitePool>) -> Result<u8, Refused> {
    Err(Refused)
}

#[with_lock(session, on = db, key = "k")]
async fn under_a_session_lock<DB: SessionOps>(db: &Pool<DB>) -> Result<u8, Refused> {
    Err(Refused)
}

#[with_lock(version, attempts = 3)]
async fn by_versions() -> Result<u8, Refused> {
    Err(Refused)
}

#[with_lock(lease, on = leases, key = "k")]
async fn generic<E>(leases: &Leases<SqlitePool>) -> Result<u8, E> {
    Ok(1)
}

fn main() {}
