//! One lease of this process: what was granted, and what becomes of it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::{
    lease::store::{Claim, Grant, Release, Renewal},
    mutex::Mutex,
    observe::{self, Gauged, Strategy},
    policy::OnLost,
    value::{
        error::{LossReason, Result},
        fence::Fence,
        key::Key,
        token::Token,
    },
};

use super::{
    calls::{Call, OpenCalls},
    state::{Effect, Event, Life, Pin},
};

/// One lease of this process.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) grant: Grant,
    pub(crate) terms: Terms,
    granted: Instant,
    run: Run,
    life: watch::Sender<Life>,
    calls: Arc<OpenCalls>,
    /// Counts the lease as held: from its delivery until its end is reported.
    held: Mutex<Option<Gauged>>,
}

/// The holders that one grant of the store has had.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// When the claim was sent.
    since: Instant,
    /// The ttl of the claim.
    ttl: Duration,
    /// How often the lease was handed over.
    passes: u32,
}

/// How a lease is renewed and released.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) renew_every: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) on_lost: OnLost,
    pub(crate) waiters: Waiters,
}

/// The queue of this process that a release of the lease wakes.
#[derive(Debug, Clone)]
pub(crate) enum Waiters {
    /// That of its key, whose first caller it may be handed over to.
    OfKey,
    /// That of its key, to whose callers it is not handed over: it is one of several, fair, or a ticket.
    OfKeyByStore,
    /// The one with this key: it is a permit, a read lease or a write lease.
    Of(Key),
}

/// How long the holders of one process may hand a lease over while other processes wait for it.
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

impl Waiters {
    /// The key of the queue, for a lease of this key.
    pub(crate) fn queue_key<'k>(&'k self, key: &'k Key) -> &'k Key {
        if let Self::Of(queue) = self { queue } else { key }
    }
}

impl Kept {
    /// `called` is the time at which the store was called.
    pub(crate) fn new(claim: Claim, grant: Grant, called: Instant, terms: Terms) -> Self {
        let Claim { key, token, ttl, .. } = claim;
        let sent = grant.since(called);
        let run = Run { since: sent, ttl, passes: 0 };
        let life = Life::new(sent, grant.ttl.map_or(ttl, |it| it.min(ttl)));
        Self {
            key,
            token,
            grant,
            terms,
            granted: Instant::now(),
            run,
            life: watch::Sender::new(life),
            calls: Arc::default(),
            held: Mutex::default(),
        }
    }

    /// The lease is returned to the caller.
    pub(crate) fn deliver(&self) {
        *self.held.lock() = Some(observe::held(Strategy::Lease, &self.key));
        self.on(Event::Delivered);
    }

    /// Tells the lease what has happened, and reports its end.
    pub(crate) fn on(&self, event: Event) -> Effect {
        let mut due = None;
        let effect = self.change(|life| {
            let effect = life.on(Instant::now(), event);
            due = life.take_report();
            effect
        });
        self.send_report(due);
        effect
    }

    /// [`on`](Self::on) for the beginning of a release. Returns whether a transaction may have pinned the lease before.
    pub(crate) fn begin_end(&self, event: Event) -> Pin {
        match self.on(event) {
            Effect::Release(pin) => pin,
            other => unreachable!("BUG: a release was answered with {other:?}"),
        }
    }

    /// As [`on`](Self::on), for callers that hold a mutex: a report runs code of the application.
    pub(super) fn on_unreported(&self, event: Event) -> Effect {
        self.change(|life| life.on(Instant::now(), event))
    }

    /// Reports the end of the lease, unless it was reported.
    pub(crate) fn report(&self) {
        let mut due = None;
        self.life.send_if_modified(|life| {
            due = life.take_report();
            false
        });
        self.send_report(due);
    }

    fn change(&self, change: impl FnOnce(&mut Life) -> Effect) -> Effect {
        let mut effect = Effect::Nothing;
        self.life.send_if_modified(|life| {
            let was_over = life.is_over();
            effect = change(life);
            // A release is no loss.
            !was_over && life.is_over() && life.lost(Instant::now()) != Some(LossReason::Released)
        });
        effect
    }

    fn send_report(&self, due: Option<LossReason>) {
        // Dropped when the mutex is unlocked: it runs code of the application.
        let _held = if due.is_some() { self.held.lock().take() } else { None };
        match due {
            None => {}
            Some(LossReason::Released) => {
                observe::released(Strategy::Lease, &self.key, self.grant.fence, self.granted.elapsed());
            }
            Some(reason) => {
                observe::lost(Strategy::Lease, &self.key, Some(self.grant.fence), self.granted.elapsed(), reason);
            }
        }
    }

    /// The key of the queue that a release of this lease wakes.
    pub(crate) fn queue_key(&self) -> &Key {
        self.terms.waiters.queue_key(&self.key)
    }

