#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Text {
    item_id: i64,
    version: String,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Nullable {
    item_id: i64,
    version: Option<i64>,
}

fn main() {}
