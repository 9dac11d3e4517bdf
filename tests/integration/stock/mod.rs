//! Segmented stock: never more given out than there is, and never called sold out too early.

mod amounts;
mod lost;
mod segments;
mod takers;
mod together;
mod transactions;

use std::time::Duration;

use lockkit::Stock;
use support::{Backend, TestDb};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Longer than any of these tests waits.
const PATIENCE: Duration = Duration::from_mins(1);

/// A stock with ten segments, made by the first `put`.
fn stock<S: Backend>(db: &TestDb<S>) -> Stock<S::DB> {
    Stock::new(db.pool.clone(), "sku:42").segments(10).wait(PATIENCE)
}

async fn segments<S: Backend>(db: &TestDb<S>) -> Option<i64> {
    db.fetch_i64("SELECT COUNT(*) FROM lockkit_stock WHERE name = 'sku:42'").await
}

/// Has segment 3 locked until it ends.
async fn lock_a_segment<S: Backend>(db: &TestDb<S>) -> lockkit::Tx<S::DB> {
    let mut tx = lockkit::begin(&db.pool).await.unwrap();
    S::execute(&mut tx, "UPDATE lockkit_stock SET quantity = quantity WHERE segment = 3").await.unwrap();
    tx
}
