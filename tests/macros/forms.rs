//! Every kind of function that the attribute goes on. That they compile without a warning is most of the test.

use std::{fmt::Display, future::Future, sync::Arc};

use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

use crate::fixture::{Shop, ShopError, assert_send, is_held, sell};

type Pool = Leases<SqlitePool>;
type Api<T> = Result<T, ShopError>;

/// As an extractor of axum is.
struct State<T>(T);
struct Path<T>(T);

/// Docs and attributes stay.
///
/// # Errors
/// When the text is no number.
#[with_lock(lease, on = &leases, key = "order:{id}", ttl = "5s", wait = "1s",)]
pub(crate) async fn question_mark_and_return(leases: Pool, id: i64, text: &str) -> Result<i64, anyhow::Error> {
    if id < 0 {
        return Err(anyhow::anyhow!("negative"));
    }
    let number: i64 = text.parse()?;
    Ok(number + 1)
}

#[with_lock(lease, on = &leases, key = "{id}:{name}", as = lease)]
async fn patterns(
    State((leases, ..)): State<(Arc<Pool>, u8)>,
    Path(id): Path<u32>,
    Path((name, mut list)): Path<(String, Vec<u8>)>,
    _: u8,
) -> Api<String> {
    list.push(1);
    drop((list, name));
    let _ = (id, leases);
    Ok(lease.key().as_str().to_owned())
}

#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = id), tx = tx)]
async fn patterns_in_a_transaction(State(shop): State<Arc<Shop>>, Path((id, mut n)): Path<(i64, u8)>) -> Api<u8> {
    sell(&mut tx).await?;
    n += 1;
    Ok(n)
}

#[with_lock(lease, on = leases, key = name)]
async fn generic<'a, T, const N: usize>(
    leases: &'a Pool,
    name: &'a str,
    value: T,
    mut list: Vec<usize>,
    rest: impl Iterator<Item = usize> + Send,
) -> Result<(&'a str, String, Vec<usize>), Error>
where
    T: Display + Send,
{
    list.push(N);
    list.extend(rest);
    tokio::task::yield_now().await;
    Ok((name, value.to_string(), list))
}

#[with_lock(version, on = &shop.db, attempts = 2, tx = tx)]
async fn generic_in_attempts<'a, T, const N: usize>(shop: &'a Shop, value: &'a T) -> Result<(&'a T, usize), ShopError>
where
    T: Sync + ?Sized,
{
    sell(&mut tx).await?;
    Ok((value, N))
}

#[with_lock(lease, on = leases, key = "opaque")]
async fn opaque(leases: &Pool) -> Result<impl Iterator<Item = u8> + use<>, Error> {
    Ok([1_u8, 2].into_iter())
}

#[with_lock(lease, on = leases, key = "own names")]
async fn own_names(leases: &Pool) -> Result<u8, Error> {
    let (lease, request, key, body, result, err, never) = (1, 2, 3, 4, 5, 6, 7);
    Ok(lease + request + key + body + result + err + never)
}

#[with_lock(lease, on = leases, key = "outer {pool}")]
#[with_lock(lease, on = leases, key = "inner {pool}")]
async fn twice(leases: &Pool, pool: &str) -> Result<usize, Error> {
    Ok(leases.list("").await?.len())
}

#[with_lock(lease, on = &shop.leases, key = "outer")]
#[with_lock(version, on = &shop.db, attempts = 2, tx = tx)]
async fn two_kinds(shop: &Shop) -> Result<bool, ShopError> {
    sell(&mut tx).await?;
    Ok(true)
}

#[tracing::instrument(skip_all)]
#[with_lock(lease, on = leases, key = "i{name}")]
async fn instrumented_first(leases: &Pool, name: String) -> Result<String, Error> {
    Ok(name)
}

#[with_lock(lease, on = leases, key = "i{name}")]
#[tracing::instrument(skip_all)]
async fn instrumented_last(leases: &Pool, name: String) -> Result<String, Error> {
    Ok(name)
}

#[tracing::instrument(skip_all, err, ret)]
#[with_lock(row, on = &shop.db, table = "t_items", by(item_id = 7), attempts = 2, tx = tx)]
async fn instrumented_first_in_attempts(shop: &Shop, name: String) -> Result<usize, ShopError> {
    sell(&mut tx).await?;
    Ok(name.len())
}

#[with_lock(named, on = &shop.db, key = "{name}", tx = tx)]
#[tracing::instrument(skip_all, err)]
async fn instrumented_last_in_a_transaction(shop: &Shop, name: String) -> Result<String, ShopError> {
    sell(&mut tx).await?;
    Ok(name)
}

