//! Acquiring: a single attempt, with waiting, or around a body of work.

use std::{future::Future, slice};

use tokio::time::{Instant, timeout_at};

use crate::{
    lease::{
        bounded::{is_silence, limit_for},
        held::Lease,
        leftovers::Left,
        life::kept::Wants,
        queue::wait::{self, FIRST_ANSWER, Outcome, Refused, Waited},
        request::{
            LeaseRequest,
            claim::{Attempt, attempt},
            mode::Mode,
            pending::Pending,
            refused::understood,
            yields::Yields,
        },
        store::{Claim, LeaseStore},
    },
    observe::{Strategy, observed},
    value::{
        error::{Error, Result},
        key::Key,
        token::Token,
    },
};

impl<S: LeaseStore, L: Yields<Store = S>> LeaseRequest<S, L> {
    /// Acquires the lease as soon as it is free, or all of the leases as soon as all of them are free at once.
    ///
    /// The callers of one process queue in order. Only the first of them asks the store, and it holds no connection
    /// between two attempts. A holder of the same process hands its lease to the first caller without asking the store
    /// ([`LeasesBuilder::hand_over`](crate::lease::LeasesBuilder::hand_over)). From the grant on, the lease is renewed
    /// in the background.
    ///
    /// Other processes cannot starve a waiting request. A request that has waited for 50 ms takes a ticket, a short
    /// lease named `<key>/queue/<number>`. A process that had the lease within the last second lets the owners of
    /// tickets go first. Shorter waits write nothing. The order of the tickets is kept approximately;
    /// [`fair`](Self::fair) keeps it strictly.
    ///
    /// Leases are not re-entrant: if one task held a lease twice, the first of its two releases would free it. A body
    /// that [`run`](Self::run) or `#[with_lock]` runs gets [`Error::Reentrant`] at once if it runs under the same
    /// lease, or under the lock that this request would wait for (the last permit, its own reader or writer). If the
    /// caller holds the lease only in a variable, the request waits like any other, because that lease may be given to
    /// another task. To use one lease in several places, hand it on with [`Lease::share`].
    ///
    /// Bind the lease to a name: `let lease = …`, or `let _lease = …` if it is not used. `let _ = …` drops the lease at
    /// once and so releases it. The rustc lint `let_underscore_drop` finds that.
    ///
    /// **Several leases** are taken in the order of their keys: with one statement on PostgreSQL, with one per key
    /// elsewhere. None is kept while the request waits for another one, and the request takes no tickets.
    ///
    /// **Several permits**: a request that has waited for 50 ms and is next keeps the permits that become free until it
    /// has enough. Only one request per key does so at a time. It holds the lease `<key>/permit/gather` meanwhile.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, with the holder and the key that was last found held; [`Error::Reentrant`];
    /// [`Error::PoolStarved`] or [`Error::Database`] when the store did not answer in that time, when nobody else is
    /// seen to hold the lease and an unanswered call of this process may, or when on SQLite another
    /// transaction, such as the caller's own, had the database locked
    /// ([`Fault::Contended`](crate::Fault::Contended)); [`Error::InvalidKey`], [`Error::InvalidOption`],
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropping this future loses the place in the queue. If a query is in flight, its answer is still received, and a
    /// granted lease is released at once.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use = "await it, and bind the lease: `let lease = ….acquire().await?`"]
    pub async fn acquire(self) -> Result<L> {
        self.check()?;
        self.check_not_reentrant()?;
        let waiting = Box::pin(async { self.wait_for_it().await.map_err(|err| self.named(err)) });
        let leases = observed(Strategy::Lease, &self.key, waiting).await?;
        Ok(self.deliver(leases))
    }

