//! `#[with_lock(lease, keys = …)]`.

use std::{
    future::Future,
    sync::atomic::{AtomicU32, Ordering::SeqCst},
};

use lockkit::{Error, Key, LeaseStore, Leases, with_lock};

use crate::fixture::{Shop, ShopError, assert_send, sell};

#[with_lock(lease, on = &shop.leases, keys = ["account:{from}", "account:{to}", "bank"], wait = "20s", as = leases)]
async fn transfer(shop: &Shop, from: u32, to: u32) -> Result<Vec<String>, Error> {
    let mut keys = Vec::new();
    for lease in leases.leases() {
        assert!(lease.is_trusted() && shop.is_held(lease.key().as_str()).await);
        keys.push(lease.key().as_str().to_owned());
    }
    Ok(keys)
}

#[tokio::test]
async fn all_leases_are_held_in_the_body_and_none_after_it() {
    let shop = Shop::new().await;
    let keys = assert_send(transfer(&shop, 7, 3)).await.unwrap();
    assert_eq!(keys, ["account:3", "account:7", "bank"]);
    assert_eq!(transfer(&shop, 7, 7).await.unwrap(), ["account:7", "bank"]);
    assert!(shop.leases.list("").await.unwrap().is_empty());
}

#[tokio::test]
async fn requests_for_the_same_keys_in_another_order_never_wait_for_ever() {
    let shop = std::sync::Arc::new(Shop::new().await);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4 {
        let shop = shop.clone();
        tasks.spawn(async move { transfer(&shop, task % 2, (task + 1) % 2).await.unwrap() });
    }
    tasks.join_all().await;
}

#[with_lock(lease, on = &shop.leases, keys = ["a", "b"], wait = "0s", on_busy = Ok(None))]
async fn unless_busy(shop: &Shop) -> Result<Option<i64>, Error> {
    Ok(Some(shop.stock().await))
}

#[tokio::test]
async fn on_busy_is_returned_when_somebody_else_holds_one_of_them() {
    let shop = Shop::new().await;
    assert_eq!(unless_busy(&shop).await.unwrap(), Some(10));
    let _held = shop.leases.lease("b").acquire().await.unwrap();
    assert_eq!(unless_busy(&shop).await.unwrap(), None);
    assert!(!shop.is_held("a").await);
}

#[with_lock(lease, on = &shop.leases, keys = accounts, as = leases)]
async fn of_a_list(shop: &Shop, accounts: Vec<String>) -> Result<usize, Error> {
    assert!(shop.is_held("a").await);
    Ok(leases.leases().len())
}

#[with_lock(lease, on = &shop.leases, keys = [Key::from("k{"), format!("k{}", asked.fetch_add(1, SeqCst))])]
async fn of_expressions(shop: &Shop, asked: &AtomicU32) -> Result<(), Error> {
    assert!(shop.is_held("k{").await && shop.is_held("k0").await);
    Ok(())
}

#[tokio::test]
async fn keys_are_expressions_too_and_asked_for_once() {
    let shop = Shop::new().await;
    assert_eq!(of_a_list(&shop, vec!["b".to_owned(), "a".to_owned()]).await.unwrap(), 2);
    assert!(matches!(of_a_list(&shop, Vec::new()).await, Err(Error::InvalidOption { .. })));
    let asked = AtomicU32::new(0);
    of_expressions(&shop, &asked).await.unwrap();
    assert_eq!(asked.load(SeqCst), 1);
}

#[with_lock(lease, on = &shop.leases, keys = const ["a", "b"], ttl = "10s", as = leases, tx = tx)]
async fn sell_one(shop: &Shop, end: Result<(), ShopError>) -> Result<(), ShopError> {
    leases.verify(&mut tx).await?;
    sell(&mut tx).await?;
    assert_eq!(shop.stock().await, 10);
    end
}

#[with_lock(lease, on = &shop.leases, keys = ["a", "b"], tx = tx)]
async fn sell_although_robbed_of_one(shop: &Shop) -> Result<(), ShopError> {
    sell(&mut tx).await?;
    sqlx::query("UPDATE lockkit_lease SET token = x'00112233445566778899aabbccddeeff' WHERE name = 'b'")
        .execute(&mut *tx)
        .await?;
    assert_eq!(shop.stock().await, 10);
    Ok(())
}

#[tokio::test]
async fn a_transaction_is_committed_with_all_of_them_or_rolled_back() {
    let shop = Shop::new().await;
    assert!(matches!(assert_send(sell_one(&shop, Err(ShopError::Refused))).await, Err(ShopError::Refused)));
    assert_eq!(shop.stock().await, 10);
    assert!(shop.leases.list("").await.unwrap().is_empty());

    let failed = sell_although_robbed_of_one(&shop).await.unwrap_err();
    // The theft is undone with the transaction, so the lease is not lost.
    assert!(matches!(failed, ShopError::Lock(Error::InvalidOption { option: "commit", .. })));
    assert_eq!(shop.stock().await, 10);

    sell_one(&shop, Ok(())).await.unwrap();
    assert_eq!(shop.stock().await, 9);
    assert!(shop.leases.list("").await.unwrap().is_empty());
}

#[with_lock(lease, on = &shop.leases, keys = ["a", "b"], as = leases)]
async fn robbed_of_one(shop: &Shop) -> Result<(), Error> {
    shop.leases.steal("b").await?;
    assert!(!leases.is_trusted(), "a thief of the same process tells it");
    std::future::pending().await
}

#[with_lock(
    lease,
    on = &shop.leases,
    keys = const ["a", "b"],
    on_lost = continue,
    min_hold = "1m",
    as = leases
)]
async fn robbed_of_one_and_goes_on(shop: &Shop, ended: &AtomicU32) -> Result<(), Error> {
    shop.leases.steal("b").await?;
    assert_eq!(leases.lost().await, "b");
    ended.fetch_add(1, SeqCst);
    Ok(())
}

#[tokio::test]
async fn the_loss_of_one_is_the_loss_of_all() {
    let shop = Shop::new().await;
    assert!(matches!(robbed_of_one(&shop).await, Err(Error::Lost { key, .. }) if key == "b"));
    shop.is_free("a").await;

    let ended = AtomicU32::new(0);
    assert!(matches!(robbed_of_one_and_goes_on(&shop, &ended).await, Err(Error::Lost { key, .. }) if key == "b"));
    assert_eq!(ended.load(SeqCst), 1);
    assert!(shop.is_held("a").await && !shop.is_held("b").await);
}

#[with_lock(lease, on = leases, keys = ["a", "b"], as = both)]
async fn of_any_store<S: LeaseStore>(leases: &Leases<S>) -> Result<usize, Error> {
    Ok(both.leases().len())
}

/// Where the store is not known yet the future is `Send` all the same.
fn sent<S: LeaseStore>(leases: &Leases<S>) -> impl Future<Output = Result<usize, Error>> + Send {
    assert_send(of_any_store(leases))
}

#[tokio::test]
async fn the_store_may_be_any() {
    assert_eq!(sent(&Shop::new().await.leases).await.unwrap(), 2);
}
