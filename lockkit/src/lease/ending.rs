//! How a lease ends: released by its holder, released in the background on drop, or released by a commit.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::Inner;
use crate::{
    error::{LossReason, Result},
    guard::{Guard, Hold},
    lease::{
        bounded::limit_for,
        held::Lease,
        keeper::Unfinished,
        kept::{Kept, Wants, release_failed},
        lines::Line,
        store::{BUSY_PAUSE, LeaseStore},
    },
};

/// The result of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lease was held until now. It is free.
    WhileHeld,
    /// The lease was already lost. All work since the loss ran without it. The release changed nothing.
    AlreadyLost,
}

/// A lease whose commit is in flight. If this is dropped before the answer, the outcome of the commit is unknown, so
/// the lease is released once more.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) struct Committing<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    unfinished: Unfinished,
    /// The queue of those to whom the lease is handed on after the commit, instead of being released by it.
    line: Option<Arc<Line<Lease<S>>>>,
    /// The transaction has renewed the lease, which is to be handed on.
    renewed: bool,
    /// The transaction has given the lease up.
    gave_up: bool,
    /// Whether another transaction may have pinned the lease before. `None` while the transaction is not about to release it.
    may_be_pinned: Option<bool>,
}

impl<S: LeaseStore> Lease<S> {
    /// Prepares to end the lease with the commit of a transaction: to hand it on if it is committed alone and somebody in
    /// this process waits for it, otherwise to release it.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn begin_commit(&self, alone: bool) -> Guard<Committing<S>> {
        let Self { kept, inner, .. } = self;
        let unfinished = inner.keeper.unfinished();
        let suits = |wants: &Wants| alone && inner.hand_over().is_some_and(|it| kept.suits(wants, it));
        let line = inner.lines.line_with_taker(&kept.key, suits).filter(|_| inner.keeper.commits(kept));
        let (kept, inner) = (kept.clone(), inner.clone());
        let mut committing =
            Committing { kept, inner, unfinished, line, renewed: false, gave_up: false, may_be_pinned: None };
        if !committing.hands_on() {
            committing.end();
        }
        // By the transaction to be committed.
        committing.kept.may_pin();
        Guard::new(committing)
    }
}

impl<S: LeaseStore> Committing<S> {
    /// Whether the lease is to be handed on after the commit.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn hands_on(&self) -> bool {
        self.line.is_some()
    }

    /// The transaction has given the lease up. Who finds no lease from now on does not find a theft, unless it is rolled back.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn set_given_up(&mut self) {
        self.gave_up = true;
        self.kept.set_given_up(true);
    }

    /// The transaction has renewed the lease. That counts for nothing here: the commit may not be durable yet.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn set_renewed(&mut self) {
        self.renewed = true;
    }

    /// The commit will release the lease. A renewal after it finds no lease, which must not be reported as a loss. No other
    /// transaction may pin the lease from now on.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn end(&mut self) {
        self.may_be_pinned = Some(self.inner.keeper.end(&self.kept));
    }

    /// Whether another transaction may have pinned the lease before.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn may_be_pinned(&self) -> bool {
        self.may_be_pinned.unwrap_or(true)
    }

    /// The commit succeeded. It released the lease, or the lease is handed on now.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn committed(committing: Guard<Self>) {
        let Self { kept, inner, line, .. } = &*committing;
        if committing.renewed {
            if line.as_ref().is_some_and(|it| hand_on(inner, kept, it, true)) {
                committing.defuse();
            } else {
                // Who waited has gone, or the answer took longer than the trust lasts: the lease is released in the
                // background. It is not lost: nobody could take it before the commit.
                kept.committed();
            }
            return;
        }
        let Self { kept, inner, .. } = committing.defuse();
        kept.committed();
        inner.lines.given_back(kept.line());
    }

    /// Nothing was committed. The lease stays held, by the caller of the body or until it is dropped.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn refused(committing: Guard<Self>) {
        let Self { kept, inner, unfinished, gave_up, may_be_pinned, .. } = committing.defuse();
        if gave_up {
            kept.set_given_up(false);
        }
        // What was told to the database stays unknown here, so it is never handed on.
        inner.keeper.refused(&kept, may_be_pinned.is_some());
        if kept.lost().is_none() && !inner.keeper.keep(&kept) {
            // The `Leases` were closed in the meantime, and the close did not see this lease.
            kept.lose(LossReason::Closed);
            give_back_later(inner, kept, unfinished, Vec::new());
        }
    }
}

