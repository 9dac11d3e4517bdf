//! Leading: a body that runs in one process at a time, and again in another when that process dies, stops or is cut
//! off.

use std::{future::Future, time::Duration};

use tokio::time::sleep;

use crate::{
    lease::{
        request::{LeaseRequest, yields::Yields},
        store::LeaseStore,
    },
    observe,
    policy::{Backoff, half_jitter},
    value::error::{Error, Result},
};

/// How long one campaign waits for the lease. A store that never answers is reported at its end.
const CAMPAIGN: Duration = Duration::from_mins(1);

/// The pauses after campaigns that failed: from half of these to the whole.
const PAUSES: Backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(5) };

impl<S: LeaseStore, L: Yields<Store = S>> LeaseRequest<S, L> {
    /// Runs `body` while this process leads, and returns its result.
    ///
    /// The process that holds the lease leads; the others wait, without a bound: [`wait`](Self::wait) has no effect.
    /// When the lease is lost, the body is dropped at its next await point, the process waits for the lease again, and
    /// calls `body` anew with the new lease. So the body must be written to be repeated: it begins by reading how far
    /// the last leader came. The first `Ok` or `Err` that the body returns while it leads ends everything: the lease is
    /// released, and the result is returned, even if the lease is lost right after it. A result that comes after the
    /// loss is dropped, and the body is called anew: another process may lead by then.
    ///
    /// A body whose [`Tx::commit`](crate::Tx::commit) or [`Lease::commit`](crate::Lease::commit) has no answer yet is
    /// dropped when the answer has come, and 30 s after the loss at the latest.
    ///
    /// Another process leads as soon as this one returns or releases the lease, and a [`ttl`](Self::ttl) after this one
    /// dies, is cut off from the store or is *stopped* (SIGSTOP, a frozen virtual machine). A process that goes on
    /// after a stop drops its body before the body takes its next step. What the body had sent before may still arrive;
    /// the fence, [`verify`](crate::Lease::verify) and [`commit`](crate::Lease::commit) protect from that. A process
    /// that is stopped inside a transaction keeps the locks of that transaction, and the lease if it has verified it
    /// there, until the server ends the transaction.
    ///
    /// While the process waits, errors of a store that is away (a full pool, a connection that is refused or lost, a
    /// server that is read-only, a transaction that the database undid) do not end this. Each outage is one warning,
    /// and the request is repeated after pauses that grow to 5 s.
    ///
    /// # Errors
    /// The errors of the body while it leads. Errors of the request that do not pass: [`Error::Closed`],
    /// [`Error::Reentrant`], [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], and an
    /// [`Error::Database`] of another kind, such as a missing privilege. Never [`Error::Contended`] of this request,
    /// and never its [`Error::Lost`].
    ///
    /// # Cancel safety
    /// Dropping this future drops the body and releases the lease in the background.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    ///
    /// # Example
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let fence = leases
    ///     .lease("deliver")
    ///     .ttl(Duration::from_secs(10)) // another process leads 10 s after this one hangs
    ///     .lead(|lease| async move {
    ///         // … read how far the last leader came, and go on; each write after `lease.verify(&mut tx)` …
    ///         Ok::<_, lockkit::Error>(lease.fence())
    ///     })
    ///     .await?;
    /// assert_eq!(leases.show("deliver").await?, None); // the body has ended, and the lease is free
    /// # assert!(fence.get() > 0);
    /// # Ok(()) }
    /// ```
    #[must_use = "nothing happens until it is awaited: `….lead(…).await?`"]
    pub async fn lead<T, E, F, Fut>(self, mut body: F) -> Result<T, E>
    where
        F: FnMut(L) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        loop {
            let lease = Box::pin(self.campaign()).await?;
            let mut running = Box::pin(body(lease.borrowed()));
            // Looks at the lease once, at the moment of the result.
            let ended: Result<_> = lease.run_body(async { Ok(running.as_mut().await) }).await;
            drop(running);
            lease.end_after_body().await;
            if let Ok(result) = ended {
                return result;
            }
        }
    }

    /// Waits for the leases without a bound. Returns only the errors that another attempt would meet too.
    async fn campaign(&self) -> Result<L> {
        let mut failed = 0;
        loop {
            match self.again().wait(CAMPAIGN).acquire().await {
                Err(err) if err.is_contended() => failed = 0,
                Err(err) if err.may_pass() => {
                    if failed == 0 {
                        observe::cannot_campaign(&self.key, &err);
                    }
                    sleep(half_jitter(PAUSES.ceiling(failed))).await;
                    failed = failed.saturating_add(1);
                }
                outcome => return outcome,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        pin::{Pin, pin},
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        task::{Context, Poll, Waker},
    };

    use tokio::{
        task::{JoinHandle, yield_now},
        time::{Instant, advance, timeout},
    };

    use super::*;
    use crate::{
        Lease, Leases, OnLost,
        testing::{Failure, MemoryStore, Operation},
    };

    const SECOND: Duration = Duration::from_secs(1);
    const TTL: Duration = Duration::from_secs(10);

    fn leases(store: &MemoryStore) -> Leases<MemoryStore> {
        Leases::builder(store.client()).ttl(TTL).build().unwrap()
    }

    /// Leads for ever, and counts how often the body is called.
    fn leading(leases: &Leases<MemoryStore>) -> (Arc<AtomicU32>, JoinHandle<Result<()>>) {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let lead = leases.lease("k").lead(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            pending()
        });
        (calls, tokio::spawn(lead))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_ends_while_it_leads_ends_everything_and_frees_the_lease() {
        let leases = leases(&MemoryStore::new());
        let answer = leases.lease("k").lead(|lease| async move { Ok::<_, Error>(lease.fence()) }).await.unwrap();
        assert!(answer.get() > 0);
        let body = |_| async { Err::<(), _>(Error::InvalidKey { key: "of the body".into(), reason: "?" }) };
        assert!(matches!(leases.lease("k").lead(body).await, Err(Error::InvalidKey { .. })));
        // A body that releases its lease has not lost it.
        leases.lease("k").lead(|lease| async move { lease.release().await.map(drop) }).await.unwrap();
        assert_eq!(leases.show("k").await.unwrap(), None);
        let both = leases.all(["k", "l"]).lead(|both| async move { Ok::<_, Error>(both.leases().len()) });
        assert_eq!(both.await.unwrap(), 2);
        assert_eq!(leases.list("").await.unwrap(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_loses_its_lease_drops_its_body_and_leads_again_with_a_higher_fence() {
        let store = MemoryStore::new();
        let (here, there) = (leases(&store), leases(&store));
        let (first, leader) = leading(&here);
        yield_now().await;
        let (second, standby) = leading(&there);
        sleep(3 * TTL).await;
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (1, 0), "however long it waits");
        let before = there.show("k").await.unwrap().unwrap().fence;

        here.store().faults().partition();
        sleep(TTL + SECOND).await;
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (1, 1));
        assert!(there.show("k").await.unwrap().unwrap().fence > before);
        assert_eq!(here.health().held, 0);

        here.store().faults().heal();
        standby.abort();
        sleep(TTL).await;
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (2, 1));
        assert!(!leader.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_that_comes_after_the_loss_is_not_returned() {
        for on_lost in [OnLost::Stop, OnLost::Continue] {
            for is_ok in [true, false] {
                let store = MemoryStore::new();
                let leases = leases(&store);
                let mut calls = 0;
                let body = |lease: Lease<_>| {
                    calls += 1;
                    let (is_first, store) = (calls == 1, store.clone());
                    async move {
                        if is_first {
                            store.steal("k");
                            lease.lost().await;
                        }
                        if is_first && !is_ok {
                            return Err(lease.extend(TTL).await.unwrap_err());
                        }
                        Ok(is_first)
                    }
                };
                let is_first = leases.lease("k").on_lost(on_lost).lead(body).await.unwrap();
                assert!(!is_first, "{on_lost:?}");
                assert_eq!(calls, 2);
            }
        }
    }

    /// A body that has returned, and lets the lease expire while it is dropped: before anybody can look at the lease
    /// again.
    struct EndsLate;

    impl Future for EndsLate {
        type Output = Result<&'static str>;

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            Poll::Ready(Ok("done"))
        }
    }

    impl Drop for EndsLate {
        fn drop(&mut self) {
            let passing = pin!(advance(2 * TTL));
            assert!(passing.poll(&mut Context::from_waker(Waker::noop())).is_pending(), "it has passed");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_that_came_before_the_loss_is_returned_however_late_the_loss_is_seen() {
        for on_lost in [OnLost::Stop, OnLost::Continue] {
            let mut calls = 0;
            let body = |_| {
                calls += 1;
                assert_eq!(calls, 1, "it has ended");
                EndsLate
            };
            let leading = leases(&MemoryStore::new()).lease("k").on_lost(on_lost).lead(body).await;
            assert_eq!(leading.unwrap(), "done");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_away_ends_no_campaign() {
        let store = MemoryStore::new();
        for failure in [Failure::Refused, Failure::AnswerLost, Failure::Silent] {
            let here = leases(&store);
            here.store().faults().script(Operation::Acquire, [failure; 40]);
            let (calls, leader) = leading(&here);
            let asked = Instant::now();
            while calls.load(Ordering::Relaxed) == 0 {
                assert!(!leader.is_finished(), "{failure:?}");
                assert!(asked.elapsed() < 600 * SECOND, "{failure:?}");
                sleep(SECOND).await;
            }
            if failure == Failure::Refused {
                let asked = here.store().faults().calls(Operation::Acquire);
                assert_eq!(asked, 41);
            }
            leader.abort();
            drop(leader.await);
            while store.client().lease_look(&"k".into()).await.unwrap().is_some() {
                sleep(SECOND).await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_of_the_request_has_no_effect() {
        let store = MemoryStore::new();
        let (here, there) = (leases(&store), leases(&store));
        let held = there.lease("k").acquire().await.unwrap();
        here.store().faults().slow(SECOND / 1000);
        let leading = tokio::spawn(here.lease("k").wait(Duration::ZERO).lead(async |_| Ok::<_, Error>(())));
        sleep(60 * SECOND).await;
        // It polls as a request does that waits.
        let calls = here.store().faults().calls(Operation::Look);
        assert!((60..1000).contains(&calls), "{calls}");
        held.release().await.unwrap();
        leading.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_away_is_not_asked_in_a_hurry() {
        let here = leases(&MemoryStore::new());
        here.store().faults().script(Operation::Acquire, [Failure::Refused; 1000]);
        let (_, leader) = leading(&here);
        sleep(60 * SECOND).await;
        let calls = here.store().faults().calls(Operation::Acquire);
        assert!((12..40).contains(&calls), "{calls}");
        leader.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_refused_is_not_repeated() {
        let leases = leases(&MemoryStore::new());
        let body = |_| pending::<Result<()>>();
        assert!(matches!(leases.lease("").lead(body).await, Err(Error::InvalidKey { .. })));
        assert!(matches!(leases.lease("k").ttl(Duration::ZERO).lead(body).await, Err(Error::InvalidOption { .. })));
        let nested = leases.lease("k").lead(|_| leases.lease("k").lead(body)).await;
        assert!(matches!(nested, Err(Error::Reentrant { .. })), "{nested:?}");
        // The first leads, and the second waits to.
        let (first, second) = (leading(&leases).1, leading(&leases).1);
        yield_now().await;
        leases.close().await.unwrap();
        for closed in [first, second] {
            let closed = timeout(SECOND, closed).await.unwrap().unwrap();
            assert!(matches!(closed, Err(Error::Closed { .. })), "{closed:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_is_dropped_frees_the_lease() {
        let store = MemoryStore::new();
        let (here, there) = (leases(&store), leases(&store));
        let (_, leader) = leading(&here);
        yield_now().await;
        assert!(there.lease("k").try_acquire().await.unwrap().is_none());
        leader.abort();
        let freed = Instant::now();
        drop(there.lease("k").acquire().await.unwrap());
        assert!(freed.elapsed() < SECOND, "{:?}", freed.elapsed());
    }
}
