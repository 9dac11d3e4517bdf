//! GET, compare, DEL: the lock ends between the check and the delete.

use std::time::Duration;

use anyhow::Result;
use lockkit::{Leases, testing::MemoryStore};

use super::with_leases::tries;
use crate::{
    exhibit::{Exhibit, Play},
    run::Run,
    stage::{Actor, Stage},
    world::{LeaseWorld, Toy},
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
        lockkit: "A release is one statement that names the token. After the pause, A's release matches nothing, \
                  frees nothing, and reports that the lease was lost before.",
        more: ("leases", "../guide.md#leases"),
        broken: Play::in_memory(|| Box::pin(broken(unlock_in_two_steps))),
        cured: Play::in_memory(|| Box::pin(cured())),
    }
}

async fn broken<F>(unlock: fn(Actor, Toy) -> F) -> Result<Run>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let redis = Toy::default();
    let stage = Stage::of("lock", &redis, |it| it.view(KEY));
    let stage = stage.actor("A", |me| unlock(me, redis.clone())).actor("B", |me| takes(me, redis.clone()));
    stage.actor("C", |me| takes(me, redis)).play("A A +11s B A C").await
}

async fn unlock_in_two_steps(me: Actor, redis: Toy) -> Result<()> {
    me.step("SET product_001 A NX PX 10000", redis.set_nx_px(KEY, me.name(), TTL)).await;
    me.enters();
    let get = async {
        me.leaves();
        redis.get(KEY).await
    };
    if me.step("GET product_001", get).await.as_deref() == Some(me.name()) {
        me.step("DEL product_001", redis.del(KEY)).await;
    }
    Ok(())
}

async fn takes(me: Actor, redis: Toy) -> Result<()> {
    let set = redis.set_nx_px(KEY, me.name(), TTL);
    if me.step(format!("SET product_001 {} NX PX 10000", me.name()), set).await.is_some() {
        me.enters();
    } else {
        me.mark("\"busy\"");
    }
    Ok(())
}

async fn cured() -> Result<Run> {
    let world = LeaseWorld::new(TTL);
    let (a, b, c) = (world.process("A")?, world.process("B")?, world.process("C")?);
    let stage = Stage::new("lease", move || world.clone().view(KEY));
    let stage = stage.actor("A", |me| is_paused(me, a)).actor("B", |me| tries(me, b, KEY));
    stage.actor("C", |me| tries(me, c, KEY)).play("A A +11s B A C").await
}

async fn is_paused(me: Actor, leases: Leases<MemoryStore>) -> Result<()> {
    let lease = me.step("acquire", leases.lease(KEY).acquire()).await?;
    me.enters();
    me.step("done; the process is paused", async { leases.store().faults().pause() }).await;
    me.leaves();
    let release = async {
        leases.store().faults().resume();
        lease.release().await
    };
    me.step("goes on: release", release).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks and deletes in one step.
    async fn unlock_by_script(me: Actor, redis: Toy) -> Result<()> {
        me.step("SET product_001 A NX PX 10000", redis.set_nx_px(KEY, me.name(), TTL)).await;
        me.enters();
        me.step("a pause", async { me.leaves() }).await;
        me.step("EVAL unlock.lua", redis.delete_if(KEY, me.name())).await;
        Ok(())
    }

    #[test]
    fn with_the_script_the_recipe_does_not_break() {
        let planted = Play::in_memory(|| Box::pin(broken(unlock_by_script)));
        let err = Exhibit { broken: planted, ..exhibit() }.shows().expect_err("the recipe was cured");
        assert_eq!(err.to_string(), "the recipe does not break any more");
    }
}
