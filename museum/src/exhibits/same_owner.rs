//! A table of locks whose owners have names: a process that was restarted has the name of the one before.

use std::time::Duration;

use anyhow::Result;
use lockkit::Leases;
use sqlx::Pool;

use super::with_leases::tries;
use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Changed, Place, Shop, Sql, holder},
};

const KEY: &str = "settle";
const TTL: Duration = Duration::from_secs(30);
const TABLES: &str = "CREATE TABLE distributed_lock (lock_key VARCHAR(50) PRIMARY KEY, owner VARCHAR(50) NOT NULL,
                                                     expire_time BIGINT NOT NULL)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "15-same-owner",
        title: "A process that was restarted under the same name",
        recipe: "\
DELETE FROM distributed_lock WHERE expire_time < now()
INSERT INTO distributed_lock VALUES ('settle', <my host>, now() + 30)
if duplicate key: return \"busy\"
settle
DELETE FROM distributed_lock WHERE lock_key = 'settle' AND owner = <my host>",
        happens: "A runs on host-1. It is done, and the network delays its DELETE. Meanwhile the process is \
                  restarted on the same host: A2, with the same name. The lock has expired, and A2 takes it. Then \
                  A's DELETE arrives. It matches the owner host-1 and frees A2's lock. C enters beside A2.",
        remedy: "An owner check depends on the owner's name, and the name of a host, a process or a thread is used \
                  again. The recipe has other gaps: nothing renews the lock, a stale holder can still write, the \
                  DELETE by time has no index and scans the table, and on PostgreSQL a duplicate key aborts the \
                  transaction.",
        lockkit: "Each grant of a lease has its own random token, and only the token counts. The name of the holder is \
                  for display. A's late release frees nothing.",
        more: ("leases", "../guide.md#leases"),
        broken: on_database!(Database, broken),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("lock", owner).actor("A", |me| settles(me, shop.clone(), "host-1"));
    let stage = stage.actor("A2", |me| settles(me, shop.clone(), "host-1"));
    stage.actor("C", |me| settles(me, shop, "host-2")).play("A A +31s A2 A C").await
}

async fn owner<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let owner = "SELECT coalesce(max(owner), 'free') FROM distributed_lock";
    Ok(DB::text(&mut *shop.pool.acquire().await?, owner).await?.into())
}

async fn settles<DB: Sql>(me: Actor, shop: Shop<DB>, host: &'static str) -> Result<()> {
    while me.step(format!("INSERT owner {host}"), insert(&shop, host)).await? == Changed(0) {
        me.mark("\"busy\"");
    }
    me.enters();
    me.step("done; DELETE is held up", async {}).await;
    me.leaves();
    let delete = format!("DELETE FROM distributed_lock WHERE lock_key = '{KEY}' AND owner = '{host}'");
    me.step(format!("DELETE … owner = {host}"), shop.execute(&delete)).await?;
    Ok(())
}

async fn insert<DB: Sql>(shop: &Shop<DB>, host: &str) -> sqlx::Result<Changed> {
    let now = shop.now();
    shop.execute(&format!("DELETE FROM distributed_lock WHERE expire_time < {now}")).await?;
    let insert = format!("INSERT INTO distributed_lock VALUES ('{KEY}', '{host}', {})", now + 30);
    match shop.execute(&insert).await {
        Err(sqlx::Error::Database(err)) if err.is_unique_violation() => Ok(Changed(0)),
        inserted => inserted,
    }
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, "").await?;
    let process = |host: &str| Leases::builder(shop.pool.clone()).ttl(TTL).holder(host).build();
    let (a, again, c, watcher) = (process("host-1")?, process("host-1")?, process("host-2")?, process("watcher")?);
    let stage = Stage::new("lease", move || {
        let watcher = watcher.clone();
        async move { holder(&watcher, KEY).await }
    });
    let stage = stage.clock(move |time| shop.clone().pass(time)).actor("A", |me| releases_late(me, a));
    let stage = stage.actor("A2", |me| tries(me, again, KEY)).actor("C", |me| tries(me, c, KEY));
    stage.play("A A +31s A2 A C").await
}

async fn releases_late<DB: Sql>(me: Actor, leases: Leases<Pool<DB>>) -> Result<()> {
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    me.enters();
    me.step("done; release is held up", async {}).await;
    me.leaves();
    me.step("release", lease.release()).await?;
    Ok(())
}
