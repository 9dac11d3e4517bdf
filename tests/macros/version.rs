//! `#[with_lock(version, …)]`.

use std::{
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use lockkit::{Error, OrConflict, with_lock};
use sqlx::sqlite::SqliteQueryResult;

use crate::fixture::{Shop, ShopError, assert_send, sell};

fn conflict() -> Error {
    SqliteQueryResult::default().or_conflict().unwrap_err()
}

#[with_lock(version, attempts = 3, deadline = "30s", as = attempt)]
async fn sell_optimistically(shop: &Shop, losses: u32) -> Result<u32, ShopError> {
    let (stock, version): (i64, i64) =
        sqlx::query_as("SELECT stock, version FROM t_items WHERE item_id = 7").fetch_one(&shop.db).await?;
    let version = if attempt <= losses { version - 1 } else { version };
    sqlx::query("UPDATE t_items SET stock = ?, version = version + 1 WHERE item_id = 7 AND version = ?")
        .bind(stock - 1)
        .bind(version)
        .execute(&shop.db)
        .await?
        .or_conflict()?;
    Ok(attempt)
}

#[tokio::test]
async fn a_conflict_runs_the_body_again() {
    let shop = Shop::new().await;
    assert_eq!(assert_send(sell_optimistically(&shop, 2)).await.unwrap(), 3);
    assert_eq!(shop.stock().await, 9);
    let failed = sell_optimistically(&shop, 3).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::RetriesExhausted { attempts: 3, .. })));
}

#[with_lock(version)]
async fn with_defaults(ran: &AtomicU32, err: fn() -> ShopError) -> Result<(), ShopError> {
    ran.fetch_add(1, SeqCst);
    Err(err())
}

#[tokio::test]
async fn without_attempts_and_deadline_five_attempts_are_made() {
    let ran = AtomicU32::new(0);
    with_defaults(&ran, || conflict().into()).await.unwrap_err();
    assert_eq!(ran.load(SeqCst), 5);
}

#[tokio::test]
async fn what_is_no_conflict_ends_it_at_once() {
    let ran = AtomicU32::new(0);
    assert!(matches!(with_defaults(&ran, || ShopError::Refused).await, Err(ShopError::Refused)));
    assert_eq!(ran.load(SeqCst), 1);
}

#[with_lock(version, deadline = Duration::from_millis(50))]
async fn for_ever() -> Result<(), Error> {
    std::future::pending().await
}

#[tokio::test]
async fn the_deadline_cuts_off_an_attempt() {
    assert!(matches!(for_ever().await, Err(Error::RetriesExhausted { attempts: 1, .. })));
}

#[with_lock(version, attempts = limit)]
async fn no_attempts(limit: u32) -> Result<(), Error> {
    unreachable!()
}

#[tokio::test]
async fn a_policy_that_cannot_work_is_an_error() {
    assert!(matches!(no_attempts(0).await, Err(Error::InvalidOption { option: "attempts", .. })));
}

fn is_refused(err: &ShopError) -> bool {
    matches!(err, ShopError::Refused)
}

#[with_lock(version, attempts = 4, retry_if = is_refused)]
async fn own_test(ran: &AtomicU32) -> Result<u32, ShopError> {
    match ran.fetch_add(1, SeqCst) + 1 {
        3 => Ok(3),
        _ => Err(ShopError::Refused),
    }
}

/// `anyhow::Error` is no `std::error::Error`, so it needs a test.
#[with_lock(version, attempts = 4, retry_if = |err: &anyhow::Error| lockkit::is_retryable(err.as_ref()))]
async fn anyhow_test(ran: &AtomicU32) -> anyhow::Result<u32> {
    match ran.fetch_add(1, SeqCst) + 1 {
        3 => Ok(3),
        4 => anyhow::bail!("for good"),
        _ => Err(anyhow::Error::from(conflict()).context("selling")),
    }
}

#[tokio::test]
async fn retry_if_decides_what_is_worth_another_attempt() {
    assert_eq!(assert_send(own_test(&AtomicU32::new(0))).await.unwrap(), 3);
    let ran = AtomicU32::new(0);
    assert_eq!(assert_send(anyhow_test(&ran)).await.unwrap(), 3);
    assert_eq!(anyhow_test(&ran).await.unwrap_err().to_string(), "for good");
}

#[with_lock(version, on = &shop.db, attempts = 3, deadline = "30s", as = attempt, tx = tx)]
async fn in_transactions(shop: &Shop, losses: u32) -> Result<u32, ShopError> {
    sell(&mut tx).await?;
    assert_eq!(shop.stock().await, 10);
    if attempt <= losses { Err(conflict().into()) } else { Ok(attempt) }
}

#[tokio::test]
async fn every_attempt_has_a_transaction_of_its_own() {
    let shop = Shop::new().await;
    in_transactions(&shop, 3).await.unwrap_err();
    assert_eq!(shop.stock().await, 10);
    assert_eq!(assert_send(in_transactions(&shop, 2)).await.unwrap(), 3);
    assert_eq!(shop.stock().await, 9);
}

#[with_lock(version, attempts = 2, retry_if = lockkit::is_retryable, as = attempt)]
async fn with_the_default_test() -> Result<u32, Error> {
    if attempt == 1 { Err(conflict()) } else { Ok(attempt) }
}

#[tokio::test]
async fn the_default_test_can_be_named() {
    assert_eq!(with_the_default_test().await.unwrap(), 2);
}
