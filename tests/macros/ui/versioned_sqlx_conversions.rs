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
#[versioned(table = "t_items", key = "item-id")]
#[sqlx(rename_all = "kebab-case")]
struct Kebab {
    item_id: i64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "itemId")]
#[sqlx(rename_all = "camelcase")]
struct Misspelt {
    item_id: i64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
#[sqlx(rename_all = "camelCase")]
struct NamedLikeItsField {
    item_id: i64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key("item_id", "place"))]
struct KeyOfJson {
    item_id: i64,
    #[sqlx(json)]
    place: Vec<String>,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct OneColumnTwice {
    item_id: i64,
    stock: i64,
    #[sqlx(rename = "stock")]
    pieces: i64,
    version: i64,
}

fn main() {}
