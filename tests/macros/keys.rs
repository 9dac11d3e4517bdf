//! Keys: templates and expressions.

use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
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

#[with_lock(lease, on = leases, key = "report-{date}", as = lease)]
async fn report(leases: &Pool, date: &str) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(lease, on = leases, key = "report-{kind}-{date}:{id}", as = lease)]
async fn reports(leases: &Pool, kind: &str, date: &str, id: &str) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[tokio::test]
async fn a_lock_by_hand_and_one_of_the_attribute_have_the_same_key() {
    let shop = Shop::new().await;
    let (leases, date, id) = (&shop.leases, "2026-01-31", "6a2f41a3-c54c-4d81-9b0e-5b3b6a1d7f10");
    assert_eq!(report(leases, date).await.unwrap(), format!("report-{date}"));
    assert_eq!(*report(leases, date).await.unwrap(), *lockkit::key!("report-{date}"));
    for (kind, date) in [("a", date), ("a-b", "c"), ("a", "b-c"), ("%", "\n")] {
        assert_eq!(*reports(leases, kind, date, id).await.unwrap(), *lockkit::key!("report-{kind}-{date}:{id}"));
    }
    assert_eq!(lockkit::key!("nightly"), "nightly");
}

#[with_lock(lease, on = leases, key = "a:{first}-{second}/{third}.", as = lease)]
async fn three(leases: &Pool, first: &str, second: &str, third: &str) -> Result<String, Error> {
    Ok(lease.key().as_str().to_owned())
}

#[tokio::test]
async fn different_arguments_never_make_one_key_with_several_separators() {
    let shop = Shop::new().await;
    let parts = ["", "x", "-", "/", ":", ".", "-x", "x/", "%", "2D", "%2D", "-x/"];
    let mut keys = std::collections::HashSet::new();
    for first in parts {
        for second in parts {
            for third in parts {
                let key = three(&shop.leases, first, second, third).await.unwrap();
                assert!(keys.insert(key), "{first:?} {second:?} {third:?}");
            }
        }
    }
}

struct Order {
    id: u32,
    r#type: (u8, &'static str),
    calls: AtomicU32,
}

impl Order {
    fn value(&self) -> u32 {
        self.calls.fetch_add(1, SeqCst)
    }

    #[with_lock(lease, on = leases, key = "{self.id:>0width$}.{self.type.1}", as = lease)]
    async fn lock(&self, leases: &Pool, width: usize) -> Result<String, Error> {
        Ok(lease.key().as_str().to_owned())
    }
}

#[with_lock(lease, on = leases, key = "{order.id}:{order.type.0}:{order.value()}", as = lease)]
async fn fields(leases: &Pool, order: Order) -> Result<(String, u32), Error> {
    Ok((lease.key().as_str().to_owned(), order.calls.into_inner()))
}

#[tokio::test]
async fn fields_and_calls_are_captured_and_evaluated_once() {
    let shop = Shop::new().await;
    let order = || Order { id: 7, r#type: (1, "a.b"), calls: AtomicU32::new(5) };
    assert_eq!(order().lock(&shop.leases, 3).await.unwrap(), "007.a%2Eb");
    assert_eq!(fields(&shop.leases, order()).await.unwrap(), ("7:1:5".to_owned(), 6));
    let (pair, order) = ((1, ("x", 2)), order());
    assert_eq!(lockkit::key!("{pair.1.0}/{pair.0:02}/{order.value():?}"), "x/01/5");
    assert_eq!(order.value(), 6);
}

#[tokio::test]
async fn a_task_can_make_a_key_in_the_statement_that_awaits() {
    let shop = Shop::new().await;
    let (leases, key) = (shop.leases.clone(), 7);
    let task = tokio::spawn(async move { leases.lease(lockkit::key!("order:{key}")).try_acquire().await });
    assert_eq!(*task.await.unwrap().unwrap().expect("it is free").key(), "order:7");
}

struct Named(Pool);

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("named")
    }
}

#[async_trait::async_trait]
trait Keys {
    async fn template(self: Arc<Self>) -> Result<String, Error>;
    async fn expression(self: Arc<Self>) -> Result<String, Error>;
}

#[async_trait::async_trait]
impl Keys for Named {
    #[with_lock(lease, on = &self.0, key = "{{self}}:{self}", as = lease)]
    async fn template(self: Arc<Self>) -> Result<String, Error> {
        drop(self);
        Ok(lease.key().as_str().to_owned())
    }

    #[with_lock(lease, on = &self.0, key = format!("{{self}}:{self}"), as = lease)]
    async fn expression(self: Arc<Self>) -> Result<String, Error> {
        drop(self);
        Ok(lease.key().as_str().to_owned())
    }
}

#[tokio::test]
async fn a_key_captures_an_owned_self_under_async_trait() {
    let shop = Shop::new().await;
    let named = Arc::new(Named(shop.leases.clone()));
    assert_eq!(named.clone().template().await.unwrap(), "{self}:named");
    assert_eq!(named.expression().await.unwrap(), "{self}:named");
}

#[with_lock(lease, on = leases, key = const "a{id}", as = lease, crate = "::lockkit")]
async fn constant(leases: &Pool, id: u8) -> Result<(String, u8), Error> {
    Ok((lease.key().as_str().to_owned(), id))
}

#[tokio::test]
async fn a_constant_key_is_no_template() {
    assert_eq!(constant(&Shop::new().await.leases, 1).await.unwrap(), ("a{id}".to_owned(), 1));
}
