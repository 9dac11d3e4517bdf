//! A request for one lease or several: a single attempt, with waiting, or around a body of work.

use std::{fmt, future::Future, marker::PhantomData, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Inner,
    attempt::{Attempt, attempt},
    check_ttl,
    held::Lease,
    pending::Pending,
    refused::understood,
    set::MultiLease,
    shared::MAX_PERMITS,
};
use crate::{
    error::{Error, Result},
    guard::{Watch, guarded},
    key::Key,
    lease::{
        bounded::limit_for,
        life::kept::{Terms, Wants},
        store::{Claim, LeaseStore, Token},
        wait::{self, Outcome, Waited},
    },
    observe::{Strategy, observed},
    policy::{OnLost, Wait, check_wait},
    scope::Record,
};

/// A request for one lease, made by [`Leases::lease`](crate::Leases::lease),
/// [`Leases::semaphore`](crate::Leases::semaphore) or [`Leases::rw`](crate::Leases::rw); or for several leases
/// together, made by [`Leases::all`](crate::Leases::all) or [`take`](Self::take). `L` is the type that it yields: a
/// [`Lease`] or a [`MultiLease`].
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct LeaseRequest<S: LeaseStore, L = Lease<S>> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) key: Key,
    pub(super) mode: Mode,
    pub(super) ttl: Duration,
    wait: Duration,
    min_hold: Duration,
    on_lost: OnLost,
    fair: bool,
    yields: PhantomData<fn() -> L>,
}

/// The leases that are requested under the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// The lease of the key itself.
    Exclusive,
    /// The leases of these keys, which are sorted and unique. The request's key is the combination of them.
    All(Vec<Key>),
    /// One permit of a semaphore with this many permits.
    Permit(u32),
    /// Several permits together.
    Permits {
        /// The number of permits of the semaphore.
        of: u32,
        /// The number of requested permits.
        take: u32,
    },
    /// `take` was called on a request that is not for a semaphore.
    NoPermits,
    /// A read lease. Other readers may hold the key too.
    Read,
    /// The write lease. No reader and no other writer holds the key.
    Write,
}

/// The type that a request yields: a [`Lease`] or a [`MultiLease`].
pub trait Yields: Sized + sealed::Sealed {
    /// The store of the leases.
    type Store: LeaseStore;

    #[doc(hidden)]
    fn of(leases: Vec<Lease<Self::Store>>, on_lost: OnLost) -> Self;

    /// Handles to the same leases for a body that runs under them.
    #[doc(hidden)]
    #[must_use]
    fn borrowed(&self) -> Self;

    /// Handles to the same leases for the body of a function under the attribute. The body cannot release them.
    #[doc(hidden)]
    #[must_use]
    fn lent(&self) -> Self;

