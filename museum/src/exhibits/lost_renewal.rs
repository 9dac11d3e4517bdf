//! A renewal that fails and is only logged.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::{Error, Leases, OnLost};

use super::with_leases::waits;
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{Client, LeaseWorld, Place, Redis},
};

const KEY: &str = "report";
const TTL: Duration = Duration::from_secs(30);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "18-lost-renewal",
        title: "A failed renewal that is only logged",
        recipe: "\
lock.lock()                    # SET … NX PX 30000, waits without end
                               # in the background, every 10 s: renew to 30 s
write the report               # takes an hour
lock.unlock()",
        happens: "A background task renews A's lock every 10 s. Then A's machine loses its network. The renewal \
                  fails, and the failure is logged. A's work is not stopped. The lock ends after 30 s, B takes it, \
                  and both write the report.",
        remedy: "The usual remedy is a library that renews the lock in the background. This recipe already uses one. \
                  At the end of the work `unlock` throws an exception, which is too late.",
        lockkit: "A process trusts its lease for 1 % less than its ttl (its time to live), counted from the moment its \
                  last successful renewal was *sent*. `run` executes the work under a lease. When that time is over, \
                  `run` stops the work where it next waits for something. Here that is 29.7 s after the last renewal, \
                  before the store can grant the lease to B.",
        more: ("jobs, queues and leaders", "../guide/jobs.md"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place, OnLost::Stop))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken(place: Place) -> Result<Run> {
    let redis = Redis::open(&place).await?;
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| with_watchdog(me, redis.clone())).actor("B", |me| takes(me, redis));
    stage.play("A +10s A A +10s A +21s B A").await
}

async fn with_watchdog(me: Actor, redis: Redis) -> Result<()> {
    me.step("SET report A NX PX 30000", redis.set_nx_px(KEY, me.name(), TTL)).await?;
    me.enters();
    me.step("watchdog: renew to 30 s", redis.extend_if(KEY, me.name(), TTL)).await?;
    me.step("its network fails", async {}).await;
    me.step("watchdog: no answer, logged", async {}).await;
    me.step("goes on writing", async {}).await;
    Ok(())
}

async fn takes(me: Actor, redis: Redis) -> Result<()> {
    while me.step("SET report B NX PX 30000", redis.set_nx_px(KEY, me.name(), TTL)).await?.is_none() {
        me.mark("\"busy\"");
    }
    me.enters();
    Ok(())
}

async fn cured(place: Place, on_lost: OnLost) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (here, there) = (world.process("A")?, world.process("B")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    let stage = stage.actor("A", |me| runs(me, here, on_lost)).actor("B", |me| waits(me, there, KEY));
    stage.play("A +10s A B~ +31s A B").await
}

async fn runs(me: Actor, leases: Leases<Client>, on_lost: OnLost) -> Result<()> {
    me.step("run the body under the lease", async {}).await;
    let body = async |_lease| {
        me.enters();
        me.step("its network fails", async { leases.store().cut() }).await;
        me.step("goes on writing", async {}).await;
        Ok(())
    };
    let ended: lockkit::Result<()> = leases.lease(KEY).on_lost(on_lost).run(body).await;
    me.stops("stopped");
    match me.step("run", async { ended }).await {
        Err(Error::Lost { .. }) => Ok(()),
        ended => bail!("the body of A was not stopped: {ended:?}"),
    }
}

/// A body that goes on without its lease breaks the cure.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let cured = Play::new(Uses::Leases, |place| Box::pin(cured(place, OnLost::Continue)));
    (Exhibit { cured, ..exhibit() }, "lockkit broke: A and B are inside")
}
