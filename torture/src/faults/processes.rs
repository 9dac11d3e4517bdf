//! Faults of worker processes: killed, stopped, aborted during a commit.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::event::Kind;
use crate::faults::Stage;

impl Stage<'_> {
    pub(super) async fn kill_holders(&mut self, end: Instant) -> Result<()> {
        for kind in [Kind::Lease, Kind::Several, Kind::Fenced, Kind::Lease, Kind::Session].into_iter().cycle() {
            if Instant::now() >= end {
                break;
            }
            let Some(worker) = self.crew.next_holder(kind).await else { break };
            self.crew.kill(worker).await?;
            self.mark(clock::now(), format!("kill {worker}"));
            self.crew.add().await?;
            sleep(self.ttl).await;
        }
        Ok(())
    }

    pub(super) async fn stop_holders(&mut self, end: Instant) -> Result<()> {
        for kind in [Kind::PlainCommit, Kind::PlainCommit, Kind::Lease].into_iter().cycle() {
            if Instant::now() >= end {
                break;
            }
            let Some(worker) = self.crew.next_holder(kind).await else { break };
            let from = clock::now();
            self.crew.stop_for(worker, self.ttl.mul_f64(2.3)).await?;
            self.mark(from, format!("stop {worker}"));
            sleep(self.ttl / 4).await;
        }
        Ok(())
    }

    pub(super) async fn abort_in_commits(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            let Some(worker) = self.crew.any() else { break };
            if self.crew.abort_in_commit(worker, Duration::from_secs(2)).await? {
                self.mark(clock::now(), format!("abort {worker}"));
                self.crew.add().await?;
            }
            sleep(self.ttl / 2).await;
        }
        Ok(())
    }
}
