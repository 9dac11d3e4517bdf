#![deny(unused_must_use)]

use lockkit::Result;
use sqlx::SqlitePool;

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Item {
    item_id: i64,
    version: i64,
}

async fn dropped_in_a_transaction(pool: &SqlitePool, item: &mut Item) -> Result<()> {
    let mut tx = lockkit::begin(pool).await?;
    item.save(&mut *tx).await?;
    tx.commit().await
}

async fn nothing_is_left_to_do(pool: &SqlitePool, item: &mut Item) -> Result<()> {
    item.save(pool).await?;
    let mut tx = lockkit::begin(pool).await?;
    item.save(&mut *tx).await?.commit(tx).await?;
    let mut tx = lockkit::begin(pool).await?;
    let _ = item.save(&mut *tx).await?;
    tx.commit().await
}

fn main() {}
