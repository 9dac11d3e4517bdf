#![allow(unused_variables)]

use lockkit::{Error, Key, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "order:{id}".to_owned())]
async fn owned(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, key = String::from("order:{id}"))]
async fn from(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(named, on = db, key = &Key::new("order:{id:?}")?, tx = _tx)]
async fn checked(db: &SqlitePool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, keys = vec!["a:{id}", "b"])]
async fn several(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["a:{id}".to_owned(), "b:{id}".into()])]
async fn an_array(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

#[with_lock(lease, on = leases, keys = ["a:{id}", "b:{id}"].map(str::to_owned))]
async fn mapped(leases: &Pool, id: i64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
