//! A body that releases by a way round what the attribute releases.

use lockkit::{Error, Lease, MultiLease, with_lock};
use sqlx::SqlitePool;

use crate::fixture::{Shop, ShopError, assert_send, sell};

async fn release(lease: Lease<SqlitePool>) -> Result<(), Error> {
    lease.release().await.map(drop)
}

async fn release_all(leases: MultiLease<SqlitePool>) -> Result<(), Error> {
    leases.release().await.map(drop)
}

#[with_lock(lease, on = &shop.leases, key = "k", as = lease)]
async fn one(shop: &Shop) -> Result<bool, Error> {
    for handle in [lease.share(), lease] {
        let refused = release(handle).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "release", .. }), "{refused:?}");
    }
    Ok(shop.is_held("k").await)
}

#[with_lock(lease, on = &shop.leases, keys = ["k", "l"], as = both, tx = tx)]
async fn all(shop: &Shop) -> Result<bool, ShopError> {
    sell(&mut tx).await?;
    release_all(both).await?;
    Ok(shop.is_held("k").await)
}

#[tokio::test]
async fn a_body_cannot_release_the_lease_that_it_runs_under() {
    let shop = Shop::new().await;
    assert!(assert_send(one(&shop)).await.unwrap());
    assert!(!shop.is_held("k").await);
    let refused = assert_send(all(&shop)).await.unwrap_err();
    assert!(matches!(refused, ShopError::Lock(Error::InvalidOption { option: "release", .. })), "{refused:?}");
    assert_eq!(shop.stock().await, 10);
    assert!(!shop.is_held("k").await && !shop.is_held("l").await);
}
