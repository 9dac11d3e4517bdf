//! A lease in a transaction of its own database: verified in it, or ended by its commit.
//!
//! A body whose commit is in flight is not stopped, because a caller that gets `Lost` repeats the work. Until the
//! answer to COMMIT arrives, the end of the trust does not end the body
//! ([`CommitSent`](crate::body::commits::CommitSent)), and the answer decides. Without one the lease is released again,
//! in case the commit did not happen.
//!
//! A commit for which a task of this process waits renews the lease instead of releasing it, and hands it over after
//! the answer. The renewal proves that the lease is held, and locks its row until then.
//!
//! Before a loss is reported, the lease is looked up in its store, for 1 s at most: if it is held there by this token,
//! the transaction is of another database (`InvalidOption`). The identity of a server would not do: it changes with a
//! failover, and a restored copy has the same. A commit rolls back first, since in a pool of one the transaction has
//! the only connection.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    body::{
        guard::{Guard, Hold},
        task::{is_answered, no_answer, timed_out},
    },
    lease::{
        ending::{hand_over_to_first, release_later},
        held::Lease,
        inner::Inner,
        life::{
            calls::Call,
            keeper::Unfinished,
            kept::{Kept, Wants},
            state::{Effect, Event, Pin, Step},
        },
        queue::Queue,
        store::{Answer, LeaseStore, Release, Renewal},
    },
    value::{
        error::{Error, LossReason, Result},
        key::Key,
    },
};

/// What a commit does, for errors.
pub(crate) const COMMITTING: &str = "committing with lease";

/// Lower and upper limit of the time for a commit; between them the limit is the lease's ttl.
const LEAST_COMMIT: Duration = Duration::from_secs(5);
const MOST_COMMIT: Duration = Duration::from_secs(30);

/// Longest time to find out whether the store has a lease that a transaction does not see.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// A transaction in the store of the leases, for the commit that ends them.
#[allow(unreachable_pub, reason = "a simulation has a transaction of its own")]
pub trait LeaseTx: Send {
    /// Fails when the store has already ended the transaction, unless the next operation fails then anyway.
    fn check_open(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Renews the lease, which nobody else can take until the transaction ends.
    fn renew(&mut self, renewal: &Renewal) -> impl Future<Output = Result<Answer>> + Send;

    /// Releases the lease with the commit. Returns `false` if the token does not hold it, where an expired lease is
    /// held if a transaction pins it for certain.
    fn release(&mut self, release: &Release, pin: Pin) -> impl Future<Output = Result<bool>> + Send;

    /// Commits the transaction, which was found open and in which nothing failed since.
    fn commit(self) -> impl Future<Output = Result<()>> + Send;

    /// Rolls back. Returns whether it did in time.
    fn roll_back(self) -> impl Future<Output = bool> + Send;
}

/// A lease whose commit is in flight. If this is dropped before the answer, the outcome of the commit is unknown, so
/// the lease is released once more.
struct Committing<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    unfinished: Unfinished,
    step: Step,
    call: Call,
    /// The queue whose first waiter gets the lease after the commit.
    queue: Option<Arc<Queue<Lease<S>>>>,
    /// Whether another transaction had pinned the lease before.
    pin: Pin,
}

impl<S: LeaseStore> Lease<S> {
    /// Prepares to end the lease with the commit of a transaction: to hand it over if it is committed alone and
    /// somebody in this process waits for it, otherwise to release it.
    fn begin_commit(&self, alone: bool) -> Guard<Committing<S>> {
        let (kept, inner) = (self.kept.clone(), self.inner.clone());
        let unfinished = inner.keeper.unfinished();
        let suits = |wants: &Wants| alone && inner.hand_over().is_some_and(|it| kept.suits(wants, it));
        let queue = inner.queues.queue_with_waiter(&kept.key, suits);
        let queue = queue.filter(|_| kept.on(Event::Committing(Step::HandsOver)) != Effect::Refuse);
        let hands_over = queue.is_some();
        let (step, call) = (Step::HandsOver, kept.asks());
        let mut committing = Committing { kept, inner, unfinished, step, call, queue, pin: Pin::No };
        if !hands_over {
            committing.release();
        }
        Guard::new(committing)
    }

