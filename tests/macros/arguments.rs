//! What becomes of the arguments of a function: the body owns them, and drops them, as without the attribute.

use std::{
    cell::Cell,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use lockkit::{Error, Leases, testing::MemoryStore, with_lock};

use crate::fixture::{Shop, assert_send};

/// `Send`, but not `Sync`.
struct Counter {
    shop: Arc<Shop>,
    count: Cell<u8>,
}

impl Counter {
    #[with_lock(named, on = &self.shop.db, key = "c", tx = _tx)]
    async fn by_value(self) -> Result<u8, Error> {
        tokio::task::yield_now().await;
        Ok(self.count.get())
    }

    #[with_lock(named, on = &self.shop.db, key = "c", tx = _tx)]
    async fn by_mutable_value(mut self) -> Result<u8, Error> {
        tokio::task::yield_now().await;
        self.count = Cell::new(self.count.get() + 1);
        Ok(self.count.get())
    }

    #[with_lock(named, on = &self.shop.db, key = "c", tx = _tx)]
    async fn boxed(self: Box<Self>) -> Result<u8, Error> {
        tokio::task::yield_now().await;
        Ok(self.count.get())
    }
}

#[with_lock(named, on = &shop.db, key = const "c", tx = _tx)]
async fn attributes(
    shop: &Shop,
    #[allow(clippy::used_underscore_binding)] _count: Cell<u8>,
    #[cfg(test)] mut count: Cell<u8>,
    #[cfg(not(test))] other: Cell<u8>,
) -> Result<u8, Error> {
    tokio::task::yield_now().await;
    count.set(count.get() + 1);
    count = Cell::new(count.get() + 1);
    Ok(count.get())
}

#[with_lock(named, on = &shop.db, key = const "c", tx = _tx)]
async fn or_pattern(shop: &Shop, (Ok(either) | Err(either)): Result<String, String>) -> Result<String, Error> {
    tokio::task::yield_now().await;
    Ok(either)
}

#[async_trait]
trait Counts {
    async fn count(self: Box<Self>, pair: (Cell<u8>, u8)) -> Result<u8, Error>;
}

#[async_trait]
impl Counts for Counter {
    #[with_lock(named, on = &self.shop.db, key = const "c", tx = _tx)]
    async fn count(self: Box<Self>, (first, second): (Cell<u8>, u8)) -> Result<u8, Error> {
        tokio::task::yield_now().await;
        Ok(self.count.get() + first.get() + second)
    }
}

#[tokio::test]
async fn an_argument_that_is_not_sync_leaves_the_function_send() {
    let shop = Arc::new(Shop::new().await);
    let counter = || Counter { shop: shop.clone(), count: Cell::new(1) };
    assert_eq!(assert_send(counter().by_value()).await.unwrap(), 1);
    assert_eq!(assert_send(counter().by_mutable_value()).await.unwrap(), 2);
    assert_eq!(assert_send(Box::new(counter()).boxed()).await.unwrap(), 1);
    assert_eq!(assert_send(attributes(&shop, Cell::new(0), Cell::new(1))).await.unwrap(), 3);
    assert_eq!(assert_send(or_pattern(&shop, Err("x".to_owned()))).await.unwrap(), "x");
    assert_eq!(assert_send(Box::new(counter()).count((Cell::new(2), 3))).await.unwrap(), 6);
}

/// Tells when it is dropped.
struct Told(&'static str, Arc<Mutex<Vec<&'static str>>>);

impl Drop for Told {
    fn drop(&mut self) {
        self.1.lock().unwrap().push(self.0);
    }
}

struct Owner(Told);

impl Owner {
    #[with_lock(lease, on = leases, key = const "k")]
    async fn locked(
        self,
        leases: &Leases<MemoryStore>,
        first: Told,
        (second, third): (Told, Told),
    ) -> Result<(), Error> {
        let _used = (&third.0, &first.0, &self.0.0, &second.0);
        Ok(())
    }

    #[with_lock(lease, on = leases, key = const "k")]
    #[with_lock(version, attempts = 1)]
    async fn retried(self, leases: &Leases<MemoryStore>, first: Told, second: Told) -> Result<(), Error> {
        let _used = (&second.0, &first.0, &self.0.0);
        Ok(())
    }

    async fn plain(self, first: Told, (second, third): (Told, Told)) {
        tokio::task::yield_now().await;
        let _used = (&third.0, &first.0, &self.0.0, &second.0);
    }
}

#[tokio::test]
async fn arguments_are_dropped_in_the_order_of_the_function() {
    let leases = Leases::new(MemoryStore::new());
    let dropped = Arc::default();
    let told = |name| Told(name, Arc::clone(&dropped));
    let taken = || std::mem::take(&mut *dropped.lock().unwrap());
    Owner(told("self")).plain(told("1"), (told("2"), told("3"))).await;
    let expected = taken();
    assert_eq!(expected, ["3", "2", "1", "self"]);
    Owner(told("self")).locked(&leases, told("1"), (told("2"), told("3"))).await.unwrap();
    assert_eq!(taken(), expected);
    Owner(told("self")).retried(&leases, told("1"), told("2")).await.unwrap();
    assert_eq!(taken(), ["2", "1", "self"]);
}
