//! A fail-over that loses the last write, which was the lock.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::{Leases, Tx};

use crate::{
    exhibit::{Exhibit, Play, Uses, on_database},
    run::Run,
    stage::{Actor, Stage, View},
    world::{Changed, Place, Shop, Sql, Toy},
};

const KEY: &str = "order:7";
const TTL: Duration = Duration::from_secs(30);
const ONLY_TOY: &str = "a fail-over that loses a write needs a master to kill, and the museum kills no server of yours";

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "10-fail-over",
        title: "A fail-over that forgets the lock",
        recipe: "\
won = SET order:7 <my uuid> NX PX 30000   # on the master
if not won: return \"busy\"
order                                      # the replica gets the write a moment later
EVAL \"if GET = <my uuid> then DEL\"",
        happens: "A's lock is written on the master. Redis answers A before its replicas have received the write. \
                  The master dies at that moment, and a replica takes its place. It does not have A's lock, so it \
                  grants the lock to B. A and B are inside, and each has a correct answer from Redis.",
        remedy: "Redis's command WAIT, which waits until a replica has the write, makes such a loss rarer and cannot \
                  rule it out. Redlock takes the lock on several masters, and depends on their clocks and on no \
                  holder being paused.",
        lockkit: "Here leases and orders are in one database. If a fail-over loses A's lease, B may get it, and A's \
                  commit fails with `Lost`: still one order. Leases in Redis are protected in two ways. After a \
                  fail-over Redis grants no lease until every older one has expired: the quarantine. And each lease \
                  has a number that is greater than all before it, its fence. A row in your database, the fence guard, \
                  keeps the greatest one and refuses a holder with a lower one.",
        more: ("leases in another system", "../guide.md#leases-in-another-system"),
        broken: Play::new(Uses::Toy(ONLY_TOY), |_place| Box::pin(broken())),
        cured: on_database!(Database, cured),
        elsewhere: &[],
        also: None,
    }
}

async fn broken() -> Result<Run> {
    let redis = Toy::default();
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| orders(me, redis.clone())).actor("B", |me| orders(me, redis.clone()));
    stage.actor("Redis", |me| fails_over(me, redis)).play("A Redis B").await
}

async fn orders(me: Actor, redis: Toy) -> Result<()> {
    let set = redis.set_nx_px(KEY, me.name(), TTL);
    if me.step(format!("SET order:7 {} NX PX 30000", me.name()), set).await.is_some() {
        me.enters();
    } else {
        me.mark("\"busy\"");
    }
    Ok(())
}

async fn fails_over(me: Actor, redis: Toy) -> Result<()> {
    me.step("the replica becomes master", redis.fail_over()).await;
    me.mark("fails over");
    Ok(())
}

async fn cured<DB: Sql>(place: Place) -> Result<Run> {
    let shop = Shop::<DB>::open(&place, "CREATE TABLE orders (customer BIGINT NOT NULL)").await?;
    let stage = shop.stage("orders", books);
    let stage = stage.actor("A", |me| with_lease(me, shop.clone())).actor("B", |me| with_lease(me, shop.clone()));
    stage.actor("DB", |me| loses_a_commit(me, shop)).play("A DB B B A").await
}

async fn books<DB: Sql>(shop: Shop<DB>) -> Result<View> {
    let orders = shop.number("SELECT count(*) FROM orders").await?;
    Ok(View { state: orders.to_string(), breach: (orders > 1).then(|| format!("{orders} orders of one customer")) })
}

async fn with_lease<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let leases = Leases::builder(shop.pool.clone()).ttl(TTL).holder(me.name()).build()?;
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    let order = async {
        let mut tx: Tx<DB> = lockkit::begin(&shop.pool).await?;
        DB::execute(&mut tx, "INSERT INTO orders VALUES (7)").await?;
        lease.commit(tx).await?;
        anyhow::Ok(())
    };
    match me.step("INSERT order, lease.commit(tx)", order).await {
        Err(err) if err.downcast_ref().is_some_and(lockkit::Error::is_lost) => me.mark("refused"),
        committed => {
            committed?;
            me.mark("orders");
        }
    }
    Ok(())
}

/// What the database has after a fail-over that lost the commit with A's claim.
async fn loses_a_commit<DB: Sql>(me: Actor, shop: Shop<DB>) -> Result<()> {
    let lose = async {
        let lost = shop.execute(&format!("DELETE FROM lockkit_lease WHERE name = '{KEY}'")).await?;
        Ok::<_, sqlx::Error>((lost, ()))
    };
    let (deleted, ()) = me.step("the replica becomes master", lose).await?;
    me.mark("fails over");
    if deleted == Changed(0) {
        bail!("there was no lease to lose");
    }
    Ok(())
}
