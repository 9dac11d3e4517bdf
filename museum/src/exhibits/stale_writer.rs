//! A correct unlock, and a stale holder that still writes.

use std::time::Duration;

use anyhow::Result;
use lockkit::{Leases, Tx};

use crate::{
    exhibit::{Exhibit, on_database},
    run::Run,
    stage::{Actor, View},
    world::{Place, Redis, Shop, Sql},
};

const KEY: &str = "item:1";
const TTL: Duration = Duration::from_secs(30);
const TABLES: &str = "CREATE TABLE items (id BIGINT PRIMARY KEY, nums BIGINT NOT NULL);
                      CREATE TABLE sales (seller VARCHAR(9) NOT NULL);
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
                  are sold, and the stock falls by one. A's unlock is correct, deletes nothing, and comes too late.",
        remedy: "An owner check, a script, a longer time: all of them protect the *lock*. None protects the *data* \
                  from a holder that does not notice that its time is over. A check right before the write leaves \
                  the time between the check and the write.",
        lockkit: "`lease.commit(tx)` commits a transaction only if its lease is still held, as one step. That is \
                  possible because the lease and the data are in one database. A's commit fails with `Lost`, and its \
                  write is rolled back.",
        more: ("from Redis", "../guide/from-redis.md"),
        broken: on_database!(RedisAndDatabase, broken),
        cured: on_database!(Database, cured, Ending::WithLease),
        elsewhere: &[],
        also: None,
    }
}

async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let left = shop.number("SELECT nums FROM items").await?;
    let sold = shop.number("SELECT count(*) FROM sales").await?;
    let breach = (left + sold != 10).then(|| format!("{left} left and {sold} sold, of 10"));
    Ok(View { state: format!("{left} left, {sold} sold"), breach })
}

async fn broken<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let redis = Redis::open(&place).await?;
    let server = redis.clone();
    let stage = shop.stage("items", books).clock(move |time| server.clone().pass(time));
    let stage = stage.actor("A", |me| seller(me, redis.clone(), shop.clone()));
    stage.actor("B", |me| seller(me, redis, shop)).play("A A +31s B B B B A A").await
}

async fn seller<DB: Sql>(me: Actor, redis: Redis, shop: Shop<DB>) -> Result<()> {
    let set = redis.set_nx_px(KEY, me.name(), TTL);
    me.step(format!("SET item:1 {} NX PX 30000", me.name()), set).await?;
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM items")).await?;
    let write = async {
        let mut tx = shop.pool.begin().await?;
        sell::<DB>(&mut tx, nums, me.name()).await?;
        tx.commit().await
    };
    me.step(format!("UPDATE nums = {}", nums - 1), write).await?;
    me.mark("sells");
    me.step("EVAL unlock.lua", redis.delete_if(KEY, me.name())).await?;
    Ok(())
}

async fn sell<DB: Sql>(conn: &mut DB::Connection, nums: i64, seller: &str) -> sqlx::Result<()> {
    DB::execute(conn, &format!("UPDATE items SET nums = {}", nums - 1)).await?;
    DB::execute(conn, &format!("INSERT INTO sales VALUES ('{seller}')")).await?;
    Ok(())
}

/// How a seller ends its transaction.
#[derive(Clone, Copy)]
enum Ending {
    WithLease,
    #[cfg(test)]
    WithoutLease,
}

async fn cured<DB: Sql>(place: Place, ending: Ending) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, TABLES).await?;
    let stage = shop.stage("items", books).actor("A", |me| with_lease(me, shop.clone(), ending));
    stage.actor("B", |me| with_lease(me, shop, ending)).play("A A +31s B B B A").await
}

async fn with_lease<DB: Sql>(me: Actor, shop: Shop<DB>, ending: Ending) -> Result<()> {
    // Each in its own process.
    let leases = Leases::builder(shop.pool.clone()).ttl(TTL).holder(me.name()).build()?;
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    let nums = me.step("SELECT nums", shop.number("SELECT nums FROM items")).await?;
    let write = async {
        let mut tx: Tx<DB> = lockkit::begin(&shop.pool).await?;
        sell::<DB>(&mut tx, nums, me.name()).await?;
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

/// A commit that does not ask for the lease breaks the cure.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let cured = on_database!(Database, cured, Ending::WithoutLease);
    (Exhibit { cured, ..exhibit() }, "lockkit broke: 9 left and 2 sold, of 10")
}
