//! Probes of leases that need no fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Result;
use sqlx::pool::PoolOptions;
use tokio::sync::oneshot;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep};

use crate::probes::{Ground, Verdict};
use crate::rig::Rig;

/// How many compete for turns, each as if in a process of its own.
const COMPETITORS: usize = 8;

/// Longest wait for a turn.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// Fewer turns say nothing of shares.
const LEAST_TURNS: u32 = 160;

/// How often a race is tried.
const ROUNDS: u32 = 30;

/// With a hold of 2 ms, nobody gets less than one turn in twenty.
pub(super) async fn shares<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let end = Instant::now() + Duration::from_millis(2_500);
    let all = Arc::new(AtomicU32::new(0));
    let mut competing = JoinSet::new();
    for _ in 0..COMPETITORS {
        let leases = Ground::<S>::leases(&ground.pool(2).await?, 5_000).build()?;
        let all = all.clone();
        competing.spawn(async move {
            let mut turns = 0_u32;
            while Instant::now() < end || all.load(Ordering::Relaxed) < LEAST_TURNS {
                let Ok(lease) = leases.lease("probe/turns").wait(MOST_WAIT).acquire().await else { break };
                sleep(Duration::from_millis(2)).await;
                drop(lease.release().await);
                turns += 1;
                all.fetch_add(1, Ordering::Relaxed);
            }
            turns
        });
    }
    let turns = competing.join_all().await;
    let all: u32 = turns.iter().sum();
    let least = turns.iter().copied().min().unwrap_or(0);
    if least * 20 >= all {
        return Ok(Ok(()));
    }
    Ok(Err(format!("of {all} turns one of {COMPETITORS} had {least}: {turns:?}")))
}

/// A lease that is granted with little trust left is renewed before that ends.
pub(super) async fn slow_checkout<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let pool = ground.pool(1).await?;
    let leases = Ground::<S>::leases(&pool, 1_500).build()?;
    let busy = pool.acquire().await?;
    let free = async {
        sleep(Duration::from_millis(1_300)).await;
        drop(busy);
    };
    let (lease, ()) = tokio::join!(leases.lease("probe/checkout").wait(Duration::from_secs(4)).acquire(), free);
    // To refuse what is nearly over is right as well.
    let Ok(lease) = lease else { return Ok(Ok(())) };
    sleep(Duration::from_millis(1_500)).await;
    if lease.is_trusted() {
        return Ok(Ok(()));
    }
    Ok(Err("a lease that was granted after a wait for a connection was lost before its first renewal".into()))
}

/// The first runtime ends, and a lease that was taken on another one is renewed all the same.
pub(super) async fn second_runtime<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let options = ground.pool.connect_options();
    let pool = PoolOptions::<S::DB>::new().max_connections(4).connect_lazy_with((*options).clone());
    let leases = Ground::<S>::leases(&pool, 800).build()?;
    let (keeps, kept) = oneshot::channel();
    let (end, ends) = oneshot::channel::<()>();
    let first = leases.clone();
    let thread = spawn_blocking(move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let lease = first.lease("probe/first").acquire().await?;
            let _ = keeps.send(());
            let _ = ends.await;
            drop(lease.release().await);
            Ok(())
        })
    });
    kept.await?;
    let lease = leases.lease("probe/second").wait(Duration::from_secs(4)).acquire().await?;
    drop(end);
    thread.await??;
    sleep(Duration::from_millis(1_600)).await;
    if lease.is_trusted() {
        return Ok(Ok(()));
    }
    Ok(Err("the runtime that took the first lease ended, and another runtime's lease was renewed no more".into()))
}

/// A writer that tried in vain is in nobody's way once it has its answer.
pub(super) async fn try_gives_back<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let (pool, others) = (ground.pool(2).await?, ground.pool(2).await?);
    let (here, there) = (Ground::<S>::leases(&pool, 5_000).build()?, Ground::<S>::leases(&others, 5_000).build()?);
    let mut refused = 0;
    for round in 0..ROUNDS {
        let key = format!("probe/try/{round}");
        let reader = here.rw(key.clone()).read().acquire().await?;
        if here.rw(key.clone()).write().try_acquire().await?.is_some() {
            return Ok(Err("a writer got in beside a reader".into()));
        }
        refused += u32::from(there.rw(key).read().try_acquire().await?.is_none());
        reader.release().await?;
    }
    if refused == 0 {
        return Ok(Ok(()));
    }
    Ok(Err(format!(
        "after a writer's `try_acquire` said None, {refused} of {ROUNDS} readers were refused beside a reader"
    )))
}