    /// The watch that runs a body under the leases, and the record of its locks.
    #[doc(hidden)]
    fn watched(&self) -> (Watch<'_>, Record);

    /// Releases the leases after their body. A failed release does not change the result of the body.
    #[doc(hidden)]
    fn end_after_body(self) -> impl Future<Output = ()>;

    /// Runs `body` under the leases, drops it when a lease is lost, and releases the leases.
    #[doc(hidden)]
    fn end_with<T, E: From<Error>>(
        self,
        body: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, E>> {
        async move {
            let (watch, record) = self.watched();
            let result = guarded(watch, record.run(body)).await;
            self.end_after_body().await;
            result
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

impl<S: LeaseStore> sealed::Sealed for Lease<S> {}
impl<S: LeaseStore> sealed::Sealed for MultiLease<S> {}

impl<S: LeaseStore> LeaseRequest<S> {
    /// Serves waiting processes strictly in the order of their arrival.
    ///
    /// The callers of one process always queue in order. After a wait of 50 ms, a plain request cannot be starved by
    /// other processes, but they may still overtake it. A fair request takes a ticket (a short lease
    /// `<key>/queue/<number>`) as soon as it finds the lease held, and asks for the lease when there is no older
    /// ticket. For a strict order, all requests for the lease must be fair.
    ///
    /// A fair request costs two more round trips if there are waiters and one if there are none. A process that dies
    /// while it waits delays the others for the ttl of the lease that it asked for, at most 3 s; if it also held the lease, its
    /// tickets end with the lease. Only for leases made by [`Leases::lease`](crate::Leases::lease).
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// A request for this many permits of a [semaphore](crate::Leases::semaphore) together: either all are taken or
    /// none.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let three = leases.semaphore("report", 5).take(3).acquire().await?;
    /// assert_eq!(three.leases().len(), 3);
    /// assert!(leases.semaphore("report", 5).take(3).try_acquire().await?.is_none());
    /// three.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn take(self, permits: u32) -> LeaseRequest<S, MultiLease<S>> {
        let mode = match self.mode {
            Mode::Permit(of) => Mode::Permits { of, take: permits },
            _ => Mode::NoPermits,
        };
        let Self { inner, key, mode: _, ttl, wait, min_hold, on_lost, fair, yields: _ } = self;
        LeaseRequest { inner, key, mode, ttl, wait, min_hold, on_lost, fair, yields: PhantomData }
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    pub(super) fn new(inner: Arc<Inner<S>>, key: Key, mode: Mode) -> Self {
        Self {
            key,
            mode,
            ttl: inner.ttl,
            wait: inner.wait,
            min_hold: Duration::ZERO,
            on_lost: OnLost::Stop,
            fair: false,
            inner,
            yields: PhantomData,
        }
    }

    /// How long each lease lives without a renewal. At least 50 ms, or the minimum of the store.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) wait before they fail. Zero tries once. Defaults to
    /// the wait of the [`Leases`](crate::Leases): [`Wait::DEFAULT`], 10 s, unless set there.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into().limit();
        self
    }

    /// The minimum time that the lease stays taken, counted from its acquisition. Defaults to zero.
    ///
    /// Use it for a job that runs once a night on several machines whose clocks differ by seconds. The job may end on
    /// one machine before another machine starts it, and then it would run twice. If `min_hold` is longer than the
    /// clocks differ, the key of a lease that is released early stays taken, without a holder, until `min_hold` has
    /// passed.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = min_hold;
        self
    }

    /// Whether the body of [`run`](Self::run) is stopped when a lease is lost. Defaults to [`OnLost::Stop`].
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.on_lost = on_lost;
        self
    }
}

impl<S: LeaseStore, L: Yields<Store = S>> LeaseRequest<S, L> {
    /// Acquires the lease as soon as it is free, or all of the leases as soon as all of them are free at once.
    ///
    /// The callers of one process queue in order. Only the first of them asks the store, and it holds no connection
    /// between two attempts. A holder of the same process hands its lease to the first caller without asking the store
    /// ([`LeasesBuilder::hand_over`](crate::store::LeasesBuilder::hand_over)). From the grant on, the lease is renewed in
    /// the background.
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
    /// [`Error::PoolStarved`] or [`Error::Database`] when the store did not answer in that time, or when on SQLite another
    /// transaction, such as the caller's own, had the database locked ([`Fault::Contended`](crate::Fault::Contended));
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropping this future loses the pending in the queue. If a query is in flight, its answer is still received, and a
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
        Ok(self.hand_out(leases))
    }

    /// The lease if it is free now, or all of the leases if all are free. `None` if one is held, even by this task.
    /// Makes one attempt and does not queue.
    ///
    /// It may overtake waiting requests. A [`fair`](LeaseRequest::fair) request does not: it also returns `None` while
    /// others queue. Leases that the attempt took without success (a writer's lease while readers hold theirs) are
    /// released before it returns.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::Database`].
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
        Ok(leases.map(|it| self.hand_out(it)))
    }

