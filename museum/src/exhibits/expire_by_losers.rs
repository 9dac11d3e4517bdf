//! EXPIRE before the check: each loser prolongs the lock of a holder that is dead.

use std::time::Duration;

use anyhow::Result;

use super::with_leases::{is_killed, tries};
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{LeaseWorld, Place, Redis},
};

const KEY: &str = "product_001";
const TTL: Duration = Duration::from_secs(10);

/// By then a lock of 10 s must be free.
const BOUND: Duration = Duration::from_secs(20);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "06-expire-by-losers",
        title: "Every refused request extends the lock of a dead process",
        recipe: "\
won = SETNX product_001 <me>
EXPIRE product_001 10          # one line too early
if won = 0: return \"busy\"
sell
DEL product_001",
        happens: "The lock should end 10 s after its holder died. But EXPIRE comes before the check, so every \
                  request that is refused sets the end of the lock to 10 s from now. A is dead. B tries every 8 s, \
                  and each time A's lock lives on. With many customers the lock never ends.",
        remedy: "With the two lines in the right order, a crash between them leaves a lock without an end (exhibit \
                  4). The remedy is one command for both: `SET … NX PX`.",
        lockkit: "Each grant of a lease has a random token. A renewal names it, and only the holder knows it. So B's \
                  requests change nothing, and B gets the lease when A's 10 s are over.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken(place: Place) -> Result<Run> {
    let redis = Redis::open(&place).await?;
    let stage = Stage::of("lock", &redis, |it| it.view(KEY)).bound(BOUND);
    let stage = stage.actor("A", |me| dies(me, redis.clone())).actor("B", |me| prolongs(me, redis));
    stage.play("A A B +8s B +8s B +8s B").await
}

async fn dies(me: Actor, redis: Redis) -> Result<()> {
    me.step("SETNX product_001 A, EXPIRE 10", async {
        let won = redis.set_nx(KEY, me.name()).await?;
        redis.expire(KEY, TTL).await?;
        anyhow::Ok(won)
    })
    .await?;
    me.enters();
    me.step("killed", async {}).await;
    me.stops("killed");
    Ok(())
}

async fn prolongs(me: Actor, redis: Redis) -> Result<()> {
    me.wants();
    loop {
        let won = me.step("SETNX product_001 B, EXPIRE 10", async {
            let won = redis.set_nx(KEY, me.name()).await?;
            redis.expire(KEY, TTL).await?;
            anyhow::Ok(won)
        });
        if won.await? == 1 {
            me.enters();
        } else {
            me.mark("\"busy\"");
        }
    }
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (here, there) = (world.process("A")?, world.process("B")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY)).bound(BOUND);
    let stage = stage.actor("A", |me| is_killed(me, here, KEY)).actor("B", |me| tries(me, there, KEY));
    stage.play("A A B +8s B +8s B").await
}
