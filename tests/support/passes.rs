//! A list that tasks of several processes append to under one lease: the oracle for leases that are handed on.

use std::time::Duration;

use lockkit::{Error, Fault, Lease, Leases};
use sqlx::Pool;
use tokio::{task::JoinSet, time::sleep};

use crate::{Backend, TestDb};

/// How long each holder has the lease before its transaction.
const HOLD: Duration = Duration::from_millis(15);

pub async fn create<S: Backend>(db: &TestDb<S>) {
    // Without a key: it would refuse what a holder without its lease commits, and so hide it.
    db.execute("CREATE TABLE passes (n BIGINT NOT NULL, fence BIGINT NOT NULL)").await;
}

/// Appends under the lease, and ends the lease with the commit.
///
/// # Errors
/// Those of the commit, and of the transaction's beginning.
///
/// # Panics
/// If a statement fails.
pub async fn append<S: Backend>(pool: &Pool<S::DB>, lease: Lease<Pool<S::DB>>) -> Result<(), Error> {
    let mut tx = lockkit::begin(pool).await?;
    let last = S::fetch_i64(&mut tx, "SELECT MAX(n) FROM passes").await.expect("read the list").unwrap_or(0);
    let insert = format!("INSERT INTO passes VALUES ({}, {})", last + 1, lease.fence());
    S::execute(&mut tx, &insert).await.expect("append to the list");
    lease.commit(tx).await
}

/// Appends with this many tasks until the process ends.
///
/// # Panics
/// If anything fails but a commit whose lease is lost, and what was contended or had no answer in time.
pub async fn append_all_the_time<S: Backend>(pool: Pool<S::DB>, leases: Leases<Pool<S::DB>>, tasks: u64) {
    let mut appending = JoinSet::new();
    for _ in 0..tasks {
        let (pool, leases) = (pool.clone(), leases.clone());
        appending.spawn(async move {
            loop {
                let lease = leases.lease("item:1").wait(Duration::from_hours(1)).acquire().await.expect("a lease");
                sleep(HOLD).await;
                match append::<S>(&pool, lease).await {
                    Ok(())
                    | Err(
                        Error::Lost { .. }
                        | Error::Contended { .. }
                        // An answer came while the process was stopped, after its time.
                        | Error::OutcomeUnknown { .. }
                        | Error::Database { fault: Fault::Unavailable, .. },
                    ) => {}
                    Err(err) => panic!("{err:?}"),
                }
            }
        });
    }
    appending.join_next().await.expect("there are tasks").expect("it panics and does not end");
}

/// Waits until the list has this many entries more. Returns the fence of the last one.
///
/// # Panics
/// If it does not grow.
pub async fn grown<S: Backend>(db: &TestDb<S>, by: i64) -> u64 {
    let length = async || db.fetch_i64("SELECT COUNT(*) FROM passes").await.expect("a number");
    let until = length().await + by;
    for _ in 0..3000 {
        if length().await >= until {
            let fence = db.fetch_i64("SELECT MAX(fence) FROM passes").await.expect("it is not empty");
            return fence.try_into().expect("a fence is positive");
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("nobody appends");
}

/// Checks that the entries were appended one after the other, each under a higher fence. Returns how many were handed a
/// lease by the one before.
///
/// # Panics
/// If they were not.
pub async fn check<S: Backend>(db: &TestDb<S>) -> i64 {
    let number = async |sql: &str| db.fetch_i64(sql).await.expect("a number");
    let length = number("SELECT COUNT(*) FROM passes").await;
    assert_eq!(number("SELECT COUNT(DISTINCT n) FROM passes").await, length, "two holders read the same list");
    assert_eq!(number("SELECT MAX(n) FROM passes").await, length);
    let pairs = "SELECT COUNT(*) FROM passes a JOIN passes b ON b.n = a.n + 1 WHERE";
    assert_eq!(number(&format!("{pairs} b.fence <= a.fence")).await, 0, "the fences rise");
    number(&format!("{pairs} b.fence = a.fence + 1")).await
}
