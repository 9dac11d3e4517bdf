//! One lease of this process: its grant, its trust, and how it is renewed and released.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    error::{LossReason, Result},
    fence::Fence,
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
    run: Run,
    pub(crate) terms: Terms,
    ttl: Mutex<Duration>,
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pinned: AtomicBool,
    /// The lease ends in the store and is not handed on: it may be pinned, committed or released by now. Written under the
    /// mutex of the keeper, under which it is handed on.
    stays: AtomicBool,
    /// A transaction of this process may have locked the lease's row. Written before it does, as `stays` is.
    may_be_pinned: AtomicBool,
    /// How many are about to release the lease. While there are any, no transaction may pin it. Written as `stays` is.
    enders: AtomicU32,
    /// A transaction of this process has given the lease up, and was not refused.
    given_up: AtomicBool,
    /// A commit that may hand the lease on is in flight. Nothing else hands it on. Written as `stays` is.
    commits: AtomicBool,
    /// The lease was returned to the caller. Before that, the request may still wait for other leases, or be dropped
    /// together with this one.
    handed_out: AtomicBool,
    /// The lease is released only when the body that runs under it ends.
    ends_with_body: AtomicBool,
    /// The end of the lease was reported.
    told: AtomicBool,
}

/// The holders that one grant of the store has had.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// When the claim was sent.
    since: Instant,
    /// The ttl of the claim.
    ttl: Duration,
    /// How often the lease was handed on.
    passes: u32,
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

/// How long the holders of one process may hand a lease on while other processes wait for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandOver {
    /// How often.
    pub(crate) times: u32,
    /// For how long in any case.
    pub(crate) at_least: Duration,
}

/// The lease that a caller takes from a holder of its process.
#[derive(Debug, Clone)]
pub(crate) struct Wants {
    pub(crate) ttl: Duration,
    pub(crate) terms: Terms,
}

impl Kept {
    /// `sent` is the time at which the claim was sent.
    pub(crate) fn new(claim: Claim, grant: Grant, sent: Instant, terms: Terms) -> Self {
        let Claim { key, token, ttl, .. } = claim;
        let run = Run { since: sent, ttl, passes: 0 };
        let ttl = grant.ttl.map_or(ttl, |it| it.min(ttl));
        Self {
            key,
            token,
            grant,
            trust: Trust::new(sent, ttl),
            granted: Instant::now(),
            run,
            terms,
            ttl: Mutex::new(ttl),
            pinned: AtomicBool::new(false),
            stays: AtomicBool::new(false),
            may_be_pinned: AtomicBool::new(false),
            enders: AtomicU32::new(0),
            given_up: AtomicBool::new(false),
            commits: AtomicBool::new(false),
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

    /// Whether the caller has the lease. A ticket, or a lease that was granted on the way to another one, is no caller's, and
    /// is not reported.
    fn is_handed_out(&self) -> bool {
        self.handed_out.load(Ordering::Relaxed)
    }

    pub(crate) fn set_ends_with_body(&self) {
        self.ends_with_body.store(true, Ordering::Relaxed);
    }

    pub(crate) fn ends_with_body(&self) -> bool {
        self.ends_with_body.load(Ordering::Relaxed)
    }

    /// Notes that the lease is not handed on any more.
    pub(crate) fn stay(&self) {
        self.stays.store(true, Ordering::Relaxed);
    }

    /// Notes that a transaction may lock the lease's row from now on. Returns `false` if the lease is being released already.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn may_pin(&self) -> bool {
        self.may_be_pinned.store(true, Ordering::Relaxed);
        self.enders.load(Ordering::Relaxed) == 0
    }

    /// Notes that somebody is about to release the lease. Returns whether a transaction may have pinned it.
    pub(crate) fn end(&self) -> bool {
        self.enders.fetch_add(1, Ordering::Relaxed);
        self.may_be_pinned.load(Ordering::Relaxed)
    }

    /// Takes back an [`end`](Self::end): the lease was not released.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn goes_on(&self) {
        self.enders.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn stays(&self) -> bool {
        self.stays.load(Ordering::Relaxed)
    }

    /// Notes that a commit is in flight after which the lease may be handed on.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn set_commits(&self, commits: bool) {
        self.commits.store(commits, Ordering::Relaxed);
    }

