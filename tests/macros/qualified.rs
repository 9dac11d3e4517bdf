//! Tables that are named with their schema, in the attribute and the derive.

use lockkit::{Error, with_lock};
use sqlx::SqlitePool;

use crate::fixture::Shop;

#[derive(Debug, sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "main.t_items", key = "item_id")]
struct Article {
    item_id: i64,
    stock: i64,
    version: i64,
}

#[with_lock(row, on = db, table = "main.t_items", by(item_id = item_id), tx = tx)]
async fn sell(db: &SqlitePool, item_id: i64) -> Result<i64, Error> {
    let mut item = Article::load(&mut tx, item_id).await?;
    item.stock -= 1;
    let _ = item.save(&mut tx).await?;
    Ok(item.stock)
}

#[tokio::test]
async fn a_table_with_its_schema_is_locked_and_saved() {
    let shop = Shop::new().await;
    let before = shop.stock().await;
    assert_eq!(sell(&shop.db, 7).await.unwrap(), before - 1);
    assert_eq!(shop.stock().await, before - 1);
    assert!(matches!(sell(&shop.db, 99).await, Err(Error::NoSuchRow { table, .. }) if table == "main.t_items"));
}
