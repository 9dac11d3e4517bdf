#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Conversions {
    item_id: i64,
    #[sqlx(flatten)]
    price: (),
    #[sqlx(try_from = "i64")]
    stock: u64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "itemId")]
#[sqlx(rename_all = "camelCase")]
struct RenamedAll {
    item_id: i64,
    version: i64,
}

fn main() {}
