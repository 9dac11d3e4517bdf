//! A holder that overruns its lock, and then deletes that of the next one.

use std::time::Duration;

use anyhow::Result;

use super::with_leases::{sells, tries, waits};
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{LeaseWorld, Place, Redis},
};

const KEY: &str = "product_001";
const TTL: Duration = Duration::from_secs(10);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "07-overrun",
        title: "Work that outlives its lock, and a chain of wrong deletes",
        recipe: "\
won = SET product_001 1 NX PX 10000
if not won: return \"busy\"
sell                           # takes 11 s today
DEL product_001",
        happens: "A needs longer than the 10 s that its lock lasts. The lock ends while A works, B takes it, and two \
                  are inside. Then A is done and deletes the lock. Its own lock has ended; this one is B's. So C \
                  enters beside B. B will delete C's lock, and so on. (The column *lock* shows the value of the key, \
                  which is 1 for every holder.)",
        remedy: "A different value for each holder keeps A from deleting B's lock. It does not keep B out while A \
                  works: the lock still ends after 10 s. A longer time makes this rarer, and makes the others wait \
                  longer after a crash.",
        lockkit: "lockkit renews the lease every third of its ttl while A's process lives, so the lease does not end \
                  while A works. B waits. C gets an error that names the holder.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken(place: Place) -> Result<Run> {
    let redis = Redis::open(&place).await?;
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| seller(me, redis.clone())).actor("B", |me| seller(me, redis.clone()));
    stage.actor("C", |me| seller(me, redis)).play("A +11s B A C").await
}

async fn seller(me: Actor, redis: Redis) -> Result<()> {
    while me.step("SET product_001 1 NX PX 10000", redis.set_nx_px(KEY, "1", TTL)).await?.is_none() {
        me.mark("\"busy\"");
    }
    me.enters();
    let delete = async {
        me.leaves();
        redis.del(KEY).await
    };
    me.step("DEL product_001", delete).await?;
    Ok(())
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (a, b, c) = (world.process("A")?, world.process("B")?, world.process("C")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    let stage = stage.actor("A", |me| sells(me, a, KEY)).actor("B", |me| waits(me, b, KEY));
    stage.actor("C", |me| tries(me, c, KEY)).play("A B~ +11s A B C B C").await
}
