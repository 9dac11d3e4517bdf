//! Faults of the network, made by the proxy.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep, sleep_until};

use crate::clock;
use crate::faults::{Fault, Stage};
use crate::proxy::Weather;

/// The answer to one in this many COMMITs is lost.
const ONE_IN: u32 = 6;

impl Stage<'_> {
    pub(super) async fn spoil_the_network(&mut self, fault: Fault, end: Instant) -> Result<()> {
        let proxy = self.proxy.context("a network needs a proxy")?;
        let weather = match fault {
            Fault::LostCommits => Weather { commits_lost: Some(ONE_IN), ..Weather::default() },
            Fault::HalfOpen => Weather { half_open: true, ..Weather::default() },
            Fault::LostAnswers => Weather { answers_vanish: true, ..Weather::default() },
            Fault::Stall => Weather { requests_stall: true, answers_stall: true, ..Weather::default() },
            Fault::StallRequests => Weather { requests_stall: true, ..Weather::default() },
            Fault::StallAnswers => Weather { answers_stall: true, ..Weather::default() },
            Fault::Slow => Weather { delay: Duration::from_millis(50), ..Weather::default() },
            _ => Weather::default(),
        };
        // Once for all of the time, or again and again for longer than a ttl.
        let lasting = matches!(fault, Fault::LostCommits | Fault::HalfOpen | Fault::Slow);
        while Instant::now() < end {
            let from = clock::now();
            proxy.set(weather.clone());
            if lasting {
                sleep_until(end).await;
            } else if fault != Fault::Cut {
                sleep(self.ttl.mul_f64(1.5)).await;
            }
            if matches!(fault, Fault::Cut | Fault::LostAnswers) {
                // A stream that has lost a part is of no use.
                proxy.cut();
            }
            proxy.set(Weather::default());
            self.mark(from, fault.name());
            if !lasting {
                sleep(self.ttl.mul_f64(1.5).min(end.saturating_duration_since(Instant::now()))).await;
            }
        }
        if fault == Fault::LostCommits {
            let lost = proxy.commits_lost();
            self.mark(clock::now(), format!("{lost} lost"));
        }
        Ok(())
    }
}
