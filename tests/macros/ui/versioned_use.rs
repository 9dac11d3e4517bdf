use lockkit::{Result, Version, VersionedRow};
use sqlx::SqlitePool;

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Item {
    item_id: i64,
    version: i64,
}

fn neither_pool_nor_connection(url: &str, item: &mut Item) {
    drop(item.save(url));
}

async fn changed_before_the_commit(pool: &SqlitePool, item: &mut Item) -> Result<()> {
    let mut tx = lockkit::begin(pool).await?;
    let saved = item.save(&mut *tx).await?;
    item.version += 1;
    saved.commit(tx).await
}

async fn version_of_a_transaction(pool: &SqlitePool) -> Result<Version> {
    let mut tx = lockkit::begin(pool).await?;
    let bumped = VersionedRow::table("t_items").by("item_id", 7).expected(1).bump(&mut *tx).await?;
    tx.rollback().await?;
    let version: Version = bumped;
    Ok(version)
}

fn main() {}