    /// Acquires the lease, runs `body`, and releases the lease.
    ///
    /// When the lease is lost, the body is dropped at its next await point, and the result is [`Error::Lost`]. The body
    /// gets its own [`Lease`] handle, to verify or commit with. Dropping that handle releases nothing.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and the errors of the body.
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
        let body = body(lease.borrowed());
        lease.end_with(Box::pin(body)).await
    }

    /// Marks the leases as returned to the caller. `min_hold` does not apply to a lease that is released before that.
    fn hand_out(&self, leases: Vec<Lease<S>>) -> L {
        leases.iter().for_each(Lease::hand_out);
        L::of(leases, self.on_lost)
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    fn check(&self) -> Result<()> {
        match &self.mode {
            Mode::All(keys) => keys.iter().try_for_each(Key::check)?,
            _ => self.key.check()?,
        }
        check_ttl(self.inner.store(), self.ttl)?;
        check_wait("wait", self.wait)?;
        check_wait("min_hold", self.min_hold)?;
        self.check_side_leases()?;
        match &self.mode {
            Mode::All(keys) if keys.is_empty() => {
                let reason = "has no keys; give it at least one".to_owned();
                Err(Error::InvalidOption { option: "all", reason })
            }
            Mode::NoPermits => {
                let reason = "is for the permits of a semaphore; ask for several keys with `Leases::all`".to_owned();
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Permit(0) | Mode::Permits { of: 0, .. } => {
                let reason = "has no permits; give it at least one".to_owned();
                Err(Error::InvalidOption { option: "semaphore", reason })
            }
            Mode::Permit(permits) | Mode::Permits { of: permits, .. } if *permits > MAX_PERMITS => {
                let reason = format!("has {permits} permits; give it {MAX_PERMITS} at most");
                Err(Error::InvalidOption { option: "semaphore", reason })
            }
            Mode::Permits { take: 0, .. } => {
                let reason = "is zero; take at least one permit".to_owned();
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Permits { of, take } if take > of => {
                let reason = format!("asks for {take} permits, and the semaphore has {of}; take {of} at most");
                Err(Error::InvalidOption { option: "take", reason })
            }
            Mode::Permit(_) | Mode::Permits { .. } | Mode::Read | Mode::Write if self.fair => {
                let reason = "is for single leases; semaphores and readers have no queue among processes".to_owned();
                Err(Error::InvalidOption { option: "fair", reason })
            }
            _ => Ok(()),
        }
    }

    /// Refuses what needs leases beside the one that is asked for, if the store does not keep them.
    fn check_side_leases(&self) -> Result<()> {
        let option = match self.mode {
            Mode::Permit(_) | Mode::Permits { .. } => "semaphore",
            Mode::Read | Mode::Write => "rw",
            Mode::Exclusive | Mode::All(_) if self.fair => "fair",
            Mode::Exclusive | Mode::All(_) | Mode::NoPermits => return Ok(()),
        };
        if self.inner.store().profile().side_leases {
            return Ok(());
        }
        let reason = "needs further leases beside the key's own, which this store cannot keep or list; use one server of \
                      it, or a database";
        Err(Error::InvalidOption { option, reason: reason.to_owned() })
    }

    fn check_not_closed(&self) -> Result<()> {
        if self.inner.keeper.is_closed() { Err(Error::Closed { key: self.key.clone() }) } else { Ok(()) }
    }

    /// Asks once, and gives back what it took on the way.
    async fn try_once(&self) -> Result<Option<Vec<Lease<S>>>> {
        let pending = Pending::default();
        let outcome = if self.fair { self.try_fairly(&pending).await } else { self.try_now(&pending, true).await };
        if !matches!(outcome, Ok(Outcome::Done(_))) {
            pending.give_back().await;
        }
        match understood(&pending, outcome)? {
            Outcome::Done(leases) => Ok(Some(leases)),
            Outcome::Held { .. } | Outcome::Queued { .. } => Ok(None),
            Outcome::Silent => Err(self.silence(&pending).await),
        }
    }

    /// Waits for the leases.
    async fn wait_for_it(&self) -> Result<Vec<Lease<S>>> {
        let pending = &Pending::waiting();
        let started = Instant::now();
        let deadline = started + self.wait;
        // A waiting writer may be ahead in the queue. It waits for this task's read lease, so the request must not
        // queue behind it.
        if self.reads_already()
            && let Outcome::Done(leases) = understood(pending, Box::pin(self.try_now(pending, true)).await)?
        {
            return Ok(leases);
        }
        // Boxed, as what follows the wait: callers who wait their turn then need a tenth of the memory.
        let attempt = |likely_free: bool| Box::pin(self.attempt_once(pending, likely_free));
        let freed = |key| self.inner.freed(key);
        let takes_over = self.mode == Mode::Exclusive && !self.fair && self.inner.hand_over().is_some();
        let waited = loop {
            let wants = takes_over.then(|| Wants { ttl: self.ttl, terms: self.terms() });
            let wait = wait::Wait { queue: self.queue(), keys: self.keys(), deadline, wants, under: self.under() };
            match self.inner.queues.wait(wait, freed, attempt).await? {
                Waited::Done(leases) => return Ok(leases),
                Waited::Handed(lease) => {
                    self.inner.keeper.take_over(lease.kept());
                    if lease.is_trusted() {
                        return Ok(vec![lease]);
                    }
                    self.check_not_closed()?;
                }
                Waited::Refused(refused) => break refused,
            }
        };
        Err(Box::pin(self.given_up(pending, started, waited)).await)
    }

    /// One attempt of the caller at the head of the queue.
    async fn attempt_once(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        self.check_not_closed()?;
        let outcome = match &self.mode {
            Mode::All(_) => self.try_now(pending, likely_free).await,
            // The store keeps the order of the waiting claims, or has no room for tickets.
            Mode::Exclusive if self.inner.store().profile().queues || !self.inner.store().profile().side_leases => {
                self.try_now(pending, likely_free).await
            }
            _ if self.fair => self.attempt_fairly(pending, likely_free).await,
            _ => self.attempt_patiently(pending, likely_free).await,
        };
        let outcome = understood(pending, outcome)?;
        if let (Mode::Exclusive | Mode::All(_), Outcome::Held { .. } | Outcome::Queued { .. }) = (&self.mode, &outcome)
        {
            let key = pending.in_the_way().unwrap_or_else(|| self.key.clone());
            self.inner.check_other_leases(&key, self.ttl).await?;
        }
        Ok(outcome)
    }

    /// One attempt at the leases of the mode. Ignores tickets.
    pub(super) async fn try_now(&self, pending: &Pending<S>, likely_free: bool) -> Result<Outcome<Vec<Lease<S>>>> {
        let outcome = match &self.mode {
            Mode::Exclusive => self.try_keys(pending, std::slice::from_ref(&self.key), likely_free).await,
            Mode::All(keys) => self.try_keys(pending, keys, likely_free).await,
            Mode::Permit(permits) => self.try_slot(pending, "permit", *permits, likely_free).await,
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
                // A grant that came too late is being given back. No other holder has the lease.
                if pending.has_claimed(held.token) {
                    return Ok(Outcome::Silent);
                }
                pending.saw(&held);
                if self.keys().contains(&key) {
                    pending.set_in_the_way(key);
                }
                return Ok(Outcome::Held { free_in: Some(held.info.expires_in) });
            }
        }
        keys.iter().try_for_each(Key::check)?;
        // A token is sent again only for a claim that the store queues. Any other claim may have been granted and given back.
        let queued = pending.take_queued();
        let token = || queued.as_ref().map_or_else(Token::random, |it| it.token());
        let claims = keys.iter().map(|key| self.claim(pending, key, token())).collect();
        match attempt(self.inner.clone(), claims, queued, self.terms()).await? {
            Attempt::Granted(leases) => Ok(Outcome::Done(leases)),
            Attempt::Held { key, free_in, queued } => {
                pending.set_queued(queued);
                if self.keys().contains(&key) {
                    pending.set_in_the_way(key);
                }
                Ok(Outcome::Held { free_in })
            }
            Attempt::Silent => Ok(Outcome::Silent),
        }
    }

    /// The keys of the requested leases, if they are known in advance.
    pub(super) fn keys(&self) -> &[Key] {
        match &self.mode {
            Mode::Exclusive => std::slice::from_ref(&self.key),
            Mode::All(keys) => keys,
            _ => &[],
        }
    }

    /// The key of the request's queue in this process. Readers and writers of one key share one queue. Requests for the
    /// same key set share one queue, separate from the single keys' queues.
    pub(super) fn queue(&self) -> Key {
        match self.mode {
            Mode::Exclusive | Mode::All(_) => self.key.clone(),
            Mode::Permit(_) | Mode::Permits { .. } | Mode::NoPermits => format!("{}/permit", self.key).into(),
            Mode::Read | Mode::Write => format!("{}/rw", self.key).into(),
        }
    }

    /// Whether the request has a nonzero wait.
    pub(super) fn waits(&self) -> bool {
        !self.wait.is_zero()
    }

    pub(super) fn claim(&self, pending: &Pending<S>, key: &Key, token: Token) -> Claim {
        let holder = self.inner.keeper.holder().clone();
        pending.claims(token);
        let is_the_key = self.mode == Mode::Exclusive && *key == self.key;
        let queue = pending.waits && self.waits() && is_the_key && self.inner.store().profile().queues;
        Claim { key: key.clone(), token, holder, ttl: self.ttl, queue }
    }

    pub(super) fn terms(&self) -> Terms {
        let Self { inner, min_hold, on_lost, .. } = self;
        let queue = match self.mode {
            // Each of several leases wakes the queue of its own key. The queue of a fair request is that of all processes.
            Mode::All(_) => None,
            Mode::Exclusive if self.fair => None,
            _ => Some(self.queue()),
        };
        Terms { renew_every: inner.renew_every, min_hold: *min_hold, on_lost: *on_lost, queue }
    }
}

impl<S: LeaseStore, L> fmt::Debug for LeaseRequest<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest")
            .field("key", &self.key)
            .field("mode", &self.mode)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}