    pub(crate) fn commits(&self) -> bool {
        self.commits.load(Ordering::Relaxed)
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
            && self.is_handed_out()
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

    /// Records that the store does not have the lease any more: it was taken, unless a commit of this process gave it up whose
    /// answer is on its way.
    pub(crate) fn gone(&self) {
        let given_up = self.given_up.load(Ordering::Relaxed);
        self.lose(if given_up { LossReason::Released } else { LossReason::Stolen });
    }

    /// Records whether a transaction of this process gives the lease up. While it is open it has the lease's row locked.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn set_given_up(&self, given_up: bool) {
        self.given_up.store(given_up, Ordering::Relaxed);
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

    /// Reports the release, if it was not reported before.
    pub(crate) fn tell_of_release(&self) {
        if self.is_handed_out() && !self.told.swap(true, Ordering::Relaxed) {
            observe::released(Strategy::Lease, &self.key, self.grant.fence, self.granted.elapsed());
        }
    }

    pub(crate) fn renewal(&self) -> Renewal {
        Renewal { key: self.key.clone(), token: self.token, ttl: self.ttl() }
    }

    pub(crate) fn release(&self) -> Release {
        // No work was done under a lease that the caller never got, so `min_hold` does not apply.
        let min_hold = if self.is_handed_out() { self.min_hold() } else { Duration::ZERO };
        Release { key: self.key.clone(), token: self.token, min_hold }
    }

    /// The minimum hold, as the store counts it: from its grant, which may be that of an earlier holder.
    pub(crate) fn min_hold(&self) -> Duration {
        match self.terms.min_hold {
            Duration::ZERO => Duration::ZERO,
            min_hold if self.run.passes == 0 => min_hold,
            min_hold => min_hold + (self.granted - self.run.since),
        }
    }

    /// Whether those who wait in the queue of its key wait for this lease alone.
    pub(crate) fn is_of_queue(&self) -> bool {
        self.terms.line.as_ref() == Some(&self.key)
    }

    /// Whether the lease may be handed to a caller of this process who wants this, instead of being released: other
    /// processes have waited for it no longer than `hand_over` allows, and for half of the ttl at most.
    pub(crate) fn suits(&self, wants: &Wants, hand_over: HandOver) -> bool {
        let Run { since, ttl, passes } = self.run;
        let now = Instant::now();
        let min_hold = if self.is_handed_out() { self.terms.min_hold } else { Duration::ZERO };
        self.is_of_queue()
            && (passes < hand_over.times || now < since + hand_over.at_least)
            && self.grant.spare_fences > 0
            && wants.ttl == ttl
            && self.ttl() == self.grant.ttl.map_or(ttl, |it| it.min(ttl))
            && now < since + ttl / 2
            && now >= self.granted + min_hold
            && self.until() > now + self.ttl() / 3
    }

    /// Ends this lease and returns that of the next holder, with the next fence. `None` if it was lost.
    pub(crate) fn hand_on(&self, wants: &Wants) -> Option<Self> {
        let Grant { fence, spare_fences, previous: _, ttl } = self.grant;
        let mut grant = Grant::from(Fence::from(fence.get() + 1));
        (grant.spare_fences, grant.ttl) = (spare_fences.checked_sub(1)?, ttl);
        let trust = self.trust.hand_on()?;
        Some(Self {
            key: self.key.clone(),
            token: self.token,
            grant,
            trust,
            granted: Instant::now(),
            run: Run { passes: self.run.passes + 1, ..self.run },
            terms: wants.terms.clone(),
            ttl: Mutex::new(self.ttl()),
            pinned: AtomicBool::new(false),
            stays: AtomicBool::new(false),
            may_be_pinned: AtomicBool::new(false),
            enders: AtomicU32::new(0),
            given_up: AtomicBool::new(false),
            commits: AtomicBool::new(false),
            handed_out: AtomicBool::new(false),
            ends_with_body: AtomicBool::new(false),
            told: AtomicBool::new(false),
        })
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
