//! SETNX, then EXPIRE: a crash between the two leaves a lock that never expires.

use std::time::Duration;

use anyhow::Result;

use super::with_leases::{is_killed, waits};
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
        slug: "04-setnx-expire",
        title: "A crash between two commands locks for ever",
        recipe: "\
if SETNX product_001 <me> = 1:
    EXPIRE product_001 30      # so that a crash does not lock for ever
    sell
    DEL product_001",
        happens: "The first command gives A the lock. A's process is killed before the second command, which would \
                  have set the end of the lock. So this lock has no end. After an hour B is still refused, and every \
                  later customer will be, until the key is deleted by hand.",
        remedy: "Redis can do both in one command: `SET product_001 <me> NX PX 30000`. Some libraries keep the two \
                  commands and return \"not taken\" when EXPIRE fails. They leave a lock without an end even when no \
                  process is killed.",
        lockkit: "One statement grants a lease, together with its end. When A's process is killed, the lease is no \
                  longer renewed. It expires after its ttl (time to live, here 30 s), and B gets it.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place, crashes))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken<F>(place: Place, crashes: fn(Actor, Redis) -> F) -> Result<Run>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let redis = Redis::open(&place).await?;
    let stage = Stage::of("lock", &redis, |it| it.view(KEY)).bound(TTL * 2);
    let stage = stage.actor("A", |me| crashes(me, redis.clone())).actor("B", |me| tries(me, redis));
    // B tries again as soon as a lock with an end would be free.
    stage.play("A A B +31s B +3600s B").await
}

async fn crashes(me: Actor, redis: Redis) -> Result<()> {
    me.step("SETNX product_001 A", redis.set_nx(KEY, me.name())).await?;
    me.enters();
    me.step("killed before EXPIRE", async {}).await;
    me.stops("killed");
    Ok(())
}

async fn tries(me: Actor, redis: Redis) -> Result<()> {
    me.wants();
    while me.step("SETNX product_001 B", redis.set_nx(KEY, me.name())).await? == 0 {
        me.mark("\"busy\"");
    }
    me.enters();
    me.step("sell", async { me.leaves() }).await;
    Ok(())
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (here, there) = (world.process("A")?, world.process("B")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY)).bound(TTL * 2);
    let stage = stage.actor("A", |me| is_killed(me, here, KEY)).actor("B", |me| waits(me, there, KEY));
    stage.play("A A B~ +31s B").await
}

/// With both in one command, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken = Play::new(Uses::Redis, |place| Box::pin(broken(place, crashes_with_an_end)));
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}

#[cfg(test)]
async fn crashes_with_an_end(me: Actor, redis: Redis) -> Result<()> {
    me.step("SET product_001 A NX PX 30000", redis.set_nx_px(KEY, me.name(), TTL)).await?;
    me.enters();
    me.step("killed", async {}).await;
    me.stops("killed");
    Ok(())
}
