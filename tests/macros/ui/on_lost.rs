use lockkit::{Error, Leases, with_lock};
use sqlx::SqlitePool;

type Pool = Leases<SqlitePool>;

#[with_lock(lease, on = leases, key = "k", on_lost = contineu)]
async fn f(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", on_lost = "stop")]
async fn g(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", on_lost = lockkit::OnLost::Continue)]
async fn h(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", on_lost = panic!())]
async fn i(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

#[with_lock(lease, on = leases, key = "k", on_lost)]
async fn j(leases: &Pool) -> Result<(), Error> {
    let _ = leases;
    Ok(())
}

fn main() {}
