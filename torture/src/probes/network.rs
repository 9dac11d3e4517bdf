//! Probes that need a network that is late or silent.

use std::time::Duration;

use anyhow::Result;
use lockkit::Error;
use sqlx::pool::PoolOptions;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::probes::{Ground, Verdict, told};
use crate::proxy::{Proxy, Weather};
use crate::rig::{Rig, connect};

/// The answer to COMMIT comes after the ttl: whatever `run` says of it, it is not that nothing was committed.
pub(super) async fn late_answer_of_commit<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    const OP: i64 = 778;

    let proxy = Proxy::start(&ground.url, Duration::from_secs(5)).await?;
    let pool = ground.pool_at(proxy.url(), 3).await?;
    let leases = Ground::<S>::leases(&pool, 700).own_connections(2).build()?;
    let ran: lockkit::Result<()> = leases
        .lease("probe/late")
        .run(|lease| async {
            let mut tx = lockkit::begin(&pool).await?;
            let sql = format!("INSERT INTO ledger (op, account, seen, fence) VALUES ({OP}, 0, 0, 0)");
            let _ = S::execute(&mut tx, &sql).await;
            proxy.set(Weather { commits_late: Duration::from_millis(1_200), ..Weather::default() });
            lease.commit(tx).await
        })
        .await;
    proxy.set(Weather::default());
    sleep(Duration::from_millis(600)).await;
    let mut conn = connect::<S>(&ground.url).await?;
    let stored = S::fetch_i64(&mut conn, &format!("SELECT COUNT(*) FROM ledger WHERE op = {OP}")).await?;
    Ok(match ran {
        Err(Error::OutcomeUnknown { .. }) => Ok(()),
        Ok(()) if stored == Some(1) => Ok(()),
        Err(_) if stored == Some(0) => Ok(()),
        ran => Err(format!("`run` said {} of {} committed row", told(&ran), stored.unwrap_or_default())),
    })
}

/// A server that says nothing: a wait ends in its time, and is not told that the pool is too small.
pub(super) async fn silent_server<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    const WAIT: Duration = Duration::from_millis(600);
    const LATE: Duration = Duration::from_millis(1_000);

    let proxy = Proxy::start(&ground.url, Duration::from_secs(5)).await?;
    let pool = ground.pool_at(proxy.url(), 4).await?;
    let leases = Ground::<S>::leases(&pool, 1_500).own_connections(2).build()?;
    // Somebody else has both, so that the waiters ask who it is.
    let holder = Ground::<S>::leases(&ground.pool, 20_000).build()?;
    let held = holder.all(["probe/silent", "probe/silent/a"]).acquire().await?;
    leases.lease("probe/silent/b").acquire().await?.release().await?;
    let began = Instant::now();
    let falls_silent = async {
        sleep(WAIT / 3).await;
        proxy.set(Weather { requests_stall: true, answers_stall: true, ..Weather::default() });
    };
    let one = async {
        let result = leases.lease("probe/silent").wait(WAIT).acquire().await.map(drop);
        (result, began.elapsed())
    };
    let both = async {
        let result = leases.all(["probe/silent/a", "probe/silent/b"]).wait(WAIT).acquire().await.map(drop);
        (result, began.elapsed())
    };
    let (one, both, ()) = tokio::join!(one, both, falls_silent);
    proxy.cut();
    held.release().await?;
    proxy.set(Weather::default());
    let mut wrong = Vec::new();
    for (what, (result, time)) in [("acquire", one), ("all().acquire", both)] {
        if time > WAIT + LATE {
            wrong.push(format!("`{what}` waited {time:.1?} instead of {WAIT:?}"));
        }
        if matches!(result, Err(Error::PoolStarved { .. })) {
            wrong.push(format!("`{what}` said that the pool is too small"));
        }
    }
    Ok(if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) })
}

/// A connection to the server takes longer to open than a claim waits for its answer, so no claim is ever answered: no
/// caller is told that the lease is held.
pub(super) async fn slow_connects<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    const CONNECT: Duration = Duration::from_millis(2_500);
    /// The ttl and the wait of each caller, in milliseconds.
    const CALLERS: [(u64, u64); 5] = [(1_000, 4_000), (1_000, 6_000), (5_000, 2_500), (5_000, 6_000), (5_000, 8_000)];

    let proxy = Proxy::start(&ground.url, Duration::from_secs(5)).await?;
    proxy.set(Weather { connects_late: CONNECT, ..Weather::default() });
    let mut told = JoinSet::new();
    for (ttl, wait) in CALLERS {
        let pool = PoolOptions::<S::DB>::new().max_connections(2).connect_lazy(proxy.url())?;
        let leases = Ground::<S>::leases(&pool, ttl).build()?;
        let request = leases.lease(format!("probe/connects/{ttl}/{wait}")).wait(Duration::from_millis(wait));
        told.spawn(async move { request.acquire().await.is_err_and(|err| err.is_contended()) });
    }
    let busy = told.join_all().await.into_iter().filter(|is_busy| *is_busy).count();
    if busy == 0 {
        return Ok(Ok(()));
    }
    Ok(Err(format!("{busy} of {} callers were told that somebody held a lease which nobody held", CALLERS.len())))
}

/// Somebody locks the lease's row, and answers are late: the holder trusts its lease no longer than the store does.
pub(super) async fn trust_and_expiry<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    const KEY: &str = "probe/trust";
    const TTL: u64 = 2_000;
    const SLACK: Duration = Duration::from_millis(50);

    let proxy = Proxy::start(&ground.url, Duration::from_secs(5)).await?;
    let pool = ground.pool_at(proxy.url(), 4).await?;
    let leases = Ground::<S>::leases(&pool, TTL).renew_every(Duration::from_millis(250)).build()?;
    let shows = Ground::<S>::leases(&ground.pool, TTL).build()?;
    let lease = leases.lease(KEY).acquire().await?;
    let granted = lease.trusted_until();
    let mut locker = connect::<S>(&ground.url).await?;
    while lease.trusted_until() == granted && lease.is_trusted() {
        sleep(Duration::from_millis(5)).await;
    }
    // A renewal was answered just now. The next one finds the row locked.
    S::execute(&mut locker, "BEGIN").await?;
    S::execute(&mut locker, &format!("SELECT fence FROM lockkit_lease WHERE name = '{KEY}' FOR UPDATE")).await?;
    proxy.set(Weather { answers_late: Duration::from_millis(350), ..Weather::default() });
    let end = Instant::now() + Duration::from_millis(TTL + 200);
    let mut excess = Duration::ZERO;
    while Instant::now() < end {
        let trusted_until = lease.trusted_until();
        let stored = shows.show(KEY).await?.map(|it| it.expires_in).unwrap_or_default();
        let until = std::time::Instant::now() + stored;
        if lease.is_trusted() {
            excess = excess.max(trusted_until.saturating_duration_since(until));
        }
        sleep(Duration::from_millis(20)).await;
    }
    proxy.set(Weather::default());
    if excess <= SLACK {
        return Ok(Ok(()));
    }
    Ok(Err(format!("the holder trusted its lease {excess:.2?} longer than the store")))
}
