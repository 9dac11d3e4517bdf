//! What this process may believe of a lease that it holds. Counts with the monotonic clock; never asks the store.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::error::LossReason;

/// The belief in one lease: held until an instant, or lost for ever.
///
/// The instant is the start of the last request that acquired or renewed the lease, plus its ttl, less a margin for
/// clocks of different speed. Counting from the *start* of the request keeps it before the store's own expiry however
/// long the answer took.
#[derive(Debug)]
pub(crate) struct Trust(watch::Sender<Belief>);

#[derive(Debug, Clone, Copy)]
struct Belief {
    until: Instant,
    /// Renewals have failed since the last one that worked.
    unreachable: bool,
    lost: Option<LossReason>,
}

impl Belief {
    /// Loss is for ever, so that trust which ran out stays out whoever looks first.
    fn settle(&mut self) -> Option<LossReason> {
        if self.lost.is_none() && Instant::now() >= self.until {
            self.lost = Some(if self.unreachable { LossReason::Unreachable } else { LossReason::Expired });
        }
        self.lost
    }
}

/// How much earlier than the store this process stops believing: 1 % of the ttl, at least 10 ms.
fn margin(ttl: Duration) -> Duration {
    (ttl / 100).max(Duration::from_millis(10))
}

impl Trust {
    /// Trust that began with a request sent at `sent`.
    pub(crate) fn new(sent: Instant, ttl: Duration) -> Self {
        let until = sent + (ttl.saturating_sub(margin(ttl)));
        Self(watch::Sender::new(Belief { until, unreachable: false, lost: None }))
    }

    /// The lease was renewed by a request sent at `sent`. `false` when it had been given up for lost before that.
    pub(crate) fn renewed(&self, sent: Instant, ttl: Duration) -> bool {
        let mut held = true;
        self.0.send_modify(|belief| {
            held = belief.settle().is_none();
            if held {
                // Answers may come in another order than they were asked for.
                belief.until = belief.until.max(sent + ttl.saturating_sub(margin(ttl)));
                belief.unreachable = false;
            }
        });
        held
    }

    /// A renewal failed: unknown, so the old trust goes on until it runs out.
    pub(crate) fn unreachable(&self) {
        self.0.send_modify(|belief| belief.unreachable = true);
    }

    /// The store says that the lease is gone, or it was given back. The first reason stays.
    pub(crate) fn lose(&self, reason: LossReason) {
        self.0.send_modify(|belief| {
            if belief.settle().is_none() {
                belief.lost = Some(reason);
            }
        });
    }

    /// The lease was given up by a commit that succeeded. A trust that ran out while the commit was on its way is no loss:
    /// nobody could take the lease in between.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn committed(&self) {
        self.0.send_modify(|belief| belief.lost = Some(LossReason::Released));
    }

    /// Until when the lease is trusted if nothing more is heard.
    pub(crate) fn until(&self) -> Instant {
        self.0.borrow().until
    }

    /// Why the lease is lost, if it is.
    pub(crate) fn lost(&self) -> Option<LossReason> {
        self.0.borrow().clone().settle()
    }

    /// Waits until the lease is lost. Giving it back is not losing it.
    pub(crate) async fn wait_until_lost(&self) -> LossReason {
        let mut changes = self.0.subscribe();
        loop {
            let until = {
                let mut belief = *changes.borrow_and_update();
                match belief.settle() {
                    Some(LossReason::Released) => return std::future::pending().await,
                    Some(reason) => {
                        self.lose(reason);
                        return reason;
                    }
                    None => belief.until,
                }
            };
            tokio::select! {
                () = sleep_until(until) => {}
                _ = changes.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn trust_counts_from_the_start_of_the_request() {
        let sent = Instant::now();
        tokio::time::advance(Duration::from_secs(9)).await;
        let trust = Trust::new(sent, TTL);
        assert_eq!(trust.lost(), None);
        tokio::time::advance(Duration::from_millis(900)).await;
        assert_eq!(trust.lost(), Some(LossReason::Expired));
    }

    #[tokio::test(start_paused = true)]
    async fn lost_resolves_when_trust_runs_out_and_not_before() {
        let trust = Trust::new(Instant::now(), TTL);
        let begun = Instant::now();
        trust.unreachable();
        assert_eq!(trust.wait_until_lost().await, LossReason::Unreachable);
        assert_eq!(begun.elapsed() + margin(TTL), TTL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_after_trust_ran_out_does_not_bring_it_back() {
        let trust = Trust::new(Instant::now(), TTL);
        tokio::time::advance(TTL).await;
        assert!(!trust.renewed(Instant::now(), TTL));
        assert_eq!(trust.lost(), Some(LossReason::Expired));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_in_time_moves_the_end() {
        let trust = Trust::new(Instant::now(), TTL);
        tokio::time::advance(TTL / 2).await;
        assert!(trust.renewed(Instant::now(), TTL));
        tokio::time::advance(TTL * 3 / 4).await;
        assert_eq!(trust.lost(), None);
        trust.lose(LossReason::Stolen);
        assert_eq!(trust.wait_until_lost().await, LossReason::Stolen);
        trust.lose(LossReason::Released);
        assert_eq!(trust.lost(), Some(LossReason::Stolen), "the first reason stays");
    }
}
