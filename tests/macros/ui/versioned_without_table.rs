#[derive(lockkit::Versioned)]
#[versioned(key = "item_id")]
struct WithoutTable {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
struct WithoutAttribute {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "my table", key = "item_id")]
struct BadTable {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = TABLE, key = "item_id")]
struct NotALiteral {
    item_id: i64,
    version: i64,
}

fn main() {}
