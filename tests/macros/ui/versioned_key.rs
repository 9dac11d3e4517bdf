#[derive(lockkit::Versioned)]
#[versioned(table = "t_items")]
struct Without {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "itemid")]
struct Misspelt {
    item_id: i64,
    version: i64,
}

#[derive(sqlx::FromRow, lockkit::Versioned)]
#[versioned(table = "t_items", key = "number")]
struct FieldInsteadOfColumn {
    #[sqlx(rename = "item_id")]
    number: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "tenant_id, item_id")]
struct Several {
    tenant_id: i64,
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key())]
struct Empty {
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key = "item_id")]
struct Skipped {
    #[versioned(skip)]
    item_id: i64,
    version: i64,
}

#[derive(lockkit::Versioned)]
#[versioned(table = "t_items", key("item_id", "item_id"))]
struct Twice {
    item_id: i64,
    version: i64,
}

fn main() {}
