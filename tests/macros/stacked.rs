//! Several attributes on one function: nested as they are written.

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crate::fixture::{Shop, ShopError, assert_send, is_held, sell};

type Keys = Leases<SqlitePool>;

/// Whether the one lease is held while the other is asked for, which the key says.
async fn held(leases: &Keys, key: &str) -> bool {
    is_held(leases, key).await
}

#[with_lock(lease, on = leases, key = "upper")]
#[with_lock(lease, on = leases, key = format!("lower {}", held(leases, "upper").await), as = lower)]
async fn upper_first(leases: &Keys) -> Result<String, Error> {
    Ok(lower.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = "one")]
#[tracing::instrument(skip_all)]
#[lockkit::with_lock(lease, on = leases, key = format!("two {}", held(leases, "one").await))]
#[crate::stacked::renamed::with_lock(
    lease,
    on = leases,
    key = format!("three {}", held(leases, "two true").await),
    as = lower
)]
async fn three_of_them(leases: &Keys) -> Result<String, Error> {
    Ok(lower.key().as_str().to_owned())
}

mod renamed {
    pub(crate) use lockkit::with_lock;
}

#[tokio::test]
async fn the_upper_lock_is_taken_first() {
    let shop = Shop::new().await;
    assert_eq!(assert_send(upper_first(&shop.leases)).await.unwrap(), "lower true");
    assert_eq!(assert_send(three_of_them(&shop.leases)).await.unwrap(), "three true");
}

#[with_lock(lease, on = &shop.leases, key = const "l", as = lease)]
#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = id), tx = tx)]
async fn lease_and_row(shop: &Shop, id: i64, name: String, end: Result<(), ShopError>) -> Result<String, ShopError> {
    sell(&mut tx).await?;
    end?;
    Ok(format!("{name} {}", lease.key()))
}

#[with_lock(lease, on = &shop.leases, key = "l", tx = tx)]
#[with_lock(lease, on = &shop.leases, key = "{name}", as = lower)]
async fn lease_with_tx_and_lease(shop: &Shop, name: String) -> Result<(String, bool), ShopError> {
    sell(&mut tx).await?;
    Ok((name, lower.is_trusted()))
}

#[with_lock(version, on = &shop.db, attempts = 3, as = attempt, tx = tx)]
#[with_lock(lease, on = &shop.leases, key = const "l")]
async fn attempts_and_lease(shop: &Shop, ran: &AtomicU32) -> Result<u32, ShopError> {
    ran.fetch_add(1, SeqCst);
    sell(&mut tx).await?;
    if attempt < 3 {
        return Err(conflict().into());
    }
    Ok(attempt)
}

#[with_lock(version, attempts = 3, as = attempt)]
#[with_lock(lease, on = &shop.leases, key = "l{attempt}", as = lease, tx = tx)]
async fn attempts_each_with_a_lease_and_tx(shop: &Shop, name: String) -> Result<(String, String), ShopError> {
    sell(&mut tx).await?;
    if attempt < 3 {
        return Err(conflict().into());
    }
    Ok((name.clone(), lease.key().as_str().to_owned()))
}

/// `Send`, but not `Sync`, as the body of a request is.
#[with_lock(lease, on = &shop.leases, key = const "l")]
#[with_lock(named, on = &shop.db, key = const "n", wait = "1s", tx = tx)]
async fn not_sync(shop: &Shop, request: std::cell::Cell<u32>) -> Result<u32, ShopError> {
    request.set(request.get() + 1);
    sell(&mut tx).await?;
    Ok(request.get())
}

fn conflict() -> Error {
    lockkit::OrConflict::or_conflict(sqlx::sqlite::SqliteQueryResult::default()).unwrap_err()
}

#[tokio::test]
async fn the_lower_lock_may_have_the_transaction_or_the_upper_one() {
    let shop = Shop::new().await;
    let name = || "n".to_owned();
    assert!(lease_and_row(&shop, 7, name(), Err(ShopError::Refused)).await.is_err());
    assert_eq!(shop.stock().await, 10);
    assert_eq!(assert_send(lease_and_row(&shop, 7, name(), Ok(()))).await.unwrap(), "n l");
    assert_eq!(shop.stock().await, 9);
    // On SQLite the lower lease cannot be taken while the upper transaction has the only write lock.
    let busy = assert_send(lease_with_tx_and_lease(&shop, name())).await.unwrap_err();
    assert!(matches!(busy, ShopError::Lock(_)), "{busy:?}");
    assert_send(not_sync(&shop, 1.into())).await.unwrap();
    assert_eq!(shop.stock().await, 8);
    let ran = AtomicU32::new(0);
    assert!(assert_send(attempts_and_lease(&shop, &ran)).await.is_err());
    let (name, key) = assert_send(attempts_each_with_a_lease_and_tx(&shop, name())).await.unwrap();
    assert_eq!((name.as_str(), key.as_str()), ("n", "l3"));
    assert_eq!(shop.stock().await, 7);
}