    /// The lease if it is free now, or all of the leases if all are free. `None` if one is held, even by this task.
    /// Makes one attempt and does not queue. Only where nobody else is seen to hold the lease, and an earlier call of
    /// this process may have been in the way, does it ask again, for 0.5 s at most.
    ///
    /// It may overtake waiting requests. A [`fair`](LeaseRequest::fair) request does not: it also returns `None` while
    /// others queue. Leases that the attempt took without success (a writer's lease while readers hold theirs) are
    /// released before it returns.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::Database`], also when nobody
    /// else is seen to hold the lease and an unanswered call of this process may.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn try_acquire(self) -> Result<Option<L>> {
        self.check()?;
        self.check_not_closed()?;
        let leases = Box::pin(self.try_once()).await.map_err(|err| self.named(err))?;
        Ok(leases.map(|it| self.deliver(it)))
    }

    /// Acquires the lease, runs `body`, and releases the lease.
    ///
    /// When the lease is lost, the body is dropped at its next await point, and the result is [`Error::Lost`]. If a
    /// commit of the body is on its way then, its answer is waited for first, for 30 s at most, see
    /// [`OnLost::Stop`](crate::OnLost::Stop). The body gets its own [`Lease`] handle, to verify or commit with.
    /// Dropping that handle releases nothing.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and the errors of the body. [`Error::OutcomeUnknown`] when
    /// the lease was lost, and a commit of the body was not answered within 30 s.
    ///
    /// # Cancel safety
    /// Dropping this future drops the body and releases the lease in the background.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let fence = leases
    ///     .lease("nightly")
    ///     .run(|lease| async move { Ok::<_, lockkit::Error>(lease.fence()) })
    ///     .await?;
    /// assert_eq!(leases.show("nightly").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(L) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        let result = lease.run_body(Box::pin(body(lease.borrowed()))).await;
        lease.end_after_body().await;
        result
    }

    /// Marks the leases as returned to the caller. `min_hold` does not apply to a lease that is released before that.
    fn deliver(&self, leases: Vec<Lease<S>>) -> L {
        leases.iter().for_each(Lease::deliver);
        L::of(leases, self.on_lost)
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Asks once, or again where what this process has left was in the way. Releases what it took on the way.
    async fn try_once(&self) -> Result<Option<Vec<Lease<S>>>> {
        let mut again = None;
        loop {
            let (pending, started) = (Pending::default(), Instant::now());
            let outcome = if self.fair { self.try_fairly(&pending).await } else { self.try_now(&pending, true).await };
            let outcome = understood(&pending, outcome);
            if matches!(outcome, Ok(Outcome::Held { .. })) && self.left(started, again) > Left::Nothing {
                // Boxed, as all that is rare: the future of every caller has room for what is not.
                match Box::pin(self.refusal(&pending, started, Refused::Held, again)).await {
                    Ok(until) => again = Some(until),
                    Err(Error::Contended { .. }) => return Ok(None),
                    Err(err) => return Err(err),
                }
                continue;
            }
            if !matches!(outcome, Ok(Outcome::Done(_))) {
                pending.release().await;
            }
            return match outcome? {
                Outcome::Done(leases) => Ok(Some(leases)),
                Outcome::Held { .. } | Outcome::Ticketed { .. } => Ok(None),
                Outcome::Silent => Err(self.silence(&pending).await),
            };
        }
    }

    /// Waits for the leases.
    async fn wait_for_it(&self) -> Result<Vec<Lease<S>>> {
        let started = Instant::now();
        let deadline = started + self.wait;
        let mut pending = Pending::waiting();
        // A waiting writer may be ahead in the queue. It waits for this task's read lease, so the request must not
        // queue behind it.
        if self.reads_already()
            && let Ok(outcome) =
                timeout_at(deadline.max(started + FIRST_ANSWER), Box::pin(self.try_now(&pending, true))).await
            && let Outcome::Done(leases) = understood(&pending, outcome)?
        {
            return Ok(leases);
        }
        let freed = |key| self.inner.freed(key);
        let takes_over = self.mode == Mode::Exclusive && !self.fair && self.inner.hand_over().is_some();
        let mut again = None;
        loop {
            // Boxed, as what follows the wait: callers who wait their turn then need a tenth of the memory.
            let attempt = |likely_free: bool| Box::pin(self.attempt_once(&pending, likely_free));
            let wants = takes_over.then(|| Wants { ttl: self.ttl, terms: self.terms() });
            let wait = wait::Wait {
                queue_key: self.queue_key(),
                keys: self.keys(),
                deadline,
                is_again: again.is_some(),
                is_shared: self.mode.is_shared(),
                wants,
                under: self.under(),
            };
            match self.inner.queues.wait(wait, freed, attempt).await? {
                Waited::Done(leases) => return Ok(leases),
                Waited::HandedOver(lease) => {
                    self.inner.keeper.take_over(lease.kept());
                    return Ok(vec![lease]);
                }
                Waited::Refused(refused) => {
                    self.check_not_closed()?;
                    again = Some(Box::pin(self.refusal(&pending, started, refused, again)).await?);
                    // What an answer has said before is no answer to it. Its wait is over.
                    pending = Pending::default();
                }
            }
        }
    }

    /// One attempt of the caller at the head of the queue.
    async fn attempt_once(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        self.check_not_closed()?;
        let outcome = match &self.mode {
            Mode::All(_) | Mode::Any(_) => self.try_now(pending, likely_free).await,
            // The store keeps the order of the waiting claims, or has no room for tickets.
            Mode::Exclusive if self.inner.store().profile().queues || !self.inner.store().profile().side_leases => {
                self.try_now(pending, likely_free).await
            }
            _ if self.fair => self.attempt_fairly(pending, likely_free).await,
            _ => self.attempt_patiently(pending, likely_free).await,
        };
        let outcome = understood(pending, outcome)?;
        if let (Mode::Exclusive | Mode::All(_), Outcome::Held { .. } | Outcome::Ticketed { .. }) =
            (&self.mode, &outcome)
        {
            let key = pending.in_the_way().unwrap_or_else(|| self.key.clone());
            match self.inner.check_other_leases(&key, self.ttl).await {
                // The next attempt looks again.
                Err(err) if is_silence(&err) || err.is_transient() => {}
                checked => checked?,
            }
        }
        Ok(outcome)
    }

    /// One attempt at the leases of the mode. Ignores tickets.
    pub(super) async fn try_now(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        let outcome = match &self.mode {
            Mode::Exclusive => self.try_keys(pending, slice::from_ref(&self.key), likely_free).await,
            Mode::All(keys) => self.try_keys(pending, keys, likely_free).await,
            Mode::Any(keys) => self.try_any(pending, keys, likely_free).await,
            Mode::Permit(permits) => self.try_slot(pending, &self.permits(), *permits, likely_free).await,
            Mode::Permits { of, take } => self.try_permits(pending, *of, *take).await,
            Mode::NoPermits => Ok(Outcome::Held { free_in: None }),
            Mode::Read => self.try_read(pending, likely_free).await,
            Mode::Write => self.try_write(pending, likely_free).await,
        };
        match outcome? {
            // The answers took longer than the leases live. Nobody else needs to have them.
            Outcome::Done(leases) if !leases.iter().all(Lease::is_trusted) => Ok(Outcome::Silent),
            outcome => Ok(outcome),
        }
    }

    /// One attempt at the leases of these keys. If the key that was last found held is probably still held, reads it
    /// first, because a read writes nothing.
    pub(super) async fn try_keys(
        &self,
        pending: &Pending<S>,
        keys: &[Key],
        likely_free: bool,
    ) -> Result<Outcome<Vec<Lease<S>>>> {
        if !likely_free {
            let key = pending.in_the_way().filter(|it| keys.contains(it)).or_else(|| keys.first().cloned());
            if let Some(key) = key
                && let Some(held) = self.inner.store().look(&key, limit_for(self.ttl)).await?
            {
                // No other holder has the lease.
                if self.inner.leftovers.recognises(&key, held.token) {
                    return Ok(Outcome::Silent);
                }
                pending.saw(&held);
                if self.needs(&key) {
                    pending.set_in_the_way(key);
                }
                return Ok(Outcome::Held { free_in: Some(held.info.expires_in) });
            }
        }
        keys.iter().try_for_each(Key::check)?;
        // A token is sent again only for a claim that the store queues. Any other claim may have been granted and given
        // back.
        let place = pending.take_place_in_store();
        let token = || place.as_ref().map_or_else(Token::random, |it| it.token());
        let claims = keys.iter().map(|key| self.claim(pending, key, token())).collect();
        match attempt(self.inner.clone(), claims, place, self.terms()).await? {
            Attempt::Granted(leases) => Ok(Outcome::Done(leases)),
            Attempt::Held { key, free_in, place } => {
                pending.set_place_in_store(place);
                if self.needs(&key) {
                    pending.set_in_the_way(key);
                }
                Ok(Outcome::Held { free_in })
            }
            Attempt::Silent => Ok(Outcome::Silent),
        }
    }

    pub(super) fn claim(&self, pending: &Pending<S>, key: &Key, token: Token) -> Claim {
        let holder = self.inner.keeper.holder().clone();
        // Such a store keeps the order itself, so the claim is not for a ticket.
        let is_the_key = self.mode == Mode::Exclusive;
        let queue = pending.waits && self.waits() && is_the_key && self.inner.store().profile().queues;
        Claim { key: key.clone(), token, holder, ttl: self.ttl, queue }
    }
}
