//! A `finally` that deletes the lock of the winner.

use std::time::Duration;

use anyhow::Result;

use super::with_leases::{sells, tries};
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{LeaseWorld, Place, Redis},
};

const KEY: &str = "product_001";
const TTL: Duration = Duration::from_secs(30);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "05-loser-unlocks",
        title: "The loser unlocks the winner",
        recipe: "\
try:
    if SETNX product_001 <me> = 0: return \"busy\"
    sell
finally:
    DEL product_001            # so that an exception does not lock for ever",
        happens: "A has the lock. B does not get it and returns. But `finally` runs on every way out of the \
                  function, so also on this one: B deletes A's lock. C finds no lock and enters while A is still \
                  inside.",
        remedy: "`finally` itself was the remedy, for exceptions between the lock and its release. It is right only \
                  if the block begins after the lock was taken. And it does not run at all when the process is \
                  killed.",
        lockkit: "B gets an error, `Contended`, and nothing that it could release. A gets an object, the lease, and \
                  only that object can release it.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken(place: Place) -> Result<Run> {
    on_redis(Redis::open(&place).await?, seller).await
}

async fn on_redis<F>(redis: Redis, seller: fn(Actor, Redis) -> F) -> Result<Run>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| seller(me, redis.clone())).actor("B", |me| seller(me, redis.clone()));
    stage.actor("C", |me| seller(me, redis)).play("A B B C").await
}

async fn seller(me: Actor, redis: Redis) -> Result<()> {
    let won = me.step(format!("SETNX product_001 {}", me.name()), redis.set_nx(KEY, me.name())).await?;
    if won == 1 {
        me.enters();
        me.step("sell", async {}).await;
        me.leaves();
    } else {
        me.mark("\"busy\"");
    }
    me.step("finally: DEL product_001", redis.del(KEY)).await?;
    Ok(())
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (a, b, c) = (world.process("A")?, world.process("B")?, world.process("C")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    let stage = stage.actor("A", |me| sells(me, a, KEY)).actor("B", |me| tries(me, b, KEY));
    stage.actor("C", |me| tries(me, c, KEY)).play("A B C A C").await
}

/// If only the winner deletes the lock, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken =
        Play::new(Uses::Redis, |place| Box::pin(async move { on_redis(Redis::open(&place).await?, owner).await }));
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}

#[cfg(test)]
async fn owner(me: Actor, redis: Redis) -> Result<()> {
    let won = me.step(format!("SETNX product_001 {}", me.name()), redis.set_nx(KEY, me.name())).await?;
    if won == 0 {
        me.step("return \"busy\"", async { me.mark("\"busy\"") }).await;
        return Ok(());
    }
    me.enters();
    me.step("sell", async {}).await;
    me.leaves();
    me.step("finally: DEL product_001", redis.del(KEY)).await?;
    Ok(())
}
