//! A correct unlock, and a stale holder that still writes.

use std::time::Duration;

use anyhow::Result;
use lockkit::{Leases, Tx};
use sqlx::{Sqlite, SqlitePool};

use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Shop, Toy},
};

const KEY: &str = "item:1";
const TTL: Duration = Duration::from_secs(30);
const TABLES: &str = "CREATE TABLE items (id INTEGER PRIMARY KEY, nums INTEGER NOT NULL);
                      CREATE TABLE sales (seller TEXT NOT NULL);
                      INSERT INTO items VALUES (1, 10)";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "09-stale-writer",
        title: "A holder that was paused writes after its lock has ended",
        recipe: "\
won = SET item:1 <my uuid> NX PX 30000
if not won: return \"busy\"
nums = SELECT nums FROM items WHERE id = 1
UPDATE items SET nums = <nums - 1> WHERE id = 1
EVAL \"if GET = <my uuid> then DEL\"     # check and delete in one step",
        happens: "A has the lock, reads 10, and is paused. Its lock ends after 30 s. B takes the lock, reads 10 and \
                  writes 9. Then A continues and writes the number that it computed before its pause: 9. Two pieces \
                  are sold, and the stock shows one. A's unlock is correct, deletes nothing, and comes too late.",
        remedy: "An owner check, a script, a longer time: all of them protect the *lock*. None protects the *data* \
                  from a holder that does not notice that its time is over. A check right before the write leaves \
                  the time between the check and the write.",
        lockkit: "`lease.commit(tx)` commits a transaction only if its lease is still held, as one step. That is \
                  possible because the lease and the data are in one database. A's commit fails with `Lost`, and its \
                  write is rolled back.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::on_sqlite(|| Box::pin(broken())),
        cured: Play::on_sqlite(|| Box::pin(cured(Ending::WithLease))),
    }
}

async fn books(shop: Shop) -> Result<View> {
    let left = shop.number("SELECT nums FROM items").await?;
    let sold = shop.number("SELECT count(*) FROM sales").await?;
    let breach = (left + sold != 10).then(|| format!("{left} left and {sold} sold, of 10"));
    Ok(View { state: format!("{left} left, {sold} sold"), breach })
}

async fn broken() -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let redis = Toy::default();
    let server = redis.clone();
    let stage = Stage::of("items", &shop, books).clock(move |time| server.clone().pass(time));
    let stage = stage.actor("A", |me| seller(me, redis.clone(), shop.clone()));
    stage.actor("B", |me| seller(me, redis, shop)).play("A A +31s B B B B A A").await
}

async fn seller(me: Actor, redis: Toy, shop: Shop) -> Result<()> {
    let set = redis.set_nx_px(KEY, me.name(), TTL);
    me.step(format!("SET item:1 {} NX PX 30000", me.name()), set).await;
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM items")).await?;
    let write = async {
        let mut tx = shop.pool.begin().await?;
        sell(&mut tx, nums, me.name()).await?;
        tx.commit().await
    };
    me.step(format!("UPDATE nums = {}", nums - 1), write).await?;
    me.mark("sells");
    me.step("EVAL unlock.lua", redis.delete_if(KEY, me.name())).await;
    Ok(())
}

async fn sell(conn: &mut sqlx::SqliteConnection, nums: i64, seller: &str) -> sqlx::Result<()> {
    sqlx::query("UPDATE items SET nums = ?").bind(nums - 1).execute(&mut *conn).await?;
    sqlx::query("INSERT INTO sales VALUES (?)").bind(seller).execute(conn).await?;
    Ok(())
}

/// How a seller ends its transaction.
#[derive(Clone, Copy)]
enum Ending {
    WithLease,
    #[cfg(test)]
    WithoutLease,
}

async fn cured(ending: Ending) -> Result<Run> {
    let shop = Shop::open(TABLES).await?;
    let clock = shop.clone();
    let stage = Stage::of("items", &shop, books).clock(move |time| clock.clone().pass(time));
    let stage = stage.actor("A", |me| with_lease(me, shop.clone(), ending));
    stage.actor("B", |me| with_lease(me, shop, ending)).play("A A +31s B B B A").await
}

async fn with_lease(me: Actor, shop: Shop, ending: Ending) -> Result<()> {
    // Each in its own process.
    let leases: Leases<SqlitePool> = Leases::builder(shop.pool.clone()).ttl(TTL).holder(me.name()).build()?;
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM items")).await?;
    let write = async {
        let mut tx: Tx<Sqlite> = lockkit::begin(&shop.pool).await?;
        sell(&mut tx, nums, me.name()).await?;
        match ending {
            Ending::WithLease => lease.commit(tx).await?,
            #[cfg(test)]
            Ending::WithoutLease => tx.commit().await?,
        }
        anyhow::Ok(())
    };
    match me.step(format!("UPDATE nums = {}, lease.commit(tx)", nums - 1), write).await {
        Err(err) if err.downcast_ref().is_some_and(lockkit::Error::is_lost) => me.mark("refused"),
        committed => {
            committed?;
            me.mark("sells");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_that_does_not_ask_for_the_lease_breaks_the_cure() {
        let planted = Play::on_sqlite(|| Box::pin(cured(Ending::WithoutLease)));
        let err = Exhibit { cured: planted, ..exhibit() }.shows().expect_err("the commit did not ask for the lease");
        assert_eq!(err.to_string(), "lockkit broke: 9 left and 2 sold, of 10");
    }
}