#[with_lock(lease, on = &shop.leases, key = "l", wait = "0s", on_busy = Ok("upper"))]
#[with_lock(lease, on = &shop.leases, key = "m", wait = "0s", on_busy = Ok("lower"))]
async fn which_is_busy(shop: &Shop) -> Result<&'static str, ShopError> {
    assert!(shop.is_held("l").await && shop.is_held("m").await);
    Ok("none")
}

#[tokio::test]
async fn each_lock_has_its_own_answer_when_it_is_busy() {
    let shop = Shop::new().await;
    assert_eq!(which_is_busy(&shop).await.unwrap(), "none");
    let lower = shop.leases.lease("m").acquire().await.unwrap();
    assert_eq!(which_is_busy(&shop).await.unwrap(), "lower");
    let _upper = shop.leases.lease("l").acquire().await.unwrap();
    assert_eq!(which_is_busy(&shop).await.unwrap(), "upper");
    drop(lower);
}

struct Service {
    shop: Shop,
}

#[async_trait::async_trait]
trait Dynamic: Send + Sync {
    async fn above(&self, pair: (u8, String)) -> Result<String, ShopError>;
    async fn below(&self, pair: (u8, String)) -> Result<String, ShopError>;
    async fn between(&mut self, pair: (u8, String), n: u8) -> Result<String, ShopError>;
    async fn by_value(self: Box<Self>, pair: (u8, String)) -> Result<String, ShopError>;
}

#[async_trait::async_trait]
impl Dynamic for Service {
    #[tracing::instrument(skip_all, err, ret)]
    #[with_lock(lease, on = &self.shop.leases, key = "o:{a}", as = lease)]
    async fn above(&self, (a, _b): (u8, String)) -> Result<String, ShopError> {
        Ok(lease.key().as_str().to_owned())
    }

    #[with_lock(lease, on = &self.shop.leases, key = "o:{a}", as = lease)]
    #[tracing::instrument(skip_all, err)]
    async fn below(&self, (a, b): (u8, String)) -> Result<String, ShopError> {
        Ok(lease.key().as_str().to_owned() + &b)
    }

    #[tracing::instrument(skip(self))]
    #[with_lock(lease, on = &self.shop.leases, key = "o:{a}", as = lease)]
    #[tracing::instrument(skip_all)]
    #[with_lock(named, on = &self.shop.db, key = "p:{a}:{n}", tx = tx)]
    async fn between(&mut self, (a, mut b): (u8, String), n: u8) -> Result<String, ShopError> {
        b.push('!');
        sell(&mut tx).await?;
        Ok(format!("{}{b}{n}", lease.key()))
    }

    #[with_lock(version, on = &self.shop.db, attempts = 2, tx = tx)]
    #[tracing::instrument(skip_all)]
    async fn by_value(self: Box<Self>, (a, b): (u8, String)) -> Result<String, ShopError> {
        sell(&mut tx).await?;
        Ok(format!("{a}{b}"))
    }
}

#[tracing::instrument(skip_all, err, ret)]
#[tracing::instrument(skip_all)]
#[with_lock(named, on = &shop.db, key = "o:{a}", tx = tx)]
async fn twice_instrumented(shop: &Shop, (a, b): (u8, String)) -> Result<String, ShopError> {
    sell(&mut tx).await?;
    Ok(format!("{a}{b}"))
}

#[tokio::test]
async fn patterns_instrumentation_and_async_trait_go_together() {
    let mut service = Service { shop: Shop::new().await };
    let pair = || (7, "b".to_owned());
    assert_eq!(assert_send(service.above(pair())).await.unwrap(), "o:7");
    assert_eq!(assert_send(service.below(pair())).await.unwrap(), "o:7b");
    assert_eq!(assert_send(service.between(pair(), 3)).await.unwrap(), "o:7b!3");
    assert_eq!(assert_send(twice_instrumented(&service.shop, pair())).await.unwrap(), "7b");
    assert_eq!(service.shop.stock().await, 8);
    assert_eq!(assert_send(Box::new(service).by_value(pair())).await.unwrap(), "7b");
}

#[with_lock(lease, on = &shop.leases, key = "upper", as = upper)]
#[cfg_attr(test, with_lock(lease, on = &shop.leases, key = "{lower}", as = inner))]
async fn conditional(shop: &Shop, lower: &str) -> Result<bool, Error> {
    Ok(upper.is_trusted() && inner.key().as_str() == lower)
}

#[cfg_attr(test, with_lock(lease, on = &shop.leases, key = "upper", as = upper))]
#[with_lock(lease, on = &shop.leases, key = "lower:{upper:?}")]
async fn conditional_above(shop: &Shop) -> Result<bool, Error> {
    Ok(upper.is_trusted())
}

#[tokio::test]
async fn an_attribute_in_a_cfg_attr_nests_as_it_is_written() {
    let shop = Shop::new().await;
    assert!(conditional(&shop, "lower").await.unwrap());
    assert!(conditional_above(&shop).await.unwrap());
}
