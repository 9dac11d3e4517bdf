#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
enum Enum {
    A { item_id: i64, version: i64 },
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Tuple(i64, i64);

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Unit;

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
union Union {
    item_id: i64,
    version: i64,
}

fn main() {}
