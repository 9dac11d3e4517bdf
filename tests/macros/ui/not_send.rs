use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k")]
async fn f(leases: &Pool) -> Result<u8, Error> {
    let rc = std::rc::Rc::new(1);
    std::future::ready(()).await;
    Ok(*rc)
}

fn assert_send<T: Send>(_: T) {}

fn g(leases: &Pool) {
    assert_send(f(leases));
}

fn main() {}
