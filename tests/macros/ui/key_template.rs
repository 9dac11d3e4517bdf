use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

struct Order {
    id: u8,
}

#[with_lock(lease, on = leases, key = "order:{order.id(1)}")]
async fn call_with_an_argument(leases: &Pool, order: Order) -> Result<u8, Error> {
    let _ = leases;
    Ok(order.id)
}

#[with_lock(lease, on = leases, key = "order:{}")]
async fn positional(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "order:{0}")]
async fn numbered(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "{a}{b}")]
async fn neighbours(leases: &Pool, a: u8, b: u8) -> Result<u8, Error> {
    let _ = leases;
    Ok(a + b)
}

#[with_lock(lease, on = leases, key = "{a}%{b}")]
async fn no_separator(leases: &Pool, a: u8, b: u8) -> Result<u8, Error> {
    let _ = leases;
    Ok(a + b)
}

#[with_lock(lease, on = leases, key = "order:{a")]
async fn open(leases: &Pool, a: u8) -> Result<u8, Error> {
    let _ = leases;
    Ok(a)
}

#[with_lock(lease, on = leases, key = "")]
async fn empty(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "two\nlines")]
async fn control_character(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "a\u{200b}b")]
async fn invisible_character(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
