//! The work that all libraries do in `bench compare`.

use anyhow::Result;
use lockkit::{LeaseStore, Leases};
use sqlx::Pool;

use super::{Bench, Subject, WAIT, lease, optimistic};
use crate::clock;
use crate::load::Step;

/// The row that all write, and the key of the lease that guards it.
const ROW: i64 = 0;
const KEY: &str = "hot-row";

pub(super) async fn uncontended<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    match bench.job.contender.as_str() {
        "floor" => lease::by_hand(bench, key).await,
        _ => lease::lockkit(bench, key).await,
    }
}

pub(super) async fn hot_row<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    match bench.job.contender.as_str() {
        "floor: FOR UPDATE" => optimistic::pessimistic(bench).await,
        "lockkit version" => optimistic::lockkit(bench).await,
        "lockkit row" => under_row_lock(bench).await,
        _ => row_under_lease(&bench.leases, &bench.pool).await,
    }
}

async fn under_row_lock<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let mut tx = lockkit::begin(&bench.pool).await?;
    let value = DB::row_of(&mut tx, ROW, WAIT.into()).await?;
    let granted = clock::now();
    DB::row_write(&mut tx, ROW, value + 1).await?;
    let step = Step::since(granted);
    tx.commit().await?;
    Ok(Some(step))
}

/// The row is read and written with one statement each, as under a lock of another system.
pub(crate) async fn row_under_lease<S: LeaseStore, DB: Subject>(
    leases: &Leases<S>,
    pool: &Pool<DB>,
) -> Result<Option<Step>> {
    let lease = leases.lease(KEY).acquire().await?;
    let granted = clock::now();
    let fence = lease.fence().get();
    let mut conn = pool.acquire().await?;
    let value = DB::row_read(&mut conn, ROW).await?;
    DB::row_write(&mut conn, ROW, value + 1).await?;
    drop(conn);
    let step = Step::since(granted).fence(fence);
    lease.release().await?;
    Ok(Some(step))
}
