#[derive(lockkit::Versioned)]
#[versioned(tabel = "t_items", kye = "item_id", verison = "version", timeout = 3)]
struct OfTheStruct {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id", table = "t", version)]
struct TwiceAndIncomplete {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct OfFields {
    #[versioned(key)]
    item_id: i64,
    #[versioned(skpi)]
    stock: i64,
    #[versioned(rename)]
    name: String,
    #[versioned(rename = "a.b")]
    other: String,
    #[versioned(skip = true)]
    more: i64,
    version: i64,
}

fn main() {}
