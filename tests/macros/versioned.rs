//! `#[derive(Versioned)]`: every kind of struct that it goes on. What it does is tested on all databases elsewhere.

use std::marker::PhantomData;

use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

use crate::fixture::{Shop, ShopError, assert_send};

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id", version = "version")]
struct Article {
    item_id: i64,
    stock: i64,
    version: i64,
}

#[with_lock(version, attempts = 1000)]
async fn take(db: &SqlitePool, item_id: i64) -> Result<i64, ShopError> {
    let mut item = Article::load(db, item_id).await?;
    item.stock -= 1;
    item.save(db).await?;
    Ok(item.stock)
}

#[tokio::test]
async fn a_save_is_repeated_until_nobody_else_was_faster() {
    let shop = Shop::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let db = shop.db.clone();
        tasks.spawn(async move {
            take(&db, 7).await.unwrap();
            take(&db, 7).await.unwrap();
        });
    }
    tasks.join_all().await;
    assert_eq!(shop.stock().await, 2);
}

#[with_lock(version, on = db, attempts = 3, tx = tx)]
async fn take_in_a_transaction(db: &SqlitePool, fails: bool) -> Result<i64, ShopError> {
    let mut item = Article::load(&mut *tx, 7).await?;
    item.stock -= 1;
    let _ = item.save(&mut *tx).await?;
    if fails { Err(ShopError::Refused) } else { Ok(item.stock) }
}

#[tokio::test]
async fn it_goes_with_a_transaction_of_the_attribute() {
    let shop = Shop::new().await;
    assert_send(take_in_a_transaction(&shop.db, true)).await.unwrap_err();
    assert_eq!(take_in_a_transaction(&shop.db, false).await.unwrap(), 9);
    assert_eq!(Article::load(&shop.db, 7).await.unwrap().version, 2);
}

mod renamed {
    pub(crate) use lockkit as locks;
}

/// Names that the derive uses itself, and everything that may stand on a struct.
#[derive(Debug, Clone, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", crate = crate::versioned::renamed::locks)]
#[versioned(key("item_id"))]
struct Odd<DB, T>
where
    T: Clone,
{
    #[versioned(rename = "item_id")]
    #[sqlx(rename = "item_id")]
    on: i64,
    #[sqlx(rename = "stock")]
    r#type: T,
    version: i32,
    #[sqlx(skip)]
    row: PhantomData<DB>,
    #[sqlx(default)]
    #[versioned(skip)]
    columns: u64,
}

/// It can be saved, not loaded.
#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Borrowed<'v, const N: usize> {
    item_id: &'v i64,
    stock: Option<i64>,
    version: i64,
}

/// A row that is nothing but its version.
#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
pub(crate) struct Bare {
    item_id: i64,
    version: i16,
}

macro_rules! record {
    ($name:ident, $table:literal, $key:literal, $field:ident, $number:ty) => {
        #[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
        #[versioned(table = $table, key = $key)]
        struct $name {
            item_id: i64,
            $field: $number,
            version: $number,
        }
    };
}

record!(FromMacroRules, "t_items", "item_id", stock, i64);

#[tokio::test]
async fn all_kinds_of_structs_work() {
    let shop = Shop::new().await;
    let db = &shop.db;
    let mut odd: Odd<u8, i64> = assert_send(Odd::load(db, 7)).await.unwrap();
    odd.r#type = 4;
    assert_send(odd.save(db)).await.unwrap();
    assert_eq!((odd.version, odd.on, odd.columns, shop.stock().await), (2, 7, 0, 4));

    let mut borrowed = Borrowed::<1> { item_id: &7, stock: Some(3), version: 2 };
    borrowed.save(db).await.unwrap();
    assert_eq!((borrowed.version, shop.stock().await), (3, 3));

    let mut bare = Bare::load(db, 7).await.unwrap();
    bare.save(db).await.unwrap();
    assert_eq!((bare.version, shop.stock().await), (4, 3));

    let mut item = FromMacroRules::load(db, 7).await.unwrap();
    item.stock = 1;
    item.save(db).await.unwrap();
    assert_eq!((item.version, shop.stock().await), (5, 1));
    assert!(matches!(Article::load(db, 8).await, Err(Error::NoSuchRow { .. })));
}
