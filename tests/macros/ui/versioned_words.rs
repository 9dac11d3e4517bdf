#[derive(lockkit::Versioned)]
#[versioned("t_items", key = "item_id")]
struct TableWithoutName {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", id = "item_id")]
struct KeyOfAnotherName {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items" key = "item_id")]
struct NoComma {
    item_id: i64,
    version: i64,
}

fn main() {}