    /// The ttl of later renewals.
    pub(crate) fn ttl(&self) -> Duration {
        self.life.borrow().ttl()
    }

    /// The instant at which the trust ends unless a renewal succeeds.
    pub(crate) fn until(&self) -> Instant {
        self.life.borrow().until()
    }

    /// Whether the lease is lost. Does not report the loss.
    pub(crate) fn is_lost(&self) -> bool {
        self.life.borrow().lost(Instant::now()).is_some()
    }

    /// Why the lease is lost. `None` while it is trusted. The first call that sees the loss reports it.
    pub(crate) fn lost(&self) -> Option<LossReason> {
        let lost = self.life.borrow().lost(Instant::now());
        if lost.is_some() {
            self.on(Event::Elapsed);
        }
        lost
    }

    /// Waits until the lease is lost. Never completes after a release, which is not a loss.
    pub(crate) async fn wait_until_lost(&self) -> LossReason {
        let mut changes = self.life.subscribe();
        loop {
            let (until, lost) = {
                let life = changes.borrow_and_update();
                (life.until(), life.lost(Instant::now()))
            };
            match lost {
                Some(LossReason::Released) => return std::future::pending().await,
                Some(reason) => {
                    self.on(Event::Elapsed);
                    return reason;
                }
                None => {}
            }
            tokio::select! {
                biased;
                () = sleep_until(until) => {}
                _ = changes.changed() => {}
            }
        }
    }

    pub(crate) fn renewal(&self) -> Renewal {
        Renewal { key: self.key.clone(), token: self.token, ttl: self.ttl() }
    }

    pub(crate) fn release(&self) -> Release {
        // No work was done under a lease that the caller never got, so `min_hold` does not apply.
        let min_hold = if self.is_delivered() { self.min_hold() } else { Duration::ZERO };
        Release { key: self.key.clone(), token: self.token, min_hold }
    }

    /// Whether a transaction has pinned it, or may have.
    pub(crate) fn is_pinned(&self) -> bool {
        self.life.borrow().is_pinned()
    }

    /// A call that locks its row is sent now.
    pub(crate) fn asks(&self) -> Call {
        self.calls.send()
    }

    /// That call is over.
    pub(crate) fn answered(&self, call: Call) {
        self.calls.answered(call);
    }

    /// That call is over, and had the row locked.
    pub(crate) fn had_the_row(&self, call: Call) {
        self.calls.had_the_row(call);
    }

    /// The store has released it.
    pub(crate) fn released(&self) {
        self.on(Event::Released);
        self.calls.end();
    }

    /// Whether a call may still have its row locked, of which nothing was heard.
    pub(crate) fn is_open(&self) -> bool {
        self.calls.are_open()
    }

    /// Since when it is lost, if a call or a transaction of this process may have its row locked.
    pub(crate) fn lost_and_locked(&self) -> Option<Instant> {
        let lost = self.life.borrow().lost_since(Instant::now());
        lost.filter(|_| self.is_open() || self.is_pinned())
    }

    /// Whether the caller has got it.
    pub(crate) fn is_delivered(&self) -> bool {
        self.life.borrow().is_delivered()
    }

    /// The minimum hold, as the store counts it: from its grant, which may be that of an earlier holder.
    pub(crate) fn min_hold(&self) -> Duration {
        match self.terms.min_hold {
            Duration::ZERO => Duration::ZERO,
            min_hold if self.run.passes == 0 => min_hold,
            min_hold => min_hold + (self.granted - self.run.since),
        }
    }

    /// Whether it may ever be handed over to a caller of this process.
    pub(crate) fn may_be_handed_over(&self) -> bool {
        matches!(self.terms.waiters, Waiters::OfKey)
    }

    /// Whether the lease may be handed to a caller of this process who wants this, instead of being released: other
    /// processes have waited for it no longer than `hand_over` allows, and for half of the ttl at most.
    pub(crate) fn suits(&self, wants: &Wants, hand_over: HandOver) -> bool {
        let Run { since, ttl, passes } = self.run;
        let now = Instant::now();
        let life = self.life.borrow();
        let min_hold = if life.is_delivered() { self.terms.min_hold } else { Duration::ZERO };
        self.may_be_handed_over()
            && (passes < hand_over.times || now < since + hand_over.at_least)
            && self.grant.spare_fences > 0
            && wants.ttl == ttl
            && life.ttl() == self.grant.ttl.map_or(ttl, |it| it.min(ttl))
            && now < since + ttl / 2
            && now >= self.granted + min_hold
            && life.until() > now + life.ttl() / 3
    }

