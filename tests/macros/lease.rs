//! `#[with_lock(lease, …)]`.

use std::time::Duration;

use lockkit::{Error, Leases, LossReason, with_lock};
use tokio::sync::oneshot;

use crate::fixture::{Shop, ShopError, assert_send, hang, sell};

#[with_lock(lease, on = &shop.leases, key = "job")]
async fn held_in_the_body(shop: &Shop) -> Result<bool, Error> {
    Ok(shop.is_held("job").await)
}

#[tokio::test]
async fn the_lease_is_held_in_the_body_and_free_after_it() {
    let shop = Shop::new().await;
    assert!(assert_send(held_in_the_body(&shop)).await.unwrap());
    assert!(!shop.is_held("job").await);
}

#[with_lock(lease, on = &shop.leases, key = "job", wait = "0s")]
async fn impatient(shop: &Shop) -> Result<(), ShopError> {
    unreachable!("{}", shop.stock().await)
}

#[tokio::test]
async fn the_body_never_runs_without_the_lease() {
    let shop = Shop::new().await;
    let _held = shop.leases.lease("job").acquire().await.unwrap();
    let failed = impatient(&shop).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(err) if err.is_contended()));
}

#[with_lock(lease, on = &shop.leases, key = "job", wait = "10ms", on_busy = Ok(None))]
async fn unless_busy(shop: &Shop) -> Result<Option<i64>, Error> {
    Ok(Some(shop.stock().await))
}

#[tokio::test]
async fn on_busy_is_returned_when_somebody_else_holds_the_lease() {
    let shop = Shop::new().await;
    assert_eq!(unless_busy(&shop).await.unwrap(), Some(10));
    let _held = shop.leases.lease("job").acquire().await.unwrap();
    assert_eq!(unless_busy(&shop).await.unwrap(), None);
}

#[with_lock(lease, on = &shop.leases, key = String::new(), on_busy = Ok(()))]
async fn without_a_name(shop: &Shop) -> Result<(), Error> {
    unreachable!("{}", shop.stock().await)
}

#[tokio::test]
async fn on_busy_is_not_for_other_errors() {
    let shop = Shop::new().await;
    assert!(matches!(without_a_name(&shop).await, Err(Error::InvalidKey { .. })));
}

#[with_lock(lease, on = &shop.leases, key = "job", ttl = "1m", as = lease)]
async fn look(shop: &Shop) -> Result<(String, Duration), Error> {
    let left = shop.leases.show("job").await?.unwrap().expires_in;
    assert!(lease.is_trusted());
    Ok((lease.key().as_str().to_owned(), left))
}

#[tokio::test]
async fn the_body_has_the_lease_and_its_ttl() {
    let (key, left) = look(&Shop::new().await).await.unwrap();
    assert_eq!(key, "job");
    assert!(left > Duration::from_secs(50) && left <= Duration::from_mins(1), "{left:?}");
}

#[with_lock(lease, on = &shop.leases, key = const "job", ttl = Duration::from_mins(1), as = lease)]
async fn robbed(shop: &Shop, stopped: oneshot::Sender<()>) -> Result<(), ShopError> {
    shop.leases.steal(lease.key()).await?;
    std::future::pending::<()>().await;
    let _ = stopped.send(());
    Ok(())
}

#[tokio::test]
async fn the_body_is_stopped_when_the_lease_is_stolen() {
    let shop = Shop::new().await;
    let (stopped, was_stopped) = oneshot::channel();
    let failed = robbed(&shop, stopped).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::Lost { reason: LossReason::Stolen, .. })), "{failed:?}");
    assert!(was_stopped.await.is_err());
}

#[with_lock(lease, on = &shop.leases, key = "job", on_lost = stop, as = lease)]
async fn stopped_when_robbed(shop: &Shop) -> Result<(), ShopError> {
    shop.leases.steal(lease.key()).await?;
    std::future::pending().await
}

#[with_lock(lease, on = &shop.leases, key = const "job", on_lost = continue, as = lease)]
async fn robbed_and_goes_on(shop: &Shop, ended: oneshot::Sender<()>) -> Result<(), ShopError> {
    shop.leases.steal(lease.key()).await?;
    assert_eq!(lease.lost().await, LossReason::Stolen);
    tokio::task::yield_now().await;
    ended.send(()).unwrap();
    Ok(())
}

#[tokio::test]
async fn the_body_stops_or_goes_on_as_it_is_told() {
    let shop = Shop::new().await;
    let failed = stopped_when_robbed(&shop).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::Lost { reason: LossReason::Stolen, .. })), "{failed:?}");

    let (ended, has_ended) = oneshot::channel();
    let failed = robbed_and_goes_on(&shop, ended).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::Lost { reason: LossReason::Stolen, .. })), "{failed:?}");
    has_ended.await.unwrap();
}

#[with_lock(lease, on = &shop.leases, key = const "job", ttl = "1500ms", on_lost = continue, as = lease, tx = tx)]
async fn sell_for_too_long_and_go_on(shop: &Shop, ended: oneshot::Sender<()>) -> Result<(), ShopError> {
    // SQLite has one writer, so the lease is not renewed meanwhile.
    lease.lost().await;
    sell(&mut tx).await?;
    assert_eq!(shop.stock().await, 10);
    ended.send(()).unwrap();
    Ok(())
}

#[tokio::test]
async fn a_body_that_goes_on_without_its_lease_commits_nothing() {
    let shop = Shop::new().await;
    let (ended, has_ended) = oneshot::channel();
    let failed = sell_for_too_long_and_go_on(&shop, ended).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(err) if err.is_lost()));
    has_ended.await.unwrap();
    assert_eq!(shop.stock().await, 10);
}

