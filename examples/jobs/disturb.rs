//! Processes that are killed and stopped in turn, chosen at random.

use std::{fmt, time::Duration};

use anyhow::Result;
use rustix::process::Signal;
use tokio::time::sleep;

use super::trial::{Processes, send_signal};

/// How often processes were killed and stopped.
#[derive(Debug, Default)]
pub(crate) struct Disturbed {
    kills: u32,
    stops: u32,
}

impl Disturbed {
    /// Kills a process, or the next time stops one for this long.
    pub(crate) async fn once(&mut self, processes: &mut Processes, stop: Duration) -> Result<()> {
        processes.replace_dead()?;
        let ids = processes.ids();
        let id = ids[fastrand::usize(..ids.len())];
        if self.kills <= self.stops {
            self.kills += 1;
            send_signal(id, Signal::KILL)?;
        } else {
            self.stops += 1;
            send_signal(id, Signal::STOP)?;
            sleep(stop).await;
            send_signal(id, Signal::CONT)?;
        }
        sleep(Duration::from_millis(fastrand::u64(100..600))).await;
        Ok(())
    }
}

impl fmt::Display for Disturbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "processes killed {} times, stopped {} times", self.kills, self.stops)
    }
}
