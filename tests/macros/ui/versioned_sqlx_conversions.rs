#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Conversions {
    item_id: i64,
    #[sqlx(json)]
    tags: Vec<String>,
    #[sqlx(flatten)]
    price: i64,
    #[sqlx(try_from = "i64")]
    stock: u64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "itemId")]
#[sqlx(rename_all = "camelCase")]
struct RenamedAll {
    item_id: i64,
    version: i64,
}

fn main() {}
