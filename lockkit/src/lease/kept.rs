//! One lease of this process: what the store granted, what the process believes of it, and how it is to be kept.

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

/// One lease of this process: what the store granted, and what the process believes.
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
    /// The caller has it. Its request may wait for more than this lease, or be dropped with it.
    handed_out: AtomicBool,
    /// Only the end of the body that runs under it gives it back.
    ends_with_body: AtomicBool,
    /// The loss was told, or there is none to tell.
    told: AtomicBool,
}

/// How a lease is to be kept and given back.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) renew_every: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) on_lost: OnLost,
    /// The waiting line of the requests for what this lease is a part of; `None` for that of its own key.
    pub(crate) line: Option<Key>,
}

impl Kept {
    /// `sent` is when the claim was sent.
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

    /// The waiting line of the requests that may go on when the lease is given back.
    pub(crate) fn line(&self) -> &Key {
        self.terms.line.as_ref().unwrap_or(&self.key)
    }

    pub(crate) fn ttl(&self) -> Duration {
        *lock(&self.ttl)
    }

    /// What every renewal from now on asks for.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        *lock(&self.ttl) = ttl;
    }

    /// A transaction of this process has kept everybody else from taking the lease.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    /// The caller has it from now on.
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

    /// Until when the lease is trusted if nothing more is heard.
    pub(crate) fn until(&self) -> Instant {
        self.trust.until()
    }

    /// Whether the lease is lost, without telling of it.
    pub(crate) fn is_lost(&self) -> bool {
        self.trust.lost().is_some()
    }

    /// Why the lease is lost, if it is. Whoever sees a loss first tells of it.
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

    /// The store says that the lease is gone, or it was given back. The first reason stays.
    pub(crate) fn lose(&self, reason: LossReason) {
        self.trust.lose(reason);
        self.lost();
    }

    /// Waits until the lease is lost. Giving it back is not losing it.
    pub(crate) async fn wait_until_lost(&self) -> LossReason {
        let reason = self.trust.wait_until_lost().await;
        self.lost();
        reason
    }

    /// The lease was renewed by a request sent at `sent`. `false` when it had been lost before that.
    pub(crate) fn renewed(&self, sent: Instant, ttl: Duration) -> bool {
        self.trust.renewed(sent, ttl)
    }

    /// A renewal failed: unknown, so the trust that is left goes on.
    pub(crate) fn unreachable(&self) {
        self.trust.unreachable();
    }

    /// The lease was given back in good order.
    pub(crate) fn released(&self) {
        self.trust.lose(LossReason::Released);
        self.tell_of_release();
    }

    /// The lease was given up by a commit that succeeded, however long the answer took.
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
        // Nobody has worked under a lease whose request gave up, or was dropped.
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

/// A lease that cannot be given back is freed by its ttl; nobody waits for the error.
pub(crate) fn release_failed<T>(released: Result<T>) {
    if let Err(err) = released {
        observe::tolerated("releasing a lease, which its ttl will free", &err);
    }
}

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