    /// Verifies the lease in the transaction in which `pin` locks its row. `pin` returns whether the row was there.
    pub(crate) async fn verify_by(&self, pin: impl Future<Output = Result<bool>>) -> Result<()> {
        self.visit();
        if self.kept.on(Event::Verifying) == Effect::Refuse {
            return Err(self.lost_error(self.kept.lost().unwrap_or(LossReason::Released)));
        }
        let call = self.kept.asks();
        let is_there = pin.await;
        // An error that answers it leaves the transaction, of which the pin tells.
        if is_there.as_ref().err().is_none_or(is_answered) {
            self.kept.answered(call);
        }
        if is_there? {
            self.kept.on(Event::Verified);
        } else if self.is_in_store().await {
            return Err(elsewhere("verify", self.key()));
        } else {
            self.kept.on(Event::Gone);
        }
        self.check_trusted()
    }

    /// Registers the current runtime, so that it can renew the lease too.
    pub(crate) fn visit(&self) {
        self.inner.keeper.visit();
    }

    /// Whether the store has the lease, for a transaction that does not see it. `false` also if the store does not
    /// answer in time.
    async fn is_in_store(&self) -> bool {
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
    fn hands_over(&self) -> bool {
        self.step == Step::HandsOver
    }

    /// The transaction will release the lease. A renewal after it finds no lease, which must not be reported as a loss.
    /// No other transaction may pin the lease from now on.
    fn release(&mut self) {
        self.step = Step::Releases;
        self.pin = self.kept.begin_end(Event::Committing(self.step));
        self.inner.keeper.stop_renewing(&self.kept);
    }

    /// The transaction has released the lease. From now on a missing lease is no theft, unless the transaction is
    /// rolled back.
    fn row_released(&mut self) {
        self.step = Step::RowReleased;
        self.kept.on(Event::Committing(self.step));
    }

    /// Whether another transaction had pinned the lease before.
    fn pin(&self) -> Pin {
        self.pin
    }

    /// The commit succeeded. It released the lease, or the lease is handed over now.
    fn committed(committing: Guard<Self>) {
        let Self { kept, inner, queue, step, call, .. } = &*committing;
        kept.answered(*call);
        if *step != Step::HandsOver {
            kept.on(Event::Committed);
            inner.leftovers.released(&kept.key, kept.token, true);
            inner.queues.released(kept.queue_key());
            committing.defuse();
        } else if queue.as_ref().is_some_and(|it| hand_over_to_first(inner, kept, it, Event::HandingOverCommitted)) {
            committing.defuse();
        } else {
            // The waiter has gone, or the answer took longer than the trust lasts: the lease is released in the
            // background. It is not lost: nobody could take it before the commit.
            kept.on(Event::Committed);
            let Self { kept, inner, unfinished, .. } = committing.defuse();
            inner.leftovers.note_answered(&kept.key, kept.token);
            release_later(inner, kept, unfinished, Vec::new());
        }
    }

    /// Nothing was committed. The lease stays held, by the caller of the body or until it is dropped. `is_over`: the
    /// transaction has nothing locked any more.
    fn refused(committing: Guard<Self>, is_over: bool) {
        let Self { kept, inner, unfinished, step, call, .. } = committing.defuse();
        if is_over {
            kept.answered(call);
        }
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
        inner.leftovers.note(&kept.key, kept.token);
        release_later(inner, kept, unfinished, Vec::new());
    }
}

/// Commits the transaction if all leases are still held, and ends them.
pub(crate) async fn commit<S: LeaseStore, T: LeaseTx>(leases: &[Lease<S>], mut tx: T) -> Result<()> {
    let limit = leases.iter().map(|it| it.kept.ttl()).max().unwrap_or(LEAST_COMMIT).clamp(LEAST_COMMIT, MOST_COMMIT);
    let alone = leases.len() == 1;
    let mut committing: Vec<_> = leases.iter().map(|it| it.begin_commit(alone)).collect();
    // Checked after `begin_commit`, from which on the lease cannot be handed over. One that was handed over before
    // belongs to another holder.
    if let Some(lost) = leases.iter().find_map(|it| it.check_trusted().err()) {
        for it in committing {
            // Nothing was sent.
            Committing::refused(it, true);
        }
        tx.roll_back().await;
        return Err(lost);
    }
    let row_released = async {
        tx.check_open().await?;
        for (lease, committing) in leases.iter().zip(&mut committing) {
            let kept = &lease.kept;
            if committing.hands_over() {
                // It proves that the lease is held, and its lock keeps it so until the commit.
                if tx.renew(&kept.renewal()).await? == Answer::Done {
                    continue;
                }
                committing.get_mut().release();
            }
            let release = Release { key: kept.key.clone(), token: kept.token, min_hold: kept.min_hold() };
            if !tx.release(&release, committing.pin()).await? {
                return Ok(Some(lease));
            }
            committing.get_mut().row_released();
        }
        Ok(None)
    };
    let unanswered = || Err(no_answer(COMMITTING, leases.first().map(Lease::key)));
    let (is_over, refused) = match timeout(limit, row_released).await.unwrap_or_else(|_| unanswered()) {
        Ok(None) => {
            // From here on only the answer decides whether the commit happened.
            let committed = timeout(limit, tx.commit()).await;
            match committed.unwrap_or_else(|_| Err(Error::OutcomeUnknown { source: timed_out().into() })) {
                Ok(()) => {
                    committing.into_iter().for_each(Committing::committed);
                    return Ok(());
                }
                // The leases are released, in case the commit did not happen.
                Err(err @ Error::OutcomeUnknown { .. }) => return Err(err),
                // It may be refused before COMMIT, with a rollback that is not answered.
                Err(err) => (false, err),
            }
        }
        Ok(Some(lost)) => {
            // The loss is the error to report. If the rollback fails, the database does it.
            let is_over = tx.roll_back().await;
            if Box::pin(lost.is_in_store()).await {
                (is_over, elsewhere("commit", lost.key()))
            } else {
                lost.kept.on(Event::Gone);
                (is_over, lost.lost_error(lost.kept.lost().unwrap_or(LossReason::Stolen)))
            }
        }
        Err(err) if is_answered(&err) => {
            // The transaction may have locked the rows of some leases, and a driver may roll back a dropped one only
            // when its connection is used again.
            (tx.roll_back().await, err)
        }
        Err(err) => {
            // A statement may be on its way, so nothing is said on the connection any more.
            drop(tx);
            (false, err)
        }
    };
    for it in committing {
        Committing::refused(it, is_over);
    }
    Err(refused)
}

/// The error of a transaction that does not see a lease which the database of the leases has.
fn elsewhere(option: &'static str, key: &Key) -> Error {
    let reason = format!(
        "got a transaction that does not see lease `{key}`, though the lease is held: the transaction is of another \
         database (or schema) than the leases. Begin it in the pool of the leases, or guard it by the fence \
         (`lease.guard(&mut *tx)`). A snapshot that is older than the lease, and a node of a cluster that does not \
         have the lease yet, look the same"
    );
    Error::InvalidOption { option, reason }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::{
        task::JoinSet,
        time::{Instant, sleep},
    };

    use crate::{
        Error, Fault, Leases,
        body::commits::{COMMIT_LIMIT, CommitSent},
        lease::store::Profile,
        mutex::Mutex,
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
    };

    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    fn leases() -> Leases<MemoryStore> {
        Leases::builder(MemoryStore::new().client()).ttl(TTL).wait(60 * TTL).build().unwrap()
    }

    /// A transaction that notes as what the leases are released, and whose commit takes this time.
    struct Noting(Arc<Mutex<Vec<Pin>>>, Duration);

    impl LeaseTx for Noting {
        async fn check_open(&mut self) -> Result<()> {
            Ok(())
        }

        async fn renew(&mut self, _renewal: &Renewal) -> Result<Answer> {
            Ok(Answer::Done)
        }

        async fn release(&mut self, _release: &Release, pin: Pin) -> Result<bool> {
            self.0.lock().push(pin);
            Ok(true)
        }

        async fn commit(self) -> Result<()> {
            sleep(self.1).await;
            Ok(())
        }

        async fn roll_back(self) -> bool {
            true
        }
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
    async fn a_lease_that_a_commit_leaves_behind_is_no_other_holder() {
        for is_answered in [true, false] {
            let leases = leases();
            let lease = leases.lease("k").acquire().await.unwrap();
            let waiter = tokio::spawn(leases.lease("k").acquire());
            sleep(TTL / 1000).await;
            let committing = lease.begin_commit(true);
            assert!(committing.hands_over());
            waiter.abort();
            sleep(TTL / 1000).await;
            leases.store().faults().slow(TTL / 100);
            if is_answered {
                Committing::committed(committing);
            } else {
                drop(committing);
            }
            assert!(leases.lease("k").try_acquire().await.unwrap().is_some());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_call_without_an_answer_keeps_locked_is_no_other_holder() {
        let unanswered = [
            "commit",
            "commit, not dropped",
            "renewals",
            "renewals, not dropped",
            "renewals, seen, not dropped",
            "renewal in flight",
            "extension that is dropped",
            "extension that is dropped, not dropped",
            "release that is dropped",
            "verify",
            "commit of the caller's own",
            "commit of the caller's own, not dropped",
        ];
        for unanswered in unanswered {
            let mut commits = JoinSet::new();
            let leases = Leases::builder(Scripted::new(Profile::default())).ttl(TTL).build().unwrap();
            let mut lease = leases.lease("k").acquire().await.unwrap();
            let renewals_fail = |how| leases.store().store.faults().script(Operation::Renew, [how; 1000]);
            match unanswered {
                "commit, not dropped" => {
                    let lease = lease.share();
                    commits.spawn(async move { commit(&[lease], Noting(Arc::default(), 4 * TTL)).await });
                    sleep(2 * TTL).await;
                }
                "commit" => {
                    let committing = lease.begin_commit(false);
                    sleep(2 * TTL).await;
                    drop(committing);
                }
                "renewals" | "renewals, not dropped" => {
                    renewals_fail(Failure::Refused);
                    sleep(2 * TTL).await;
                }
                "renewals, seen, not dropped" => {
                    renewals_fail(Failure::Refused);
                    lease.lost().await;
                    leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
                    leases.lease("k").try_acquire().await.unwrap_err();
                    leases.store().free(Call::Acquire);
                }
                "renewal in flight" => {
                    renewals_fail(Failure::Silent);
                    sleep(TTL / 3).await;
                    leases.store().store.steal("k");
                }
                "release that is dropped" => {
                    leases.store().store.faults().script(Operation::Release, [Failure::Silent]);
                    let released = std::mem::replace(&mut lease, leases.lease("l").acquire().await.unwrap());
                    timeout(TTL / 100, released.release()).await.unwrap_err();
                    leases.store().store.steal("k");
                    sleep(TTL).await;
                }
                "extension that is dropped" | "extension that is dropped, not dropped" => {
                    renewals_fail(Failure::Silent);
                    timeout(TTL / 100, lease.extend(TTL)).await.unwrap_err();
                    leases.store().store.steal("k");
                }
                "verify" => {
                    timeout(TTL / 100, lease.verify_by(pending())).await.unwrap_err();
                    leases.store().store.steal("k");
                }
                _ => {
                    lease.verify_by(async { Ok(true) }).await.unwrap();
                    leases.store().store.steal("k");
                    if unanswered.ends_with("not dropped") {
                        lease.lost().await;
                    }
                }
            }
            let not_dropped = Some(lease).filter(|_| unanswered.ends_with("not dropped"));
            sleep(TTL).await;
            let releases = leases.store().calls(Call::Release) + leases.store().calls(Call::ReleaseUnpinned);
            assert_eq!(releases == 0, not_dropped.is_some());
            // A claim skips a locked row. The release did not meet the lock: it saw that the lease is not there.
            leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
            let refused = leases.lease("k").try_acquire().await;
            assert!(
                matches!(&refused, Err(Error::Database { fault: Fault::Unavailable, .. })),
                "{unanswered}: {refused:?}"
            );
            leases.store().free(Call::Acquire);
            leases.store().fail(Call::Acquire, (0..2).map(|_| failed(Fault::Serialization)));
            assert!(leases.lease("k").try_acquire().await.unwrap().is_some(), "the row is locked no more");
        }
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
        Committing::refused(commit_with_a_waiter(&leases, &lease).await, false);
        assert!(lease.is_trusted());
        leases.close().await.unwrap();
        assert!(!lease.is_trusted());
        assert_eq!(leases.show("k").await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_transaction_that_does_not_see_the_lease_verifies_nothing() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        let err = lease.verify_by(async { Ok(false) }).await.unwrap_err();
        assert!(matches!(err, Error::InvalidOption { option: "verify", .. }), "{err:?}");
        leases.store().steal("k");
        assert!(lease.verify_by(async { Ok(false) }).await.unwrap_err().is_lost());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_whose_commit_was_refused_is_renewed_on() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        Committing::refused(lease.begin_commit(true), false);
        sleep(3 * TTL).await;
        assert!(lease.is_trusted());
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, lease.fence());
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
    async fn a_commit_renews_the_lease_only_for_a_waiter_who_can_have_it_and_only_alone() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        let wants_another_ttl = tokio::spawn(leases.lease("k").ttl(2 * TTL).acquire());
        sleep(TTL / 1000).await;
        assert!(!lease.begin_commit(true).hands_over());
        drop(lease);
        let lease = wants_another_ttl.await.unwrap().unwrap();
        let _suits = tokio::spawn(leases.lease("k").ttl(2 * TTL).acquire());
        sleep(TTL / 1000).await;
        assert!(!lease.begin_commit(false).hands_over());
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_that_misses_the_row_that_a_commit_has_released_is_no_loss() {
        for row_released in [false, true] {
            let leases = leases();
            let lease = leases.lease("k").acquire().await.unwrap();
            let mut committing = lease.begin_commit(true);
            if row_released {
                committing.get_mut().row_released();
            }
            lease.kept().on(Event::Gone);
            let expected = if row_released { LossReason::Released } else { LossReason::Stolen };
            assert_eq!(lease.kept().lost(), Some(expected));
            Committing::committed(committing);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_knows_of_the_pin_of_another_transaction_and_not_of_its_own() {
        let leases = leases();
        for (answer, pin) in [(None, Pin::No), (Some(true), Pin::Certain)] {
            let lease = leases.lease("k").acquire().await.unwrap();
            if let Some(is_there) = answer {
                lease.verify_by(async { Ok(is_there) }).await.unwrap();
            }
            let released_as = Arc::default();
            commit(&[lease], Noting(Arc::clone(&released_as), Duration::ZERO)).await.unwrap();
            assert_eq!(*released_as.lock(), [pin]);
            sleep(TTL).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_a_commit_releases_is_renewed_no_more() {
        let leases = leases();
        let lease = leases.lease("k").acquire().await.unwrap();
        let committing = lease.begin_commit(true);
        let renewals = || leases.store().faults().calls(Operation::Renew);
        let before = renewals();
        sleep(2 * TTL).await;
        assert_eq!(renewals(), before);
        Committing::committed(committing);
    }
}
