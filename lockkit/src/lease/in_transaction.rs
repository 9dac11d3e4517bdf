//! A lease in a transaction of its own database: verified in it, or ended by its commit.
//!
//! A body whose commit is in flight is not stopped, because a caller that gets `Lost` repeats the work. Until the
//! answer to COMMIT arrives, the end of the trust does not end the body
//! ([`CommitSent`](crate::body::commits::CommitSent)), and the answer decides. Without one the lease is released again,
//! in case the commit did not happen.
//!
//! A commit for which a task of this process waits renews the lease instead of releasing it, and hands it over after
//! the answer. The renewal proves that the lease is held, and locks its row until then.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    body::guard::{Guard, Hold},
    lease::{
        ending::{hand_over_to_first, release_later},
        held::Lease,
        inner::Inner,
        life::{
            keeper::Unfinished,
            kept::{Kept, Wants},
            state::{Effect, Event, Pin, Step},
        },
        queue::Queue,
        store::LeaseStore,
    },
    value::{
        error::{LossReason, Result},
        key::Key,
    },
};

/// Longest time to find out whether the store has a lease that a transaction does not see.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// A lease whose commit is in flight. If this is dropped before the answer, the outcome of the commit is unknown, so
/// the lease is released once more.
pub(crate) struct Committing<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    unfinished: Unfinished,
    step: Step,
    /// The queue whose first waiter gets the lease after the commit.
    queue: Option<Arc<Queue<Lease<S>>>>,
    /// Whether another transaction had pinned the lease before.
    pin: Pin,
}

impl<S: LeaseStore> Lease<S> {
    /// Prepares to end the lease with the commit of a transaction: to hand it over if it is committed alone and
    /// somebody in this process waits for it, otherwise to release it.
    pub(crate) fn begin_commit(&self, alone: bool) -> Guard<Committing<S>> {
        let (kept, inner) = (self.kept.clone(), self.inner.clone());
        let unfinished = inner.keeper.unfinished();
        let suits = |wants: &Wants| alone && inner.hand_over().is_some_and(|it| kept.suits(wants, it));
        let queue = inner.queues.queue_with_waiter(&kept.key, suits);
        let queue = queue.filter(|_| kept.on(Event::Committing(Step::HandsOver)) != Effect::Refuse);
        let hands_over = queue.is_some();
        let mut committing = Committing { kept, inner, unfinished, step: Step::HandsOver, queue, pin: Pin::No };
        if !hands_over {
            committing.release();
        }
        Guard::new(committing)
    }

    /// A transaction may pin the lease from now on, unless it is lost or being released.
    pub(crate) fn verifying(&self) -> Result<()> {
        match self.kept.on(Event::Verifying) {
            Effect::Refuse => Err(self.lost_error(self.kept.lost().unwrap_or(LossReason::Released))),
            _ => Ok(()),
        }
    }

    /// Registers the current runtime, so that it can renew the lease too.
    pub(crate) fn visit(&self) {
        self.inner.keeper.visit();
    }

    /// Whether the store has the lease, for a transaction that does not see it. `false` also if the store does not
    /// answer in time.
    pub(crate) async fn is_in_store(&self) -> bool {
        let Kept { key, token, .. } = &*self.kept;
        // SQLite's calls have no limit of their own, and the transaction may have the only connection.
        let looked = timeout(LOOK_LIMIT, self.inner.store().look(key, LOOK_LIMIT)).await;
        matches!(looked, Ok(Ok(Some(held))) if held.token == *token)
    }

    /// The source of the fences, see [`LeasesBuilder::fence_domain`](crate::lease::LeasesBuilder::fence_domain).
    pub(crate) fn fence_domain(&self) -> &Key {
        &self.inner.fence_domain
    }
}

impl<S: LeaseStore> Committing<S> {
    /// Whether the transaction has to renew the lease, which is handed over after the commit. That renewal extends
    /// nobody's trust: the commit may not be durable yet.
    pub(crate) fn hands_over(&self) -> bool {
        self.step == Step::HandsOver
    }

    /// The transaction will release the lease. A renewal after it finds no lease, which must not be reported as a loss.
    /// No other transaction may pin the lease from now on.
    pub(crate) fn release(&mut self) {
        self.step = Step::Releases;
        self.pin = self.kept.begin_end(Event::Committing(self.step));
        self.inner.keeper.stop_renewing(&self.kept);
    }

