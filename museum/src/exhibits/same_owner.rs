//! A table of locks whose owners have names: a process that was restarted has the name of the one before.

use std::time::Duration;

use anyhow::Result;
use lockkit::Leases;
use sqlx::{SqlitePool, sqlite::SqliteQueryResult};

use super::with_leases::tries;
use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage},
    world::{Shop, holder},
};

const KEY: &str = "settle";
const TTL: Duration = Duration::from_secs(30);
const TABLES: &str = "CREATE TABLE distributed_lock (lock_key TEXT PRIMARY KEY, owner TEXT NOT NULL,
                                                     expire_time INTEGER NOT NULL)";

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
                  sweep has no index, and on PostgreSQL a duplicate key aborts the transaction.",
        lockkit: "Each request for a lease has its own random token, and only the token counts. The name of the \
                  holder is for display. A's late release frees nothing.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured())),
    }
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let (watched, clock) = (shop.clone(), shop.clone());
    let stage = Stage::new("lock", move || {
        let watched = watched.clone();
        async move {
            let owner = sqlx::query_scalar("SELECT owner FROM distributed_lock").fetch_optional(&watched.pool).await?;
            Ok(owner.unwrap_or_else(|| "free".to_owned()).into())
        }
    });
    let stage = stage.clock(move |time| clock.clone().pass(time));
    let stage = stage.actor("A", |me| settles(me, shop.clone(), "host-1"));
    let stage = stage.actor("A2", |me| settles(me, shop.clone(), "host-1"));
    stage.actor("C", |me| settles(me, shop, "host-2")).play("A A +31s A2 A C").await
}

async fn settles(me: Actor, shop: Shop, host: &'static str) -> Result<()> {
    while me.step(format!("INSERT owner {host}"), insert(&shop, host)).await?.rows_affected() == 0 {
        me.mark("\"busy\"");
    }
    me.enters();
    me.step("done; DELETE is held up", async {}).await;
    me.leaves();
    let delete = sqlx::query("DELETE FROM distributed_lock WHERE lock_key = ? AND owner = ?").bind(KEY).bind(host);
    me.step(format!("DELETE … owner = {host}"), delete.execute(&shop.pool)).await?;
    Ok(())
}

async fn insert(shop: &Shop, host: &str) -> sqlx::Result<SqliteQueryResult> {
    let sweep = sqlx::query("DELETE FROM distributed_lock WHERE expire_time < ?").bind(shop.now());
    sweep.execute(&shop.pool).await?;
    let insert = sqlx::query("INSERT OR IGNORE INTO distributed_lock VALUES (?, ?, ?)");
    insert.bind(KEY).bind(host).bind(shop.now() + 30).execute(&shop.pool).await
}

async fn cured() -> Result<Run> {
    let shop = Shop::open("").await?;
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

async fn releases_late(me: Actor, leases: Leases<SqlitePool>) -> Result<()> {
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    me.enters();
    me.step("done; release is held up", async {}).await;
    me.leaves();
    me.step("release", lease.release()).await?;
    Ok(())
}
