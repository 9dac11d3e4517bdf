//! Keys: templates and expressions.

use std::{
    fmt::Debug,
    sync::atomic::{AtomicU32, Ordering::SeqCst},
};

use lockkit::{Error, Key, Leases, with_lock};
use sqlx::SqlitePool;

use crate::fixture::Shop;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "order:{user}.{kind:?}:{{x}}", as = lease)]
async fn template(leases: &Pool, user: &str, kind: impl Debug) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = "{width}:{number:>0width$}", as = lease)]
async fn formatted(leases: &Pool, width: usize, number: u32) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = "type {type}", as = lease)]
async fn raw(leases: &Pool, r#type: u8) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = format!("{}-{}", user.0, user.1), as = lease)]
async fn expression(leases: &Pool, user: (u8, u8)) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = &key, as = lease)]
async fn a_key(leases: &Pool, key: Key) -> Result<bool, Error> {
    Ok(*lease.key() == key)
}

#[tokio::test]
async fn captures_read_as_in_format() {
    let shop = Shop::new().await;
    let leases = &shop.leases;
    assert_eq!(template(leases, "ann", Some(1)).await.unwrap(), "order:ann.Some(1):{x}");
    assert_eq!(formatted(leases, 4, 42).await.unwrap(), "4:0042");
    assert_eq!(raw(leases, 5).await.unwrap(), "type 5");
    assert_eq!(expression(leases, (1, 2)).await.unwrap(), "1-2");
    assert!(a_key(leases, Key::from("k")).await.unwrap());
}

#[with_lock(lease, on = leases, key = "a:{first}:{second}", as = lease)]
async fn two(leases: &Pool, first: &str, second: &str) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[tokio::test]
async fn different_arguments_never_make_one_key() {
    let shop = Shop::new().await;
    let leases = &shop.leases;
    let parts = ["", "x", ":", "x:", ":x", "%", "%3A", "3A", "%253A", "\n", "%0A", "a:x:", "ключ"];
    let mut keys = std::collections::HashSet::new();
    for first in parts {
        for second in parts {
            assert!(keys.insert(two(leases, first, second).await.unwrap()), "{first:?} {second:?}");
        }
    }
}

#[with_lock(lease, on = leases, key = format!("{}", asked.fetch_add(1, SeqCst)))]
async fn asking(leases: &Pool, asked: &AtomicU32) -> Result<(), Error> {
    Ok(())
}

#[tokio::test]
async fn the_key_is_asked_for_once() {
    let asked = AtomicU32::new(0);
    asking(&Shop::new().await.leases, &asked).await.unwrap();
    assert_eq!(asked.load(SeqCst), 1);
}