impl<S: LeaseStore> Hold for Committing<S> {
    fn abandon(self) {
        let Self { kept, inner, unfinished, .. } = self;
        kept.lose(LossReason::Released);
        give_back_later(inner, kept, unfinished, Vec::new());
    }
}

impl<S: LeaseStore> Owned<S> {
    /// Hands the lease on instead of releasing it, if somebody in this process waits for it.
    pub(super) fn hand_on(&self) -> bool {
        self.line.as_ref().is_some_and(|line| hand_on(&self.inner, &self.kept, line, false))
    }
}

/// Hands the lease to the first caller who waits for it in this process, with the next fence. Asks no store.
fn hand_on<S: LeaseStore>(
    inner: &Arc<Inner<S>>,
    kept: &Arc<Kept>,
    line: &Arc<Line<Lease<S>>>,
    after_commit: bool,
) -> bool {
    let next = |wants: &Wants| {
        inner.hand_over().filter(|it| kept.suits(wants, *it))?;
        let next = inner.keeper.hand_on(kept, wants, after_commit)?;
        let weak = Arc::downgrade(&next);
        Some((Lease::handed(inner.clone(), next, Some(line.clone())), weak))
    };
    let is_handed_on = line.hand_on(kept, next);
    if is_handed_on {
        kept.tell_of_release();
    }
    is_handed_on
}

/// Releases the lease. Waits for a transaction that pins it.
pub(super) async fn give_back<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) -> Result<Released> {
    let pinned = inner.keeper.end(kept);
    if inner.store().release_now(&kept.release(), pinned, limit_for(kept.ttl())).await? {
        inner.ended(kept);
        return Ok(Released::WhileHeld);
    }
    kept.gone();
    inner.lines.freed(kept.line());
    Ok(Released::AlreadyLost)
}

/// Releases the lease in the background. Retries until the store has answered or the lease has expired. Moves to
/// another runtime if the first one ends.
fn give_back_later<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    kept: Arc<Kept>,
    unfinished: Unfinished,
    mut tried: Vec<runtime::Id>,
) {
    // Without a runtime, the ttl frees the lease.
    let Some(runtime) = inner.keeper.runtime(&tried) else { return };
    tried.push(runtime.id());
    let releasing = Guard::new(Releasing { inner: inner.clone(), kept: kept.clone(), unfinished, tried });
    runtime.spawn(async move {
        loop {
            let released = give_back(&inner, &kept).await;
            if released.is_ok() || Instant::now() >= kept.until() {
                release_failed(released);
                break;
            }
            sleep(retry_pause(kept.ttl())).await;
        }
        drop(releasing.defuse());
    });
}

/// Pause before a release without an answer is retried.
pub(super) fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 10).clamp(BUSY_PAUSE, Duration::from_secs(1))
}

/// A release in the background. If its runtime ends, it continues on another one.
struct Releasing<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    kept: Arc<Kept>,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
}

impl<S: LeaseStore> Hold for Releasing<S> {
    fn abandon(self) {
        let Self { inner, kept, unfinished, tried } = self;
        give_back_later(inner, kept, unfinished, tried);
    }
}

impl<S: LeaseStore> Inner<S> {
    /// Records the release and wakes the queue.
    fn ended(&self, kept: &Kept) {
        self.keeper.forget(kept);
        kept.released();
        self.lines.given_back(kept.line());
    }
}

/// The obligation to release a lease.
pub(super) struct Owned<S: LeaseStore> {
    pub(super) kept: Arc<Kept>,
    pub(super) inner: Arc<Inner<S>>,
    /// The queue of those to whom it may be handed on.
    pub(super) line: Option<Arc<Line<Lease<S>>>>,
}

