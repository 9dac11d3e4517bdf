//! Probes for PostgreSQL only.

use std::time::Duration;

use anyhow::Result;
use lockkit::{Error, Fault, RowLock};
use support::{Postgres, Server as _};

use crate::event::Kind;
use crate::probes::{Found, Ground, Verdict, probe, told};

pub(crate) async fn of_postgres(ground: &Ground<Postgres>) -> Vec<Found> {
    let types = probe("one column by two integer types", two_types(ground)).await;
    let bound = probe("a server's own bound is contention", statement_timeout(ground)).await;
    vec![types, bound]
}

/// One connection, one column, values of two types: a prepared statement is not taken for another's.
async fn two_types(ground: &Ground<Postgres>) -> Result<Verdict> {
    let pool = ground.pool(1).await?;
    let account = Kind::Row.account(0);
    let mut tx = lockkit::begin(&pool).await?;
    RowLock::table("account").by("id", i32::try_from(account)?).lock(&mut *tx).await?;
    tx.commit().await?;
    let mut tx = lockkit::begin(&pool).await?;
    let locked = RowLock::table("account").by("id", account).lock(&mut *tx).await.map(drop);
    Ok(match locked {
        Ok(()) => Ok(()),
        Err(_) => Err(format!("after `by(id, i32)`, `by(id, i64)` on the same connection: {}", told(&locked))),
    })
}

/// `statement_timeout` ends a wait for a row: somebody else has it.
async fn statement_timeout(ground: &Ground<Postgres>) -> Result<Verdict> {
    let account = Kind::Row.account(1);
    let mut holder = lockkit::begin(&ground.pool).await?;
    RowLock::table("account").by("id", account).lock(&mut *holder).await?;
    let mut tx = lockkit::begin(&ground.pool).await?;
    Postgres::execute(&mut tx, "SET LOCAL statement_timeout = 150").await?;
    let waits = RowLock::table("account").by("id", account).wait(Duration::from_secs(3)).lock(&mut *tx).await;
    Ok(match waits.map(drop) {
        Err(Error::Database { fault: Fault::Other, .. }) => Err("a cancelled wait for a row is a fault `Other`".into()),
        Ok(()) => Err("two have one row".into()),
        Err(_) => Ok(()),
    })
}
