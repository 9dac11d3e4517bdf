//! One lease of this process: its grant, its trust, and how it is renewed and released.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    error::{LossReason, Result},
    key::Key,
    lease::{
        store::{Claim, Grant, Release, Renewal, Token},
        trust::Trust,
    },
    observe::{self, Strategy},
    policy::OnLost,
};

/// One lease of this process: its grant and its trust.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) grant: Grant,
    trust: Trust,
    granted: Instant,
    pub(crate) terms: Terms,
    ttl: Mutex<Duration>,
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pinned: AtomicBool,
    /// The lease was returned to the caller. Before that, the request may still wait for other leases, or be dropped
    /// together with this one.
    handed_out: AtomicBool,
    /// The lease is released only when the body that runs under it ends.
    ends_with_body: AtomicBool,
    /// The end of the lease was reported.
    told: AtomicBool,
}

/// How a lease is renewed and released.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) renew_every: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) on_lost: OnLost,
    /// The queue that a release of this lease wakes. `None` for the queue of the lease's own key.
    pub(crate) line: Option<Key>,
}

impl Kept {
    /// `sent` is the time at which the claim was sent.
    pub(crate) fn new(claim: Claim, grant: Grant, sent: Instant, terms: Terms) -> Self {
        let Claim { key, token, ttl, .. } = claim;
        let ttl = grant.ttl.map_or(ttl, |it| it.min(ttl));
        Self {
            key,
            token,
            grant,
            trust: Trust::new(sent, ttl),
            granted: Instant::now(),
            terms,
            ttl: Mutex::new(ttl),
            pinned: AtomicBool::new(false),
            handed_out: AtomicBool::new(false),
            ends_with_body: AtomicBool::new(false),
            told: AtomicBool::new(false),
        }
    }

    /// The queue that a release of this lease wakes.
    pub(crate) fn line(&self) -> &Key {
        self.terms.line.as_ref().unwrap_or(&self.key)
    }

    pub(crate) fn ttl(&self) -> Duration {
        *lock(&self.ttl)
    }

    /// Sets the ttl of all later renewals.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        *lock(&self.ttl) = ttl;
    }

    /// Records that a transaction of this process locked the lease's row, so no other process could take the lease.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    /// Records that the caller has the lease.
    pub(crate) fn hand_out(&self) {
        self.handed_out.store(true, Ordering::Relaxed);
    }

    pub(crate) fn set_ends_with_body(&self) {
        self.ends_with_body.store(true, Ordering::Relaxed);
    }

    pub(crate) fn ends_with_body(&self) -> bool {
        self.ends_with_body.load(Ordering::Relaxed)
    }

    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// The instant at which the trust ends unless a renewal succeeds.
    pub(crate) fn until(&self) -> Instant {
        self.trust.until()
    }

    /// Whether the lease is lost. Does not report the loss.
    pub(crate) fn is_lost(&self) -> bool {
        self.trust.lost().is_some()
    }

    /// Why the lease is lost. `None` while it is trusted. The first call that sees the loss reports it.
    pub(crate) fn lost(&self) -> Option<LossReason> {
        let lost = self.trust.lost();
        if let Some(reason) = lost
            && !matches!(reason, LossReason::Released | LossReason::Closed)
            && !self.told.swap(true, Ordering::Relaxed)
        {
            observe::lost(Strategy::Lease, &self.key, Some(self.grant.fence), self.granted.elapsed(), reason);
        }
        lost
    }

    /// Records that the store reported the lease as gone, or that the lease was released. The first reason stays.
    pub(crate) fn lose(&self, reason: LossReason) {
        self.trust.lose(reason);
        self.lost();
    }

    /// Waits until the lease is lost. Never completes after a release, which is not a loss.
    pub(crate) async fn wait_until_lost(&self) -> LossReason {
        let reason = self.trust.wait_until_lost().await;
        self.lost();
        reason
    }

    /// Records a renewal whose request was sent at `sent`. Returns `false` if the lease was already lost.
    pub(crate) fn renewed(&self, sent: Instant, ttl: Duration) -> bool {
        self.trust.renewed(sent, ttl)
    }

    /// Records a failed renewal. Its outcome is unknown, so the lease stays trusted until the current trust ends.
    pub(crate) fn unreachable(&self) {
        self.trust.unreachable();
    }

    /// Records a release while the lease was held.
    pub(crate) fn released(&self) {
        self.trust.lose(LossReason::Released);
        self.tell_of_release();
    }

    /// Records that a successful commit released the lease, however long the answer took.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn committed(&self) {
        self.trust.committed();
        self.tell_of_release();
    }

    fn tell_of_release(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            observe::released(Strategy::Lease, &self.key, self.grant.fence, self.granted.elapsed());
        }
    }

    pub(crate) fn renewal(&self) -> Renewal {
        Renewal { key: self.key.clone(), token: self.token, ttl: self.ttl() }
    }

    pub(crate) fn release(&self) -> Release {
        // No work was done under a lease that the caller never got, so `min_hold` does not apply.
        let is_handed_out = self.handed_out.load(Ordering::Relaxed);
        let min_hold = if is_handed_out { self.terms.min_hold } else { Duration::ZERO };
        Release { key: self.key.clone(), token: self.token, min_hold }
    }

    /// Pause until the next renewal: a third of the ttl, so two retries fit before expiry.
    pub(crate) fn pause(&self) -> Duration {
        let third = self.ttl() / 3;
        self.terms.renew_every.map_or(third, |it| it.min(third))
    }
}

/// Logs a failed release. The ttl frees the lease, and no caller waits for the error.
pub(crate) fn release_failed<T>(released: Result<T>) {
    if let Err(err) = released {
        observe::tolerated("releasing a lease, which its ttl will free", &err);
    }
}

/// Ignores poisoning: no code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
