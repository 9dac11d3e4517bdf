#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "version")]
struct VersionAsKey {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = ["id", "kind"])]
struct Brackets {
    id: i64,
    kind: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key("id", kind))]
struct WithoutQuotes {
    id: i64,
    kind: i64,
    version: i64,
}

fn main() {}
