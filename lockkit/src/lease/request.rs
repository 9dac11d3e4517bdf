//! How a lease is asked for: once, with waiting, or around a body of work.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

use super::{
    Inner, check_ttl,
    held::{Lease, Unheard, is_heard},
    permits::PermitsRequest,
    place::Place,
    shared::MAX_PERMITS,
};
use crate::{
    error::{Error, Result},
    key::Key,
    lease::{
        bounded::{is_silence, limit_for},
        kept::{Kept, Terms},
        store::{Acquired, BUSY_PAUSE, Claim, Held, LeaseStore, Token},
        wait::{FIRST_ANSWER, Turn, Waited, observed},
    },
    observe::Strategy,
    policy::{OnLost, Wait, check_wait},
    task::finished,
};

/// A request for one lease, made by [`Leases::lease`](crate::Leases::lease), [`Leases::semaphore`](crate::Leases::semaphore) or
/// [`Leases::rw`](crate::Leases::rw).
#[derive(Debug)]
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct LeaseRequest<S: LeaseStore> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) key: Key,
    pub(super) mode: Mode,
    pub(super) ttl: Duration,
    wait: Duration,
    min_hold: Duration,
    pub(super) on_lost: OnLost,
    fair: bool,
}

/// What is asked for under the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// The lease of the key itself.
    Exclusive,
    /// One of this many permits.
    Permit(u32),
    /// Several of the permits together.
    Permits {
        /// How many there are.
        of: u32,
        /// How many of them are wanted.
        take: u32,
    },
    /// A lease beside those of other readers.
    Read,
    /// A lease beside no other.
    Write,
}

