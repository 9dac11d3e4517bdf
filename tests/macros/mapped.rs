//! `map_err`: functions whose error type cannot be `From<lockkit::Error>`.

use async_trait::async_trait;
use lockkit::{Error, with_lock};

use crate::fixture::{Shop, assert_send, sell};

/// As `tonic::Status` is: of another crate.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0}: {1}")]
struct Status(u8, String);

#[allow(clippy::needless_pass_by_value)]
fn to_status(err: Error) -> Status {
    Status(if err.is_contended() { 10 } else { 13 }, err.to_string())
}

#[async_trait]
trait Api {
    async fn call(&self, fails: bool) -> Result<i64, Status>;
}

#[async_trait]
impl Api for Shop {
    #[with_lock(row, on = &self.db, table = "t_items", by(item_id = 7), wait = "0s", tx = tx, map_err = to_status)]
    async fn call(&self, fails: bool) -> Result<i64, Status> {
        sell(&mut tx).await.map_err(|err| Status(2, err.to_string()))?;
        if fails { Err(Status(9, "refused".to_owned())) } else { Ok(1) }
    }
}

#[with_lock(
    named,
    on = &shop.db,
    key = const "k",
    wait = "0s",
    tx = _tx,
    on_busy = Err(Status(8, text)),
    map_err = to_status
)]
async fn unless_busy(shop: &Shop, text: String) -> Result<String, Status> {
    Ok(text)
}

#[with_lock(lease, on = &shop.leases, key = const "k", map_err = |err| Status(1, err.to_string()))]
#[with_lock(version, attempts = 3, retry_if = |err: &Status| err.0 == 4, as = attempt, map_err = to_status)]
async fn retried(shop: &Shop, succeeds_at: u32) -> Result<u32, Status> {
    if attempt < succeeds_at { Err(Status(4, "again".to_owned())) } else { Ok(attempt) }
}

#[tokio::test]
async fn a_function_with_map_err_returns_its_own_errors_and_converts_those_of_lockkit() {
    let shop = Shop::new().await;
    assert_eq!(assert_send(shop.call(false)).await, Ok(1));
    assert_eq!(shop.call(true).await, Err(Status(9, "refused".to_owned())));
    assert_eq!(shop.stock().await, 9);
    let held = lockkit::begin(&shop.db).await.unwrap();
    assert!(matches!(shop.call(false).await, Err(Status(10, _))));
    assert_eq!(unless_busy(&shop, "busy".to_owned()).await, Err(Status(8, "busy".to_owned())));
    held.rollback().await.unwrap();
    assert_eq!(unless_busy(&shop, "free".to_owned()).await.as_deref(), Ok("free"));
}

#[tokio::test]
async fn the_test_for_another_attempt_sees_the_errors_of_the_function() {
    let shop = Shop::new().await;
    assert_eq!(assert_send(retried(&shop, 3)).await, Ok(3));
    assert!(matches!(retried(&shop, 4).await, Err(Status(13, _))));
}
