//! A deadline as the value of the lock, by the clock of each client.

use std::time::Duration;

use anyhow::Result;
use tokio::time::Instant;

use super::with_leases::{sells, tries};
use crate::{
    exhibit::{Exhibit, Play, Uses},
    run::Run,
    stage::{Actor, Stage},
    world::{LeaseWorld, Place, Redis},
};

const KEY: &str = "bonus";
const TTL: Duration = Duration::from_secs(30);

pub(super) fn exhibit() -> Exhibit {
    Exhibit {
        slug: "17-client-clocks",
        title: "A clock that is a minute ahead",
        recipe: "\
if SETNX bonus <my clock + 30 s> = 1: mine
else:
    deadline = GET bonus
    if deadline < <my clock> and GETSET bonus <my clock + 30 s> = deadline: mine
    else: \"busy\"",
        happens: "The value of the lock is the time at which it ends. A takes it at 12:00:00, until 12:00:30. The \
                  clock of B's machine is 60 s ahead and shows 12:01:00. So for B the lock has ended, and B takes it \
                  at once. Two are inside.",
        remedy: "NTP keeps clocks close most of the time. The recipe has another flaw with correct clocks: a client \
                  that loses the race has already moved the winner's deadline with its GETSET. And the value does \
                  not say who has the lock.",
        lockkit: "lockkit never compares the clocks of two machines. The clock of the store decides when a lease has \
                  expired. A process only measures how much time has passed since its own last renewal.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::new(Uses::Redis, |place| Box::pin(broken(place, Duration::from_secs(60), "A B B B"))),
        cured: Play::new(Uses::Leases, |place| Box::pin(cured(place))),
        elsewhere: &[],
        also: None,
    }
}

async fn broken(place: Place, ahead: Duration, schedule: &str) -> Result<Run> {
    let redis = Redis::open(&place).await?;
    let noon = Instant::now();
    let stage = Stage::of("lock until", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| by_clock(me, redis.clone(), noon));
    stage.actor("B", |me| by_clock(me, redis, noon - ahead)).play(schedule).await
}

/// `noon` is when the clock of this client shows 12:00:00.
async fn by_clock(me: Actor, redis: Redis, noon: Instant) -> Result<()> {
    let clock = |later: Duration| {
        let seconds = (noon.elapsed() + later).as_secs();
        format!("12:{:02}:{:02}", seconds / 60, seconds % 60)
    };
    let deadline = clock(TTL);
    if me.step(format!("SETNX bonus {deadline}"), redis.set_nx(KEY, &deadline)).await? == 1 {
        me.enters();
        return Ok(());
    }
    let found = me.step("GET bonus", redis.get(KEY)).await?.unwrap_or_default();
    if found > clock(Duration::ZERO) {
        me.gives_up("\"busy\"");
        return Ok(());
    }
    me.mark("\"over\"");
    let before = me.step(format!("GETSET bonus {deadline}"), redis.get_set(KEY, &deadline)).await?;
    if before.as_deref() == Some(&found) {
        me.enters();
    }
    Ok(())
}

async fn cured(place: Place) -> Result<Run> {
    let world = LeaseWorld::open(&place, TTL).await?;
    let (a, b) = (world.process("A")?, world.process("B")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    stage.actor("A", |me| sells(me, a, KEY)).actor("B", |me| tries(me, b, KEY)).play("A B A B").await
}

/// With clocks that agree, the recipe does not break.
#[cfg(test)]
pub(super) fn planted() -> (Exhibit, &'static str) {
    let broken = Play::new(Uses::Redis, |place| Box::pin(broken(place, Duration::ZERO, "A B B")));
    (Exhibit { broken, ..exhibit() }, "the recipe does not break any more")
}
