//! Whether this process may still act as the holder of a lease. Counts with the monotonic clock; never asks the store.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::error::LossReason;

/// The trust in one lease: held until an instant, or lost for ever.
///
/// The instant is the start of the last request that acquired or renewed the lease, plus its ttl, minus a margin for
/// clocks that run at different speeds. Counting from the *start* of the request keeps the instant before the store's
/// own expiry, however long the answer took.
#[derive(Debug)]
pub(crate) struct Trust(watch::Sender<Belief>);

#[derive(Debug, Clone, Copy)]
struct Belief {
    until: Instant,
    /// A renewal has failed since the last successful one.
    unreachable: bool,
    lost: Option<LossReason>,
}

impl Belief {
    /// Latches expiry: once past `until`, the lease stays lost.
    fn settle(&mut self) -> Option<LossReason> {
        if self.lost.is_none() && Instant::now() >= self.until {
            self.lost = Some(if self.unreachable { LossReason::Unreachable } else { LossReason::Expired });
        }
        self.lost
    }
}

/// How much earlier than the store this process treats the lease as expired: 1 % of the ttl, at least 10 ms.
fn margin(ttl: Duration) -> Duration {
    (ttl / 100).max(Duration::from_millis(10))
}

impl Trust {
    /// The trust after a grant whose request was sent at `sent`.
    pub(crate) fn new(sent: Instant, ttl: Duration) -> Self {
        let until = sent + (ttl.saturating_sub(margin(ttl)));
        Self(watch::Sender::new(Belief { until, unreachable: false, lost: None }))
    }

    /// Ends this trust, because the lease is handed to the next holder, and returns the next holder's trust. `None` if
    /// the lease was already lost.
    pub(crate) fn hand_on(&self) -> Option<Self> {
        let mut handed = None;
        // Nobody is told: who waits for a loss waits for ever after a release.
        self.0.send_if_modified(|belief| {
            if belief.settle().is_none() {
                handed = Some(Self(watch::Sender::new(*belief)));
                belief.lost = Some(LossReason::Released);
            }
            false
        });
        handed
    }

    /// Records a renewal whose request was sent at `sent`. Returns `false` if the lease was already lost.
    pub(crate) fn renewed(&self, sent: Instant, ttl: Duration) -> bool {
        let mut held = true;
        self.0.send_modify(|belief| {
            held = belief.settle().is_none();
            if held {
                // Answers can arrive in a different order than their requests.
                belief.until = belief.until.max(sent + ttl.saturating_sub(margin(ttl)));
                belief.unreachable = false;
            }
        });
        held
    }

    /// Records a failed renewal. Its outcome is unknown, so the lease stays trusted until the current trust ends.
    pub(crate) fn unreachable(&self) {
        self.0.send_modify(|belief| belief.unreachable = true);
    }

    /// Records that the store reported the lease as gone, or that the lease was released. The first reason stays.
    pub(crate) fn lose(&self, reason: LossReason) {
        self.0.send_modify(|belief| {
            if belief.settle().is_none() {
                belief.lost = Some(reason);
            }
        });
    }

    /// Records that a successful commit released the lease. It is not a loss if the trust ended while the commit was in
    /// flight: no other holder could take the lease in between.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn committed(&self) {
        self.0.send_modify(|belief| belief.lost = Some(LossReason::Released));
    }

    /// The instant at which the trust ends unless a renewal succeeds.
    pub(crate) fn until(&self) -> Instant {
        self.0.borrow().until
    }

    /// Why the lease is lost. `None` while it is trusted.
    pub(crate) fn lost(&self) -> Option<LossReason> {
        self.0.borrow().clone().settle()
    }

    /// Waits until the lease is lost. Never completes after a release, which is not a loss.
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
