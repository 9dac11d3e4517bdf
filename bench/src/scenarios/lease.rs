//! A lease: acquired, held, released.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::{LeaseStore, Leases};

use super::{Bench, Subject, WAIT};
use crate::clock;
use crate::floors::name;
use crate::load::Step;

/// The pause of a task that polls, on average.
const PAUSE: Duration = Duration::from_millis(5);

pub(super) async fn once<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    match bench.job.contender.as_str() {
        "floor" | "polling" => by_hand(bench, key).await,
        "session lock" => session_lock(bench, key).await,
        _ => lockkit(bench, key).await,
    }
}

/// By lockkit, with whatever settings its `Leases` have.
pub(super) async fn lockkit<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    leased(&bench.leases, key, bench.hold()).await
}

/// By lockkit in any store.
pub(crate) async fn leased<S: LeaseStore>(
    leases: &Leases<S>,
    key: u32,
    hold: impl Future<Output = ()>,
) -> Result<Option<Step>> {
    let lease = match leases.lease(name(key)).acquire().await {
        Ok(lease) => lease,
        Err(err) if err.is_contended() => return Ok(None),
        Err(err) => return Err(err.into()),
    };
    let granted = clock::now();
    let fence = lease.fence().get();
    hold.await;
    let step = Step::since(granted).fence(fence);
    lease.release().await?;
    Ok(Some(step))
}

/// One statement to acquire and one to release. A task that is refused asks again after a pause.
pub(super) async fn by_hand<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    let (name, token) = (name(key), fastrand::u128(..).to_ne_bytes());
    let give_up = clock::now() + u64::try_from(WAIT.as_nanos())?;
    let mut attempts = 1;
    let fence = loop {
        if let Some(fence) = DB::lease_claim(&bench.pool, &name, &token).await? {
            break fence;
        }
        if clock::now() > give_up {
            return Ok(None);
        }
        // From half to one and a half of it, so that tasks do not ask in step.
        tokio::time::sleep(PAUSE.mul_f32(0.5 + fastrand::f32())).await;
        attempts += 1;
    };
    let granted = clock::now();
    bench.hold().await;
    let step = Step::since(granted).fence(fence).attempts(attempts);
    DB::lease_free(&bench.pool, &name, &token).await?;
    Ok(Some(step))
}

/// The database's own lock, for which the server keeps the queue. Each waiter keeps a connection.
async fn session_lock<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    let name = name(key);
    let mut conn = bench.pool.acquire().await?;
    if !DB::session_lock(&mut conn, &name).await? {
        bail!("this database has no session locks");
    }
    let granted = clock::now();
    bench.hold().await;
    let step = Step::since(granted);
    DB::session_unlock(&mut conn, &name).await?;
    Ok(Some(step))
}