#[with_lock(lease, on = &shop.leases, key = "nightly", min_hold = "1m")]
async fn nightly(shop: &Shop) -> Result<i64, Error> {
    Ok(shop.stock().await)
}

#[with_lock(lease, on = &shop.leases, key = "sale", min_hold = least, tx = tx)]
async fn sell_now_and_then(shop: &Shop, least: Duration) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    let _ = (shop, least);
    Ok(())
}

#[tokio::test]
async fn the_key_stays_taken_for_its_least_time() {
    let shop = Shop::new().await;
    nightly(&shop).await.unwrap();
    assert!(shop.is_held("nightly").await);
    sell_now_and_then(&shop, Duration::from_mins(1)).await.unwrap();
    assert_eq!(shop.stock().await, 9);
    assert!(shop.is_held("sale").await);
    sell_now_and_then(&shop, Duration::ZERO).await.unwrap_err();
}

#[with_lock(lease, on = &shop.leases, key = "job", wait = "20s", fair)]
async fn in_turn(shop: &Shop) -> Result<bool, Error> {
    Ok(shop.is_held("job").await)
}

#[tokio::test]
async fn a_fair_request_has_a_ticket_while_it_waits() {
    let shop = std::sync::Arc::new(Shop::new().await);
    let another_process = Leases::new(shop.db.clone());
    let held = another_process.lease("job").acquire().await.unwrap();
    let waiting = tokio::spawn({
        let shop = shop.clone();
        async move { in_turn(&shop).await }
    });
    while another_process.list("job/queue/").await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    held.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap());
    // The ticket is released in the background.
    while !another_process.list("job").await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[with_lock(lease, on = &shop.leases, key = "job", ttl = "1500ms", tx = tx)]
async fn sell_for_too_long(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    assert_eq!(shop.stock().await, 10);
    // SQLite has one writer, so the lease is not renewed meanwhile.
    std::future::pending().await
}

#[with_lock(lease, on = &shop.leases, key = "job", as = lease, tx = tx)]
async fn sell_although_robbed(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    sqlx::query("UPDATE lockkit_lease SET token = x'00112233445566778899aabbccddeeff' WHERE name = 'job'")
        .execute(&mut *tx)
        .await?;
    assert!(lease.is_trusted());
    Ok(())
}

#[with_lock(lease, on = &shop.leases, key = const "job", as = lease, tx = tx)]
async fn sell_one(shop: &Shop, end: Result<(), ShopError>) -> Result<(), ShopError> {
    lease.verify(&mut *tx).await?;
    sell(&mut tx).await?;
    assert_eq!(shop.stock().await, 10);
    end
}

#[with_lock(lease, on = &shop.leases, key = "job", tx = tx)]
async fn sell_and_panic(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    panic!("{}", shop.stock().await)
}

#[with_lock(lease, on = &shop.leases, key = const "job", tx = tx)]
async fn sell_and_hang(shop: &Shop, reached: oneshot::Sender<()>) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    hang(reached).await;
    Ok(())
}

#[tokio::test]
async fn a_transaction_is_committed_on_ok_and_the_lease_released_with_it() {
    let shop = Shop::new().await;
    assert_send(sell_one(&shop, Ok(()))).await.unwrap();
    assert_eq!(shop.stock().await, 9);
    assert_eq!(shop.leases.show("job").await.unwrap(), None);
}

#[tokio::test]
async fn a_transaction_is_rolled_back_on_an_error() {
    let shop = Shop::new().await;
    assert!(matches!(sell_one(&shop, Err(ShopError::Refused)).await, Err(ShopError::Refused)));
    assert_eq!(shop.stock().await, 10);
    assert_eq!(shop.leases.show("job").await.unwrap(), None);
}

#[tokio::test]
async fn a_transaction_is_rolled_back_on_a_panic() {
    let shop = std::sync::Arc::new(Shop::new().await);
    let task = tokio::spawn({
        let shop = shop.clone();
        async move { sell_and_panic(&shop).await }
    });
    assert!(task.await.unwrap_err().is_panic());
    shop.is_free("job").await;
    assert_eq!(shop.stock().await, 10);
}

#[tokio::test]
async fn a_transaction_is_rolled_back_on_cancellation() {
    let shop = Shop::new().await;
    let (reached, here) = oneshot::channel();
    tokio::select! {
        done = sell_and_hang(&shop, reached) => unreachable!("{done:?}"),
        here = here => here.unwrap(),
    }
    shop.is_free("job").await;
    assert_eq!(shop.stock().await, 10);
}

#[tokio::test]
async fn a_transaction_is_rolled_back_when_the_lease_is_lost() {
    let shop = Shop::new().await;
    let failed = sell_for_too_long(&shop).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(err) if err.is_lost()));
    assert_eq!(shop.stock().await, 10);
}

#[tokio::test]
async fn a_transaction_that_does_not_find_its_lease_cannot_commit() {
    let shop = Shop::new().await;
    // The theft is undone with the transaction, so the lease is not lost.
    let failed = sell_although_robbed(&shop).await.unwrap_err();
    assert!(matches!(failed, ShopError::Lock(Error::InvalidOption { option: "commit", .. })));
    assert_eq!(shop.stock().await, 10);
}

#[with_lock(lease, on = &shop.leases, key = "unbounded", wait = lockkit::Wait::Unbounded)]
async fn without_a_bound(shop: &Shop) -> Result<(), Error> {
    Ok(())
}

#[tokio::test]
async fn a_lease_can_be_waited_for_without_a_bound() {
    without_a_bound(&Shop::new().await).await.unwrap();
}
