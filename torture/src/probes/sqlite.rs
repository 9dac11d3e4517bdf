//! Probes for SQLite only.

use anyhow::Result;
use lockkit::{Error, NamedLock, Versioned, VersionedRow};
use sqlx::{Acquire, Connection as _};
use support::{Server as _, Sqlite};

use crate::probes::{Found, Ground, Verdict, probe};

/// How often a race is tried.
const ROUNDS: u32 = 30;

pub(crate) async fn of_sqlite(ground: &Ground<Sqlite>) -> Vec<Found> {
    let null = probe("a version that is NULL is an error", null_version(ground)).await;
    let nested = probe("a commit after a dropped savepoint", dropped_savepoint(ground)).await;
    let outside = probe("no lock outside of a transaction", dropped_transaction(ground)).await;
    vec![null, nested, outside]
}

async fn null_version(ground: &Ground<Sqlite>) -> Result<Verdict> {
    let mut conn = ground.pool.acquire().await?;
    Sqlite::execute(&mut conn, "CREATE TABLE nullable (id INTEGER PRIMARY KEY, version INTEGER)").await?;
    Sqlite::execute(&mut conn, "INSERT INTO nullable (id) VALUES (1)").await?;
    let read = VersionedRow::<sqlx::Sqlite>::table("nullable").by("id", 1_i64).read(&mut *conn).await;
    Ok(match read {
        Ok(Versioned { row: (), version, .. }) => Err(format!("NULL was read as {version:?}")),
        Err(_) => Ok(()),
    })
}

async fn dropped_savepoint(ground: &Ground<Sqlite>) -> Result<Verdict> {
    let leases = Ground::<Sqlite>::leases(&ground.pool, 5_000).build()?;
    let mut refused = Vec::new();
    for _ in 0..ROUNDS {
        let lease = leases.lease("probe/savepoint").acquire().await?;
        let mut tx = ground.pool.begin().await?;
        drop(tx.begin().await?);
        refused.extend(lease.commit(tx).await.err());
    }
    Ok(match refused.first() {
        None => Ok(()),
        Some(err) => Err(format!("{} of {ROUNDS} good commits were refused: {err}", refused.len())),
    })
}

async fn dropped_transaction(ground: &Ground<Sqlite>) -> Result<Verdict> {
    let mut granted = 0;
    for _ in 0..ROUNDS {
        let mut conn = ground.pool.acquire().await?;
        drop(conn.begin().await?);
        match NamedLock::new("probe/outside").lock(&mut *conn).await {
            Ok(()) => granted += 1,
            Err(Error::InvalidOption { .. }) => {}
            Err(err) => return Err(err.into()),
        }
        conn.ping().await?;
    }
    Ok(if granted == 0 { Ok(()) } else { Err(format!("{granted} of {ROUNDS} were granted")) })
}