impl<S: LeaseStore> LeaseRequest<S> {
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
        }
    }

    /// How long the lease lives without a renewal. At least 50 ms.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) try before they give up; zero tries once. Defaults to the
    /// wait of the [`Leases`](crate::Leases): [`Wait::DEFAULT`], 10 s, unless set there.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into().limit();
        self
    }

    /// How long the lease stays taken at least, counted from when it was acquired. Defaults to zero.
    ///
    /// A job that runs once a night on several machines whose clocks differ by seconds may be over on one before it starts
    /// on the next, which would run it again. With a `min_hold` longer than the clocks differ, the lease that was released
    /// early stays taken, by nobody, until then.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = min_hold;
        self
    }

    /// What becomes of the body of [`run`](Self::run) when the lease is lost. Defaults to [`OnLost::Stop`].
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.on_lost = on_lost;
        self
    }

    /// Serves waiting processes strictly in the order in which they came.
    ///
    /// Callers of one process queue in order anyway, and a plain request that has waited for 50 ms is not kept out by
    /// other processes, but may be overtaken. A fair request takes a ticket (a short lease of its own,
    /// `<key>/queue/<number>`) as soon as the lease is held, and asks for the lease when no older ticket is left. For a
    /// strict order, all requests for the lease must be fair. It costs two round trips more when somebody waits and one
    /// when nobody does, and a process that dies while it waits holds the others up for the ttl of the lease it asked
    /// for, 3 s at most. For leases made by [`Leases::lease`](crate::Leases::lease) only.
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }

    /// The lease, as soon as it is free.
    ///
    /// Callers of one process queue in order, and only the first of them asks the store, without holding a connection
    /// between two questions. The lease is renewed in the background from now on.
    ///
    /// No process that waits is kept out by others. A request that has waited for 50 ms takes a ticket, a short lease
    /// named `<key>/queue/<number>`, and a process that had the lease within the last second lets the owners of tickets go
    /// first. Shorter waits write nothing. The order of the tickets is kept roughly; [`fair`](Self::fair) keeps it strictly.
    ///
    /// Leases are not re-entrant, because a lease that one task holds twice would be freed by the first of two releases. In a
    /// body that [`run`](Self::run) or `#[with_lock]` runs under the same lease, or under what keeps this request waiting (the
    /// last permit, its own reader or writer), the answer is [`Error::Reentrant`] at once. Beside a lease that the caller keeps
    /// in a variable it waits like any other request, since that lease may be given to another task. To use one lease in
    /// several places, hand it on: [`Lease::share`].
    ///
    /// Bind the lease to a name: `let lease = …`, or `let _lease = …` where it is not used. `let _ = …` drops it at once, and
    /// so gives it back; the lint `let_underscore_drop` of rustc finds that.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, with the holder; [`Error::Reentrant`]; [`Error::PoolStarved`] or [`Error::Database`] when
    /// the store did not answer in that time; [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`],
    /// [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropping this future loses the place in the line. A question that is already on its way is answered all the
    /// same, and what it was granted is given back at once.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use = "await it, and bind the lease: `let lease = ….acquire().await?`"]
    pub async fn acquire(self) -> Result<Lease<S>> {
        self.check()?;
        self.check_not_reentrant()?;
        let place = Place::default();
        let lease = observed(Strategy::Lease, &self.key, Box::pin(self.wait_for_it(&place))).await?;
        Ok(lease.handed_out())
    }

    /// The lease if it is free now; `None` when it is held, be it by this task. Asks once and does not queue.
    ///
    /// It may overtake requests that wait, except where it is [`fair`](Self::fair): then the answer is also `None` while
    /// others queue. What it took on the way (a writer's lease while readers hold theirs) is given back before the answer.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn try_acquire(self) -> Result<Option<Lease<S>>> {
        let lease = self.try_in(&Place::default()).await?;
        Ok(lease.map(Lease::handed_out))
    }

    /// As [`try_acquire`](Self::try_acquire). What else was granted is in the place.
    pub(super) async fn try_in(&self, place: &Place<S>) -> Result<Option<Lease<S>>> {
        self.check()?;
        self.check_not_closed()?;
        let turn = if self.fair { self.try_fairly(place).await } else { self.ask_now(place, true).await };
        if !matches!(turn, Ok(Turn::Done(_))) {
            place.give_back().await;
        }
        match turn? {
            Turn::Done(lease) => Ok(Some(lease)),
            Turn::Held { .. } | Turn::Queued { .. } => Ok(None),
            Turn::Silent => Err(self.silence().await),
        }
    }

    /// Acquires the lease, runs `body`, and releases it.
    ///
    /// The body is dropped at its next await point when the lease is lost, and the result is [`Error::Lost`] then.
    /// It gets a [`Lease`] of its own, to verify or commit with; dropping that one releases nothing.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and whatever the body returns.
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
        F: FnOnce(Lease<S>) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        let body = body(lease.borrowed());
        lease.end_with(Box::pin(body)).await
    }

    /// As many of the permits of a [semaphore](crate::Leases::semaphore) together: all of them or none.
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
    pub fn take(self, permits: u32) -> PermitsRequest<S> {
        PermitsRequest::new(self, permits)
    }

    pub(super) fn check(&self) -> Result<()> {
        self.key.check()?;
        check_ttl(self.ttl)?;
        check_wait("wait", self.wait)?;
        check_wait("min_hold", self.min_hold)?;
        match self.mode {
            Mode::Permit(0) | Mode::Permits { of: 0, .. } => {
                let reason = "has no permits; give it at least one".to_owned();
                Err(Error::InvalidOption { option: "semaphore", reason })
            }
            Mode::Permit(permits) | Mode::Permits { of: permits, .. } if permits > MAX_PERMITS => {
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

    fn check_not_closed(&self) -> Result<()> {
        if self.inner.keeper.is_closed() { Err(Error::Closed { key: self.key.clone() }) } else { Ok(()) }
    }

    /// Waits for the lease. What else was granted is in the place.
    pub(super) async fn wait_for_it(&self, place: &Place<S>) -> Result<Lease<S>> {
        let started = Instant::now();
        let deadline = started + self.wait;
        // A writer that waits is before it in the line, and waits for this very task to have read.
        if self.reads_already()
            && let Turn::Done(lease) = self.ask_now(place, true).await?
        {
            return Ok(lease);
        }
        let line = self.line();
        let ask = |likely_free: bool| self.ask(place, likely_free);
        let (answered, limit) = match self.inner.lines.wait(&line, deadline, ask).await? {
            Waited::Done(lease) => return Ok(lease),
            Waited::Held => (true, BUSY_PAUSE * 5),
            Waited::NoAnswer => (false, BUSY_PAUSE * 5),
            Waited::NoTurn => (false, FIRST_ANSWER),
        };
        place.give_back().await;
        // Who holds it is worth one more question, if the answer is quick.
        let waited = started.elapsed();
        let holder = match timeout(limit, self.in_the_way()).await {
            Ok(Ok(held)) => held.map(|it| Box::new(self.inner.shown(it).into())),
            Ok(Err(err)) if !answered => return Err(err),
            Err(_) if !answered => return Err(self.silence().await),
            _ => None,
        };
        Err(Error::Contended { key: self.key.clone(), waited, holder })
    }

    async fn silence(&self) -> Error {
        self.inner.store().silence("acquiring lease", Some(&self.key)).await
    }

    /// Asks once, in the order of those who wait.
    async fn ask(&self, place: &Place<S>, likely_free: bool) -> Result<Turn<Lease<S>>> {
        self.check_not_closed()?;
        let turn = if self.fair {
            self.ask_fairly(place, likely_free).await
        } else {
            self.ask_patiently(place, likely_free).await
        };
        let turn = match turn {
            Err(err) if is_silence(&err) => Turn::Silent,
            turn => turn?,
        };
        if let (Mode::Exclusive, Turn::Held { .. } | Turn::Queued { .. }) = (self.mode, &turn) {
            self.inner.check_other_leases(&self.key, self.ttl).await?;
            if let Some(ears) = &self.inner.ears {
                let inner = Arc::downgrade(&self.inner);
                place.listening.get_or_init(|| ears.listen_for(&inner, self.inner.store().unbounded(), &self.key));
            }
        }
        Ok(turn)
    }

    /// Asks once for what the mode says, whoever else waits.
    pub(super) async fn ask_now(&self, place: &Place<S>, likely_free: bool) -> Result<Turn<Lease<S>>> {
        match self.mode {
            Mode::Exclusive => self.ask_for(&self.key, likely_free).await,
            Mode::Permit(permits) => self.ask_for_permit(permits, likely_free).await,
            Mode::Permits { of, take } => self.ask_for_permits(place, of, take).await,
            Mode::Read => self.ask_to_read(likely_free).await,
            Mode::Write => self.ask_to_write(place, likely_free).await,
        }
    }

    /// Asks for the lease of this key; looks first, which writes nothing, where that is likely enough.
    pub(super) async fn ask_for(&self, key: &Key, likely_free: bool) -> Result<Turn<Lease<S>>> {
        if !likely_free && let Some(held) = self.inner.store().look(key, limit_for(self.ttl)).await? {
            return Ok(Turn::Held { free_in: Some(held.info.expires_in) });
        }
        key.check()?;
        ask(self.inner.clone(), self.claim(key), self.terms()).await
    }

    /// The waiting line of this process. Readers and writers of one key are in one line.
    pub(super) fn line(&self) -> Key {
        match self.mode {
            Mode::Exclusive => self.key.clone(),
            Mode::Permit(_) | Mode::Permits { .. } => format!("{}/permit", self.key).into(),
            Mode::Read | Mode::Write => format!("{}/rw", self.key).into(),
        }
    }

    /// Who has what is asked for.
    async fn in_the_way(&self) -> Result<Option<Held>> {
        let (store, limit) = (self.inner.store(), limit_for(self.ttl));
        Ok(match self.mode {
            Mode::Exclusive => store.look(&self.key, limit).await?,
            Mode::Permit(_) | Mode::Permits { .. } => store.list(&format!("{}/permit/", self.key), 1).await?.pop(),
            Mode::Read => store.look(&self.writer(), limit).await?,
            Mode::Write => match store.list(&format!("{}/reader/", self.key), 1).await?.pop() {
                Some(reader) => Some(reader),
                None => store.look(&self.writer(), limit).await?,
            },
        })
    }

    /// Whether it waits at all.
    pub(super) fn waits(&self) -> bool {
        !self.wait.is_zero()
    }

    pub(super) fn claim(&self, key: &Key) -> Claim {
        let holder = self.inner.keeper.holder().clone();
        Claim { key: key.clone(), token: Token::random(), holder, ttl: self.ttl }
    }

    pub(super) fn terms(&self) -> Terms {
        let Self { inner, min_hold, on_lost, .. } = self;
        Terms { renew_every: inner.renew_every, min_hold: *min_hold, on_lost: *on_lost, line: self.line() }
    }
}

/// Asks the store once.
///
/// In a task of its own: the claim is answered for even if the caller is dropped meanwhile. A lease that nobody takes
/// from the task is dropped with its result, and so released.
async fn ask<S: LeaseStore>(inner: Arc<Inner<S>>, claim: Claim, terms: Terms) -> Result<Turn<Lease<S>>> {
    if inner.keeper.is_closed() {
        return Err(Error::Closed { key: claim.key });
    }
    let unfinished = inner.keeper.unfinished();
    let asking = tokio::spawn(async move {
        let _unfinished = unfinished;
        let sent = Instant::now();
        // It may have been granted even if no answer comes.
        let unheard = Unheard::new(inner.clone(), claim.clone());
        let answer = inner.store().acquire(&claim).await;
        if is_heard(&answer) {
            drop(unheard.defuse());
        }
        match answer {
            Ok(Some(Acquired::Granted(grant))) => {
                let lease = Lease::granted(inner, Kept::new(claim, grant, sent, terms))?;
                // An answer that took longer than the lease lives is no lease.
                Ok(if lease.is_trusted() { Turn::Done(lease) } else { Turn::Held { free_in: None } })
            }
            Ok(Some(Acquired::Held { free_in })) => Ok(Turn::Held { free_in }),
            Ok(None) => Ok(Turn::Silent),
            Err(err) => Err(err),
        }
    });
    finished("acquiring lease", asking).await
}
