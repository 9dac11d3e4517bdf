//! A table as a lock: waiters for a row keep their connections.

use std::{future::ready, time::Duration};

use anyhow::Result;
use lockkit::Leases;
use sqlx::SqlitePool;

use super::with_leases::{sells, waits};
use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::Shop,
};

const KEY: &str = "report";
const TABLES: &str = "CREATE TABLE resource_lock (name TEXT PRIMARY KEY, owner TEXT NOT NULL);
                      CREATE TABLE pages (id INTEGER PRIMARY KEY);
                      INSERT INTO resource_lock VALUES ('report', '');
                      INSERT INTO pages VALUES (1)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "12-pool-drained",
        title: "Waiting callers take all connections",
        recipe: "\
BEGIN
SELECT * FROM resource_lock WHERE name = 'report' FOR UPDATE   -- INSERT it if there is none
-- write the report: some minutes
COMMIT",
        happens: "The service has a pool of two connections. A holds the lock in an open transaction, which keeps \
                  one connection. B waits for the lock in the database, and keeps the other one. C does not need the \
                  lock. It wants to read a page, and gets no connection. With a pool of 20 it takes 19 waiting \
                  callers.",
        remedy: "A larger pool is drained by more callers. If A itself needs a second connection, A waits for B and \
                  B for A, and the database sees no deadlock. On MySQL the recipe has another one: two callers that \
                  find no row both lock the gap, both INSERT, and one of them gets error 1213.",
        lockkit: "Holding a lease keeps no connection, and neither does waiting for one. C reads while A works and B \
                  waits. A transaction of lockkit that finds the pool full fails with `PoolStarved`, which says how \
                  many connections are in use.",
        more: ("a full pool", "../guide.md#when-it-hangs-or-the-pool-is-full"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn broken() -> Result<Run> {
    let shop = Shop::with_connections(TABLES, 2).await?;
    let pool = shop.pool.clone();
    let stage = Stage::new("connections", move || ready(in_use(&pool))).clock(|_time| ready(Ok(())));
    let stage = stage.bound(Duration::from_secs(30)).actor("A", |me| locks(me, shop.clone()));
    let stage = stage.actor("B", |me| locks(me, shop.clone())).actor("C", |me| reads(me, shop));
    stage.play("A B~ C~ +60s").await
}

/// Without a query, which would need a connection.
fn in_use(pool: &SqlitePool) -> Result<View> {
    let idle = u32::try_from(pool.num_idle())?;
    Ok(format!("{} of 2", pool.size() - idle).into())
}

async fn locks(me: Actor, shop: Shop) -> Result<()> {
    let lock = async {
        let mut conn = shop.pool.acquire().await?;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut *conn).await?;
        me.enters();
        Ok::<_, sqlx::Error>((conn, ()))
    };
    let _held = me.step("SELECT … FOR UPDATE", lock).await?;
    me.step("COMMIT", async {}).await;
    Ok(())
}

async fn reads(me: Actor, shop: Shop) -> Result<()> {
    let read = async {
        shop.number("SELECT count(*) FROM pages").await?;
        Ok::<_, sqlx::Error>(())
    };
    me.step("read a page", read).await?;
    me.mark("answered");
    Ok(())
}

async fn cured() -> Result<Run> {
    let shop = Shop::with_connections(TABLES, 2).await?;
    let process = |name: &str| Leases::builder(shop.pool.clone()).holder(name).build();
    let (a, b) = (process("A")?, process("B")?);
    // The lease is no state to show: B may have it a moment after A's release, or a moment later.
    let stage = Stage::new("", || ready(Ok(View::default())));
    let stage = stage.clock(|_time| ready(Ok(()))).actor("A", |me| sells(me, a, KEY));
    let stage = stage.actor("B", |me| waits(me, b, KEY)).actor("C", |me| reads(me, shop));
    stage.play("A B~ C A B B").await
}
