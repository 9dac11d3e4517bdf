//! A transaction that the database has ended, or that is of another one: what is run on its connection must change
//! nothing.

use std::time::Duration;

use anyhow::Result;
use lockkit::Error;
use tokio::time::{sleep, timeout};

use crate::event::Kind;
use crate::probes::{Ground, Verdict, told};
use crate::rig::{Rig, connect, execute, in_database};

/// The operation that must not be in the ledger.
const AFTER: i64 = 777;

/// A transaction that the database rolled back: its next statement stores nothing, its commit is refused as ended, and
/// a lease whose holder still trusts it stays taken.
pub(super) async fn dead_transaction<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let (pool, others) = (ground.pool(3).await?, ground.pool(2).await?);
    let (here, there) = (Ground::<S>::leases(&pool, 5_000).build()?, Ground::<S>::leases(&others, 5_000).build()?);
    let lease = here.lease("probe/victim").acquire().await?;
    let holder = lease.share();
    let mut tx = lockkit::begin(&pool).await?;
    let (mine, theirs) = (Kind::Row.account(0), Kind::Row.account(1));
    if S::CODE == support::Postgres::CODE {
        // Any error ends a transaction here, and the victim of a deadlock would be a matter of time.
        let error = S::execute(&mut tx, "SELECT 1 / 0").await;
        anyhow::ensure!(error.is_err(), "a division by zero is an error");
    } else {
        let mut other = connect::<S>(&ground.url).await?;
        S::execute(&mut tx, &format!("UPDATE account SET cents = cents WHERE id = {mine}")).await?;
        S::execute(&mut other, "START TRANSACTION").await?;
        // Whoever has changed less becomes the victim.
        S::execute(&mut other, &format!("UPDATE account SET cents = cents + 1 WHERE id = {theirs} OR id > 1000"))
            .await?;
        let waits = async {
            let sql = format!("UPDATE account SET cents = cents WHERE id = {mine}");
            let _ = timeout(Duration::from_secs(3), S::execute(&mut other, &sql)).await;
            S::execute(&mut other, "ROLLBACK").await
        };
        let meets = async {
            sleep(Duration::from_millis(200)).await;
            S::execute(&mut tx, &format!("UPDATE account SET cents = cents WHERE id = {theirs}")).await
        };
        let (waited, met) = tokio::join!(waits, meets);
        waited?;
        anyhow::ensure!(met.is_err(), "this transaction should have become the victim of a deadlock");
    }
    let sql = format!("INSERT INTO ledger (op, account, seen, fence) VALUES ({AFTER}, 0, 0, 0)");
    // To refuse it is right, and so is to roll it back.
    let _ = S::execute(&mut tx, &sql).await;
    let committed = lease.commit(tx).await;
    let mut conn = connect::<S>(&ground.url).await?;
    let stored = S::fetch_i64(&mut conn, &format!("SELECT COUNT(*) FROM ledger WHERE op = {AFTER}")).await?;
    let trusted = holder.is_trusted();
    let taken = there.lease("probe/victim").try_acquire().await?.is_none();

    let mut wrong = Vec::new();
    if !matches!(committed, Err(Error::TransactionEnded { .. })) {
        wrong.push(format!("its commit was told {}, not TransactionEnded", told(&committed)));
    }
    if stored != Some(0) {
        wrong.push("its next statement committed by itself".to_owned());
    }
    if trusted && holder.is_trusted() && !taken {
        wrong.push("its lease was free while its holder trusted it".to_owned());
    }
    Ok(if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) })
}

/// A transaction of another database neither commits nor costs the lease.
pub(super) async fn two_databases<S: Rig>(ground: &Ground<S>) -> Result<Verdict> {
    let name = format!("lockkit_torture_{}_other", std::process::id());
    execute::<S>(&ground.url, &format!("CREATE DATABASE {name}")).await?;
    let other = ground.pool_at(&in_database(&ground.url, &name)?, 2).await?;
    lockkit::migrate(&other).await?;
    let leases = Ground::<S>::leases(&ground.pool, 20_000).build()?;
    let lease = leases.lease("probe/two").acquire().await?;
    let mut tx = lockkit::begin(&other).await?;
    let verified = lease.verify(&mut tx).await;
    tx.rollback().await?;
    let is_kept = lease.is_trusted();
    let committed = lease.commit(lockkit::begin(&other).await?).await;
    other.close().await;
    execute::<S>(&ground.url, &format!("DROP DATABASE {name}")).await?;
    let is_refused = |it: &lockkit::Result<()>| it.as_ref().is_err_and(|err| !err.is_lost());
    if is_kept && is_refused(&verified) && is_refused(&committed) {
        return Ok(Ok(()));
    }
    let (verified, committed) = (told(&verified), told(&committed));
    Ok(Err(format!("`verify` said {verified}, `commit` said {committed}; the lease was kept: {is_kept}")))
}
