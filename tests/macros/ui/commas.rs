#![allow(unused_variables)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock("lease", on = leases, key = "k")]
async fn quoted(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(strategy = lease, on = leases, key = "k")]
async fn named(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease(key = "k"), on = leases)]
async fn called(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lockkit::lease, on = leases, key = "k")]
async fn with_a_path(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease on = leases, key = "k")]
async fn no_comma_behind_the_kind(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases key = "k" ttl = "30s")]
async fn no_commas(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease,, on = leases, key = "k")]
async fn two_commas(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease; on = leases; key = "k")]
async fn semicolons(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key: "k")]
async fn colon(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key => "k")]
async fn arrow(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = , wait = "2s")]
async fn no_value(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = order:{id})]
async fn key_without_quotes(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = "order:{}", id)]
async fn as_in_format(leases: &Pool, id: i64) -> Result<i64, Error> {
    Ok(id)
}

#[with_lock(lease, on = leases, key = "order:{id}", id = 7)]
async fn as_in_format_by_name(leases: &Pool) -> Result<(), Error> {
    Ok(())
}

fn main() {}