    /// The transaction has released the lease. From now on a missing lease is no theft, unless the transaction is
    /// rolled back.
    pub(crate) fn row_released(&mut self) {
        self.step = Step::RowReleased;
        self.kept.on(Event::Committing(self.step));
    }

    /// Whether another transaction had pinned the lease before.
    pub(crate) fn pin(&self) -> Pin {
        self.pin
    }

    /// The commit succeeded. It released the lease, or the lease is handed over now.
    pub(crate) fn committed(committing: Guard<Self>) {
        let Self { kept, inner, queue, step, .. } = &*committing;
        if *step != Step::HandsOver {
            kept.on(Event::Committed);
            inner.queues.released(kept.queue_key());
            committing.defuse();
        } else if queue.as_ref().is_some_and(|it| hand_over_to_first(inner, kept, it, Event::HandingOverCommitted)) {
            committing.defuse();
        } else {
            // The waiter has gone, or the answer took longer than the trust lasts: the lease is released in the
            // background. It is not lost: nobody could take it before the commit.
            kept.on(Event::Committed);
        }
    }

    /// Nothing was committed. The lease stays held, by the caller of the body or until it is dropped.
    pub(crate) fn refused(committing: Guard<Self>) {
        let Self { kept, inner, unfinished, step, .. } = committing.defuse();
        if kept.on(Event::Refused(step)) == Effect::Renew && !inner.keeper.keep(&kept) {
            // The `Leases` were closed in the meantime, and the close did not see this lease.
            kept.on(Event::Closed);
            release_later(inner, kept, unfinished, Vec::new());
        }
    }
}

impl<S: LeaseStore> Hold for Committing<S> {
    fn abandon(self) {
        let Self { kept, inner, unfinished, .. } = self;
        kept.on(Event::Unanswered);
        release_later(inner, kept, unfinished, Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{Instant, sleep};

    use crate::{
        Error, Leases,
        body::commits::{COMMIT_LIMIT, CommitSent},
        testing::MemoryStore,
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
        let committing = lease.begin_commit(true);
        assert!(committing.hands_over());
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
            sleep(2 * COMMIT_LIMIT).await;
            Ok::<_, Error>(())
        });
        ran.await.unwrap();
        drop(leases.lease("k").acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_waits_for_the_answer_to_a_commit_and_not_for_ever() {
        for (answered, limit) in [(Some(COMMIT_LIMIT.saturating_sub(TTL)), COMMIT_LIMIT), (None, COMMIT_LIMIT + TTL)] {
            let (leases, started) = (leases(), Instant::now());
            let body = async |_| {
                let sent = CommitSent::now();
                leases.store().steal("k");
                match answered {
                    Some(answered) => sleep(answered).await,
                    None => pending().await,
                }
                drop(sent);
                pending::<Result<(), Error>>().await
            };
            let ran = timeout(10 * COMMIT_LIMIT, leases.lease("k").run(body)).await;
            let err = ran.expect("the body is stopped").unwrap_err();
            assert_eq!(
                (err.is_lost(), matches!(err, Error::OutcomeUnknown { .. })),
                match answered {
                    Some(_) => (true, false),
                    None => (false, true),
                }
            );
            // The next renewal finds the loss.
            assert!(started.elapsed() >= answered.unwrap_or(COMMIT_LIMIT) && started.elapsed() < limit);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_loss_of_one_of_several_leases_stops_a_body_after_the_commit_of_another() {
        let leases = leases();
        let ran = leases.all(["k", "l"]).run(async |both| {
            both.leases()[1].extend(20 * TTL).await?;
            let committing = both.leases()[0].begin_commit(false);
            let sent = CommitSent::now();
            leases.store().faults().partition();
            sleep(2 * TTL).await;
            leases.store().faults().heal();
            Committing::committed(committing);
            drop(sent);
            leases.store().steal("l");
            pending::<Result<(), Error>>().await
        });
        let err = timeout(COMMIT_LIMIT, ran).await.expect("the body is stopped").unwrap_err();
        assert!(matches!(&err, Error::Lost { key, .. } if key == "l"), "{err:?}");
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
}