    /// The lease of the next holder, whom it [`suits`](Self::suits), with the next fence.
    pub(super) fn next(&self, life: Life, wants: &Wants) -> Self {
        let Grant { fence, spare_fences, previous: _, ttl, sent: _ } = self.grant;
        let mut grant = Grant::from(Fence::from(fence.get() + 1));
        (grant.spare_fences, grant.ttl) = (spare_fences - 1, ttl);
        Self {
            key: self.key.clone(),
            token: self.token,
            grant,
            terms: wants.terms.clone(),
            granted: Instant::now(),
            run: Run { passes: self.run.passes + 1, ..self.run },
            life: watch::Sender::new(life),
            calls: self.calls.clone(),
            held: Mutex::default(),
        }
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

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use crate::{
        Leases,
        testing::{Failure, MemoryStore, Operation},
    };

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn kept() -> Kept {
        let claim = Claim::new("k", Token::random(), "holder", TTL);
        let terms =
            Terms { renew_every: None, min_hold: Duration::ZERO, on_lost: OnLost::Stop, waiters: Waiters::OfKey };
        Kept::new(claim, Grant::from(Fence::from(1)), Instant::now(), terms)
    }

    #[tokio::test(start_paused = true)]
    async fn lost_completes_when_the_trust_ends_and_not_before() {
        let (kept, begun) = (kept(), Instant::now());
        kept.on(Event::Silent);
        assert_eq!(kept.wait_until_lost().await, LossReason::Unreachable);
        assert!(Instant::now() >= kept.until() && begun.elapsed() < TTL);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_completes_at_a_theft_and_waits_longer_after_a_renewal() {
        let kept = kept();
        let lost = kept.wait_until_lost();
        tokio::pin!(lost);
        assert!(timeout(TTL / 2, &mut lost).await.is_err());
        kept.on(Event::Renewed { sent: Instant::now(), ttl: TTL });
        assert!(timeout(TTL * 3 / 4, &mut lost).await.is_err());
        kept.on(Event::Stolen);
        assert_eq!(timeout(Duration::ZERO, lost).await, Ok(LossReason::Stolen));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_and_an_extension_count_from_when_they_were_sent() {
        const SLOW: Duration = Duration::from_millis(400);
        let leases = Leases::builder(MemoryStore::new()).ttl(TTL).build().unwrap();
        let faults = leases.store().faults();
        let lease = leases.lease("k").acquire().await.unwrap();
        faults.script(Operation::Renew, [Failure::Slow(SLOW)]);
        let sent = Instant::now();
        lease.extend(2 * TTL).await.unwrap();
        assert!(lease.kept.until() <= sent + 2 * TTL);
        drop(lease);

        let lease = leases.lease("l").acquire().await.unwrap();
        faults.script(Operation::Renew, [Failure::Slow(SLOW)]);
        let before = faults.calls(Operation::Renew);
        while faults.calls(Operation::Renew) == before {
            sleep_until(Instant::now() + SLOW / 100).await;
        }
        let (sent, until) = (Instant::now(), lease.kept.until());
        sleep_until(sent + SLOW + SLOW / 100).await;
        assert!(lease.kept.until() > until && lease.kept.until() <= sent + TTL);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_never_completes_after_a_release() {
        let kept = kept();
        let lost = kept.wait_until_lost();
        tokio::pin!(lost);
        assert!(timeout(TTL / 2, &mut lost).await.is_err());
        kept.on(Event::Released);
        assert!(timeout(2 * TTL, lost).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_handed_over_while_more_than_a_third_of_its_ttl_is_left() {
        let claim = Claim::new("k", Token::random(), "holder", TTL);
        let terms = kept().terms;
        let mut grant = Grant::from(Fence::from(1));
        // The store has granted less than was asked for.
        (grant.spare_fences, grant.ttl) = (1, Some(TTL / 4));
        let kept = Kept::new(claim, grant, Instant::now(), terms.clone());
        let suits =
            || kept.suits(&Wants { ttl: TTL, terms: terms.clone() }, HandOver { times: 1, at_least: Duration::ZERO });
        sleep_until(kept.granted + TTL * 16 / 100).await;
        assert!(suits());
        sleep_until(kept.granted + TTL * 17 / 100).await;
        assert!(!suits() && !kept.is_lost());
    }

    #[tokio::test(start_paused = true)]
    async fn min_hold_counts_from_the_grant_of_the_store() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        // Granted after a second, which is known after another.
        here.store().faults().script(Operation::Acquire, [Failure::Slow(TTL / 5)]);
        let asked = Instant::now();
        let lease = here.lease("k").min_hold(TTL).acquire().await.unwrap();
        lease.release().await.unwrap();
        let _next = there.lease("k").acquire().await.unwrap();
        let taken = asked.elapsed();
        assert!(taken >= TTL * 11 / 10 && taken < TTL * 115 / 100, "{taken:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_its_caller_never_got_is_free_before_its_min_hold() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        here.store().faults().script(Operation::Acquire, [Failure::Slow(TTL / 5)]);
        assert!(timeout(TTL / 10, here.lease("k").min_hold(TTL).acquire()).await.is_err());
        let _next = timeout(TTL / 2, there.lease("k").acquire()).await.unwrap().unwrap();
    }
}
