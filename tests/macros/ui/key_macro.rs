use lockkit::{Key, key};

fn positional(id: i64) -> Key {
    key!("order:{}", id)
}

fn neighbours(a: i64, b: i64) -> Key {
    key!("{a}{b}")
}

fn no_literal(name: &str) -> Key {
    key!(name)
}

fn empty() -> Key {
    key!()
}

fn a_call_with_arguments(a: Vec<u8>) -> Key {
    key!("order:{a.get(0)}")
}

struct Order {
    id: i64,
}

fn no_such_field(order: Order) -> Key {
    key!("order:{order.number}:{order.id}")
}

fn main() {}