#[tracing::instrument(skip_all)]
#[with_lock(named, on = &shop.db, key = "{name}", tx = tx)]
async fn instrumented_first_in_a_transaction(shop: &Shop, name: String) -> Result<String, ShopError> {
    sell(&mut tx).await?;
    Ok(name)
}

#[with_lock(lease, on = r#loop, key = "{match}", as = r#type)]
async fn raw_identifiers(r#loop: &Pool, r#match: u8) -> Result<bool, Error> {
    Ok(r#type.is_trusted())
}

#[with_lock(lease, on = leases, key = "depth {depth}")]
async fn recursive(leases: &Pool, depth: u8) -> Result<u8, Error> {
    if depth == 0 {
        return Ok(0);
    }
    Ok(Box::pin(recursive(leases, depth - 1)).await? + 1)
}

macro_rules! locked {
    ($name:ident, $table:literal, $key:literal, $wait:expr, $returns:ty, $body:block) => {
        #[with_lock(lease, on = leases, key = $key, wait = $wait)]
        async fn $name(leases: &Pool) -> $returns $body

        mod rows {
            #[lockkit::with_lock(row, on = &shop.db, table = $table, by(item_id = id), wait = $wait, tx = tx)]
            pub(crate) async fn $name(shop: &super::Shop, id: i64) -> Result<u8, lockkit::Error> {
                Ok(u8::from(super::sell(&mut tx).await.is_ok()))
            }
        }
    };
}

locked!(from_macro_rules, "t_items", "macro", "2s", Result<u8, Error>, { Ok(1) });

mod renamed {
    pub(crate) use lockkit as locks;
}

#[with_lock(lease, on = leases, key = "renamed", crate = crate::forms::renamed::locks)]
async fn with_a_renamed_crate(leases: &Pool) -> Result<u8, Error> {
    Ok(1)
}

#[with_lock(lease, on = leases, key = "lint")]
async fn inner_attributes(leases: &Pool) -> Result<u8, Error> {
    #![allow(unused_variables)]
    let unused = 1;
    Ok(1)
}

struct Service {
    shop: Arc<Shop>,
    hits: u32,
}

impl Service {
    #[with_lock(lease, on = &self.shop.leases, key = format!("service:{}", self.hits))]
    async fn by_ref(&self, x: u8) -> Result<u8, Error> {
        Ok(x)
    }

    #[with_lock(lease, on = &self.shop.leases.clone(), key = "service")]
    async fn by_mut(&mut self) -> Result<u32, Error> {
        self.hits += 1;
        Ok(self.hits)
    }

    #[with_lock(lease, on = &self.shop.leases, key = "service", tx = tx)]
    async fn by_value(mut self) -> Result<Self, ShopError> {
        sell(&mut tx).await?;
        self.hits += 1;
        Ok(self)
    }

    #[with_lock(lease, on = &this.shop.leases, key = "service")]
    async fn by_argument(this: &Self) -> Result<u32, Error> {
        Ok(this.hits)
    }
}

trait Native {
    fn go(&self, name: &str) -> impl Future<Output = Result<bool, Error>> + Send;
}

impl Native for Service {
    #[with_lock(lease, on = &self.shop.leases, key = "native {name}")]
    async fn go(&self, name: &str) -> Result<bool, Error> {
        Ok(is_held(&self.shop.leases, "native x").await && name == "x")
    }
}

#[async_trait::async_trait]
trait Dynamic: Send + Sync {
    async fn run(&self, id: u32, name: String) -> Result<u32, Error>;
    async fn sell(&mut self, id: i64, name: String, pair: (u8, String)) -> Result<String, ShopError>;
    async fn attempts(&mut self, name: String) -> Result<u32, ShopError>;
    async fn end(self: Box<Self>) -> Result<u32, ShopError>;
}

#[async_trait::async_trait]
impl Dynamic for Service {
    #[with_lock(lease, on = &self.shop.leases, key = "dyn:{id}:{name}")]
    async fn run(&self, id: u32, name: String) -> Result<u32, Error> {
        if name.is_empty() {
            return Ok(0);
        }
        assert!(self.shop.is_held("dyn:5:x").await);
        Ok(id)
    }

    #[with_lock(row, on = &self.shop.db, table = "t_items", by(item_id = id), tx = tx)]
    async fn sell(&mut self, id: i64, name: String, (n, text): (u8, String)) -> Result<String, ShopError> {
        self.hits += u32::from(n);
        sell(&mut tx).await?;
        Ok(name + &text)
    }

    #[with_lock(version, on = &self.shop.db, attempts = 2, as = attempt, tx = tx)]
    #[tracing::instrument(skip_all)]
    async fn attempts(&mut self, name: String) -> Result<u32, ShopError> {
        self.hits += 1;
        sell(&mut tx).await?;
        Ok(attempt + u32::try_from(name.len()).unwrap())
    }

    #[tracing::instrument(skip_all)]
    #[with_lock(named, on = &self.shop.db, key = "end", tx = tx)]
    async fn end(self: Box<Self>) -> Result<u32, ShopError> {
        sell(&mut tx).await?;
        Ok(self.hits)
    }
}

#[tokio::test]
async fn free_functions_work() {
    let shop = Shop::new().await;
    let leases = &shop.leases;
    assert_eq!(assert_send(question_mark_and_return(leases.clone(), 7, "41")).await.unwrap(), 42);
    assert!(question_mark_and_return(leases.clone(), -1, "41").await.is_err());
    let key = patterns(State((Arc::new(leases.clone()), 0)), Path(3), Path(("n".to_owned(), vec![])), 0);
    assert_eq!(assert_send(key).await.unwrap(), "3:n");
    let (name, value, list) =
        assert_send(generic::<_, 4>(leases, "name", 5_u8, vec![], std::iter::once(9))).await.unwrap();
    assert_eq!((name, value.as_str(), list), ("name", "5", vec![4, 9]));
    assert_eq!(assert_send(generic_in_attempts::<_, 3>(&shop, "x")).await.unwrap(), ("x", 3));
    assert_eq!(assert_send(opaque(leases)).await.unwrap().count(), 2);
    assert_eq!(own_names(leases).await.unwrap(), 28);
    assert!(raw_identifiers(leases, 1).await.unwrap());
    assert_eq!(assert_send(recursive(leases, 3)).await.unwrap(), 3);
    assert_eq!(from_macro_rules(leases).await.unwrap(), 1);
    assert_eq!(rows::from_macro_rules(&shop, 7).await.unwrap(), 1);
    assert_eq!(with_a_renamed_crate(leases).await.unwrap(), 1);
    assert_eq!(inner_attributes(leases).await.unwrap(), 1);
    let shop = Arc::new(shop);
    assert_eq!(assert_send(patterns_in_a_transaction(State(shop), Path((7, 1)))).await.unwrap(), 2);
}

#[tokio::test]
async fn other_attributes_go_with_it() {
    let shop = Shop::new().await;
    let leases = &shop.leases;
    assert_eq!(assert_send(twice(leases, "x")).await.unwrap(), 2);
    assert!(assert_send(two_kinds(&shop)).await.unwrap());
    let name = || "x".to_owned();
    assert_eq!(assert_send(instrumented_first(leases, name())).await.unwrap(), "x");
    assert_eq!(assert_send(instrumented_last(leases, name())).await.unwrap(), "x");
    assert_eq!(assert_send(instrumented_first_in_attempts(&shop, name())).await.unwrap(), 1);
    assert_eq!(assert_send(instrumented_first_in_a_transaction(&shop, name())).await.unwrap(), "x");
    assert_eq!(assert_send(instrumented_last_in_a_transaction(&shop, name())).await.unwrap(), "x");
    assert_eq!(shop.stock().await, 6);
}

#[tokio::test]
async fn methods_work() {
    let shop = Arc::new(Shop::new().await);
    let mut service = Service { shop: shop.clone(), hits: 0 };
    assert_eq!(assert_send(service.by_ref(1)).await.unwrap(), 1);
    assert_eq!(assert_send(service.by_mut()).await.unwrap(), 1);
    assert_eq!(assert_send(Service::by_argument(&service)).await.unwrap(), 1);
    assert!(assert_send(service.go("x")).await.unwrap());
    assert_eq!(assert_send(service.by_value()).await.unwrap().hits, 2);
    assert_eq!(shop.stock().await, 9);
}

#[tokio::test]
async fn async_trait_works() {
    let shop = Arc::new(Shop::new().await);
    let mut service: Box<dyn Dynamic> = Box::new(Service { shop: shop.clone(), hits: 0 });
    assert_eq!(assert_send(service.run(5, "x".to_owned())).await.unwrap(), 5);
    assert_eq!(assert_send(service.run(5, String::new())).await.unwrap(), 0);
    assert_eq!(assert_send(service.sell(7, "x".to_owned(), (2, "y".to_owned()))).await.unwrap(), "xy");
    assert_eq!(assert_send(service.attempts("abc".to_owned())).await.unwrap(), 4);
    assert_eq!(assert_send(service.end()).await.unwrap(), 3);
    assert_eq!(shop.stock().await, 7);
}