impl<S: LeaseStore> Hold for Owned<S> {
    fn abandon(self) {
        if self.hand_on() {
            return;
        }
        let Self { kept, inner, line: _ } = self;
        let unfinished = inner.keeper.unfinished();
        inner.keeper.forget(&kept);
        // Nothing to release: the body under the lease or `close` has released it.
        if matches!(kept.lost(), Some(LossReason::Released | LossReason::Closed)) {
            return;
        }
        give_back_later(inner, kept, unfinished, Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Error, LeaseStore, Leases,
        guard::CommitSent,
        testing::{MemoryStore, Operation},
    };

    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    fn leases() -> Leases<MemoryStore> {
        Leases::builder(MemoryStore::new().client()).ttl(TTL).wait(60 * TTL).build().unwrap()
    }

    /// Begins a commit of the lease while somebody waits for it.
    async fn commit_with_a_waiter(
        leases: &Leases<MemoryStore>,
        lease: &Lease<MemoryStore>,
    ) -> Guard<Committing<MemoryStore>> {
        let request = leases.lease("k");
        tokio::spawn(async move { drop(request.acquire().await) });
        sleep(TTL / 1000).await;
        let mut committing = lease.begin_commit(true);
        assert!(committing.hands_on());
        committing.get_mut().set_renewed();
        committing
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_that_outlasts_the_trust_is_no_loss() {
        let leases = leases();
        let ran = leases.lease("k").run(async |lease| {
            let committing = commit_with_a_waiter(&leases, &lease).await;
            let sent = CommitSent::now();
            leases.store().faults().partition();
            sleep(2 * TTL).await;
            leases.store().faults().heal();
            Committing::committed(committing);
            drop(sent);
            Ok::<_, Error>(())
        });
        ran.await.unwrap();
        drop(leases.lease("k").acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_whose_commit_was_refused_is_closed_with_the_others() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        Committing::refused(commit_with_a_waiter(&leases, &lease).await);
        assert!(lease.is_trusted());
        leases.close().await.unwrap();
        assert!(!lease.is_trusted());
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn close_leaves_the_lease_of_a_commit_in_flight_to_the_commit_and_waits_for_it() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        let committing = commit_with_a_waiter(&leases, &lease).await;
        let closing = tokio::spawn({
            let leases = leases.clone();
            async move { leases.close().await }
        });
        sleep(TTL / 2).await;
        assert!(lease.is_trusted() && !closing.is_finished());
        Committing::committed(committing);
        closing.await.unwrap().unwrap();
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_of_a_lease_that_the_caller_awaits() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        leases.store().faults().slow(TTL / 10);
        let releasing = tokio::spawn(lease.release());
        tokio::task::yield_now().await;
        leases.close().await.unwrap();
        leases.store().faults().heal();
        assert_eq!(leases.show("k").await.unwrap(), None);
        assert_eq!(releasing.await.unwrap().unwrap(), Released::WhileHeld);
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_after_a_body() {
        let leases = leases();
        let running = tokio::spawn({
            let leases = leases.clone();
            async move {
                let body = async |_| {
                    leases.store().faults().slow(TTL / 10);
                    Ok::<_, Error>(())
                };
                leases.lease("k").run(body).await
            }
        });
        while leases.store().faults().calls(Operation::Release) == 0 {
            tokio::task::yield_now().await;
        }
        leases.close().await.unwrap();
        leases.store().faults().heal();
        assert_eq!(leases.show("k").await.unwrap(), None);
        running.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn close_waits_for_the_release_of_the_ticket_and_the_gate_of_a_request_that_gave_up() {
        let store = MemoryStore::new();
        let here = Leases::new(store.client());
        let _held = (here.lease("k").acquire().await.unwrap(), here.rw("k").read().acquire().await.unwrap());
        for writes in [false, true] {
            let leases = Leases::builder(store.client()).wait(TTL).build().unwrap();
            let request = if writes { leases.rw("k").write() } else { leases.lease("k") };
            let waiting = tokio::spawn(request.acquire());
            sleep(TTL * 999 / 1000).await;
            let before = store.lease_list("k/", 100).await.unwrap().len();
            leases.store().faults().slow(TTL / 10);
            let released = leases.store().faults().calls(Operation::Release);
            while leases.store().faults().calls(Operation::Release) == released {
                sleep(Duration::from_micros(100)).await;
            }
            leases.close().await.unwrap();
            let after = store.lease_list("k/", 100).await.unwrap().len();
            assert_eq!((before, after), (2, 1), "the read lease alone is left");
            assert!(waiting.await.unwrap().is_err());
        }
    }
}
