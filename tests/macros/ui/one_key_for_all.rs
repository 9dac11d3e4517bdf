#![deny(deprecated)]

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "order")]
async fn order(leases: &Pool, user_id: i64) -> Result<i64, Error> {
    Ok(user_id)
}

#[with_lock(lease, on = leases, keys = ["a", "b"])]
async fn orders(leases: &Pool, user_id: i64, item_id: i64) -> Result<i64, Error> {
    Ok(user_id + item_id)
}

#[with_lock(lease, on = leases, key = const "order")]
async fn meant(leases: &Pool, user_id: i64) -> Result<i64, Error> {
    Ok(user_id)
}

#[with_lock(lease, on = leases, keys = const ["a", "{b}"])]
async fn all_meant(leases: &Pool, user_id: i64) -> Result<i64, Error> {
    Ok(user_id)
}

fn main() {}
