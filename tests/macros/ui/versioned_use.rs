use sqlx::SqlitePool;

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct NotFromRow {
    item_id: i64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Item {
    item_id: i64,
    version: i64,
}

struct Money;

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct NotStorable {
    item_id: i64,
    price: Money,
    version: i64,
}

async fn not_from_row(pool: &SqlitePool) {
    let _ = NotFromRow::load(pool, 7).await;
}

async fn wrong_place(url: &str, item: &mut Item) {
    let _ = item.save(url).await;
}

async fn wrong_key(pool: &SqlitePool) {
    let _ = Item::load(pool, "seven").await;
}

async fn not_storable(pool: &SqlitePool, item: &mut NotStorable) {
    let _ = item.save(pool).await;
}

async fn version_of_a_transaction(pool: &SqlitePool) -> lockkit::Result<lockkit::Version> {
    let mut tx = lockkit::begin(pool).await?;
    let bumped = lockkit::VersionedRow::table("t_items").by("item_id", 7).expect(1).bump(&mut *tx).await?;
    Ok(bumped)
}

fn main() {}
