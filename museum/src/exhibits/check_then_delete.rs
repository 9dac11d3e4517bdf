//! GET, compare, DEL: the lock ends between the check and the delete.

use std::time::Duration;

use anyhow::Result;
use lockkit::Leases;

use super::with_leases::tries;
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{Client, LeaseWorld, Place, Redis},
};

const KEY: &str = "product_001";
const TTL: Duration = Duration::from_secs(10);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "08-check-then-delete",
        title: "A check, a pause, and a delete",
        recipe: "\
won = SET product_001 <my uuid> NX PX 10000
if not won: return \"busy\"
sell
if GET product_001 = <my uuid>:        # only if it is still mine
    DEL product_001",
        happens: "A is done and checks that the lock is still its own. It is. Then A's process pauses, for a garbage \
                  collection or because its virtual machine is moved. During the pause the lock ends, and B takes \
                  it. A continues after its check and deletes the lock of B. C enters beside B.",
        remedy: "A script that Redis runs as one step, check and delete together, closes this gap. It does not stop \
                  a holder that pauses before its last *write* (exhibit 9).",
        lockkit: "A release is one statement, and it names the random token that the holder got with its lease. \
                  After the pause, A's release matches nothing, frees nothing, and reports that the lease was lost \
                  before.",
        more: ("test your service", "../guide/testing.md"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place, unlock_in_two_steps))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken<F>(place: Place, unlock: fn(Actor, Redis) -> F) -> Result<Run>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let redis = Redis::open(&place).await?;
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| unlock(me, redis.clone())).actor("B", |me| takes(me, redis.clone()));
    stage.actor("C", |me| takes(me, redis)).play("A A +11s B A C").await
}

async fn unlock_in_two_steps(me: Actor, redis: Redis) -> Result<()> {
    me.step("SET product_001 A NX PX 10000", redis.set_nx_px(KEY, me.name(), TTL)).await?;
    me.enters();
    let get = async {
        me.leaves();
        redis.get(KEY).await
    };
    if me.step("GET product_001", get).await?.as_deref() == Some(me.name()) {
        me.step("DEL product_001", redis.del(KEY)).await?;
    }
    Ok(())
}

async fn takes(me: Actor, redis: Redis) -> Result<()> {
    let set = redis.set_nx_px(KEY, me.name(), TTL);
    if me.step(format!("SET product_001 {} NX PX 10000", me.name()), set).await?.is_some() {
        me.enters();
    } else {
        me.mark("\"busy\"");
    }
    Ok(())
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (a, b, c) = (world.process("A")?, world.process("B")?, world.process("C")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    let stage = stage.actor("A", |me| is_paused(me, a)).actor("B", |me| tries(me, b, KEY));
    stage.actor("C", |me| tries(me, c, KEY)).play("A A +11s B A C").await
}

async fn is_paused(me: Actor, leases: Leases<Client>) -> Result<()> {
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    me.enters();
    me.step("done; the process is paused", async { leases.store().cut() }).await;
    me.leaves();
    let release = async {
        leases.store().heal();
        lease.release().await
    };
    me.step("goes on: release", release).await?;
    Ok(())
}

/// With the script, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken = Play::new(Uses::Redis, |place| Box::pin(broken(place, unlock_by_script)));
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}

/// Checks and deletes in one step.
#[cfg(test)]
async fn unlock_by_script(me: Actor, redis: Redis) -> Result<()> {
    me.step("SET product_001 A NX PX 10000", redis.set_nx_px(KEY, me.name(), TTL)).await?;
    me.enters();
    me.step("a pause", async { me.leaves() }).await;
    me.step("EVAL unlock.lua", redis.delete_if(KEY, me.name())).await?;
    Ok(())
}
