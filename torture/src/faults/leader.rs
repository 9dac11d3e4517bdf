//! Faults of a cluster's leader, after which another member leads.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::faults::{Fault, Stage};
use crate::rig::{Rig, catch_up, execute};

/// How long a node of Galera is isolated. The others count it out after 5 s.
const ISOLATION: Duration = Duration::from_secs(7);

impl Stage<'_> {
    /// Cuts a node of a Galera cluster off from the others, while its workers still reach it.
    pub(super) async fn isolate_a_node<S: Rig>(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            sleep(self.ttl * 2).await;
            let from = clock::now();
            for isolate in [1, 0] {
                let sql = format!("SET GLOBAL wsrep_provider_options = 'gmcast.isolate={isolate}'");
                execute::<S>(&self.url, &sql).await?;
                sleep(ISOLATION).await;
            }
            self.mark(from, "node 0 isolated");
            let deadline = Instant::now() + Duration::from_secs(60);
            while let Err(err) = catch_up::<S>(&self.url).await {
                anyhow::ensure!(Instant::now() < deadline, "the node does not come back: {err:#}");
                sleep(Duration::from_millis(200)).await;
            }
        }
        Ok(())
    }

    /// Takes the leader away, lets the workers go on with its successor, and gives it back to the cluster as a
    /// follower.
    pub(super) async fn change_the_leader(&mut self, fault: Fault, end: Instant) -> Result<()> {
        while Instant::now() < end {
            sleep(self.ttl * 2).await;
            let ttl = self.ttl;
            let cluster = self.cluster.as_deref_mut().context("this fault needs a cluster of the rack's own")?;
            let (from, old) = (clock::now(), cluster.leader().await?);
            match fault {
                Fault::SwitchOver => cluster.switch_over(old).await?,
                Fault::KillLeader => cluster.kill(old)?,
                Fault::FreezeLeader => cluster.freeze(old),
                _ => cluster.cut(old).await?,
            }
            let new = cluster.successor(old).await?;
            // Long enough for the keys of the old leader's clients to be taken over while it still is away.
            sleep(ttl * 3).await;
            match fault {
                Fault::SwitchOver => {}
                Fault::KillLeader => cluster.start_again(old)?,
                Fault::FreezeLeader => cluster.thaw(old),
                _ => cluster.heal(old).await?,
            }
            self.mark(from, format!("{}: member {old}, then {new}", fault.name()));
            let cluster = self.cluster.as_deref_mut().context("a cluster")?;
            // Its clients are with it while it learns of its successor.
            let from = clock::now();
            let restarted = cluster.complete().await?;
            cluster.unite_clients();
            for member in restarted {
                self.mark(from, format!("member {member} hung, and was started again"));
            }
        }
        Ok(())
    }
}
