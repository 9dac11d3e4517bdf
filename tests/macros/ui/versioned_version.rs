#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Without {
    item_id: i64,
    revision: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id", version = "revison")]
struct Misspelt {
    item_id: i64,
    stock: i64,
    revision: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id", version = "item_id")]
struct TheKey {
    item_id: i64,
}

fn main() {}
