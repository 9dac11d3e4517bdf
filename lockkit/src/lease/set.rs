//! Several leases at once: all of them or none.

use std::{
    fmt,
    future::{Future, poll_fn},
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use sqlx::Pool;
use tokio::time::{Instant, timeout};

use super::{
    Inner, Leases, check_ttl,
    held::{Lease, Released, Unheard, commit, is_heard},
};
use crate::{
    error::{Error, Result},
    guard::{Watch, guarded},
    key::Key,
    lease::{
        bounded::limit_for,
        kept::{Kept, Terms, release_failed},
        store::{AcquiredAll, BUSY_PAUSE, Claim, LeaseStore, Token},
        wait::{FIRST_ANSWER, Turn, Waited, observed},
    },
    observe::Strategy,
    policy::{OnLost, Wait, check_wait},
    scope::under,
    sql::{LeaseOps, tx::AnyTx},
    task::finished,
};

impl<S: LeaseStore> Leases<S> {
    /// A request for the leases of all of these keys: all are taken or none is.
    ///
    /// A key that is given twice is asked for once. The leases are taken in the order of their keys, whatever the order
    /// here, and none is kept while another is waited for, so two callers who want the same keys never wait for each other
    /// for ever.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let both = leases.all(["account:7", "account:3"]).acquire().await?;
    /// assert!(leases.lease("account:3").try_acquire().await?.is_none());
    /// both.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn all(&self, keys: impl IntoIterator<Item = impl Into<Key>>) -> MultiRequest<S> {
        let mut keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        keys.sort_unstable();
        keys.dedup();
        let inner = self.0.clone();
        MultiRequest { keys, ttl: inner.ttl, wait: inner.wait, min_hold: Duration::ZERO, on_lost: OnLost::Stop, inner }
    }
}

/// A request for several leases, made by [`Leases::all`].
#[derive(Debug)]
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct MultiRequest<S: LeaseStore> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) keys: Vec<Key>,
    ttl: Duration,
    wait: Duration,
    min_hold: Duration,
    on_lost: OnLost,
}

impl<S: LeaseStore> MultiRequest<S> {
    /// How long the leases live without a renewal. At least 50 ms.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) try before they give up; zero tries once. Defaults to the
    /// wait of the [`Leases`]: [`Wait::DEFAULT`], 10 s, unless set there.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into().limit();
        self
    }

    /// As [`LeaseRequest::min_hold`](crate::LeaseRequest::min_hold), for each of the leases.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = min_hold;
        self
    }

    /// What becomes of the body of [`run`](Self::run) when one of the leases is lost. Defaults to [`OnLost::Stop`].
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.on_lost = on_lost;
        self
    }

    /// The leases, as soon as all of them are free at once. One statement for all of them on PostgreSQL; one for each
    /// elsewhere.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, naming the key that was in the way last; [`Error::Reentrant`] in a body under the
    /// lease of one of the keys; [`Error::InvalidOption`] without any key; otherwise those of [`LeaseRequest::acquire`](crate::LeaseRequest::acquire).
    ///
    /// # Cancel safety
    /// As [`LeaseRequest::acquire`](crate::LeaseRequest::acquire): what was granted is given back at once.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use = "await it, and bind the leases: `let leases = ….acquire().await?`"]
    pub async fn acquire(self) -> Result<MultiLease<S>> {
        self.check()?;
        self.check_not_reentrant()?;
        let line = self.line();
        let leases = observed(Strategy::Lease, &line, Box::pin(self.wait_for_them())).await?;
        Ok(leases.handed_out())
    }

    /// The leases if all of them are free now; `None` when one is held. Asks once and does not queue.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), without [`Error::Contended`].
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn try_acquire(self) -> Result<Option<MultiLease<S>>> {
        self.check()?;
        match self.ask().await? {
            Asked::Granted(leases) => Ok(Some(MultiLease::new(leases, self.on_lost).handed_out())),
            Asked::Held { .. } => Ok(None),
            Asked::Silent => Err(self.silence().await),
        }
    }

    /// Acquires the leases, runs `body`, and releases them. As [`LeaseRequest::run`](crate::LeaseRequest::run), where the
    /// loss of one lease is the loss of all.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and whatever the body returns.
    ///
    /// # Cancel safety
    /// Dropping this future drops the body and releases the leases in the background.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(MultiLease<S>) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let leases = self.acquire().await?;
        let body = body(leases.borrowed());
        leases.end_with(Box::pin(body)).await
    }

    fn check(&self) -> Result<()> {
        if self.keys.is_empty() {
            let reason = "has no keys; give it at least one".to_owned();
            return Err(Error::InvalidOption { option: "all", reason });
        }
        self.keys.iter().try_for_each(Key::check)?;
        check_ttl(self.ttl)?;
        check_wait("wait", self.wait)?;
        check_wait("min_hold", self.min_hold)
    }

    async fn wait_for_them(self) -> Result<MultiLease<S>> {
        let started = Instant::now();
        let deadline = started + self.wait;
        let in_the_way = Mutex::new(None);
        let ask = |_| async {
            match self.ask().await? {
                Asked::Granted(leases) => Ok(Turn::Done(MultiLease::new(leases, self.on_lost))),
                Asked::Held { key, free_in } => {
                    self.inner.check_other_leases(&key, self.ttl).await?;
                    *in_the_way.lock().unwrap_or_else(PoisonError::into_inner) = Some(key);
                    Ok(Turn::Held { free_in })
                }
                Asked::Silent => Ok(Turn::Silent),
            }
        };
        let waited = self.inner.lines.wait_for_any(&self.line(), &self.keys, deadline, ask).await?;
        let key = in_the_way.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (answered, limit) = match (waited, &key) {
            (Waited::Done(leases), _) => return Ok(leases),
            (Waited::NoAnswer, None) => return Err(self.silence().await),
            (Waited::Held | Waited::NoAnswer, _) => (true, BUSY_PAUSE * 5),
            (Waited::NoTurn, _) => (false, FIRST_ANSWER),
        };
        let key = key.unwrap_or_else(|| self.line());
        let waited = started.elapsed();
        // Who holds it is worth one more question, if the answer is quick.
        let holder = match timeout(limit, self.inner.store().look(&key, limit_for(self.ttl))).await {
            Ok(Ok(held)) => held.map(|it| Box::new(self.inner.shown(it).into())),
            Ok(Err(err)) if !answered => return Err(err),
            Err(_) if !answered => return Err(self.silence().await),
            _ => None,
        };
        Err(Error::Contended { key, waited, holder })
    }

    async fn silence(&self) -> Error {
        self.inner.store().silence("acquiring leases", self.keys.first()).await
    }

    /// Those who want the same keys are in one line, which is not that of those who want one of the keys alone.
    fn line(&self) -> Key {
        self.keys.iter().map(Key::as_str).collect::<Vec<_>>().join(" + ").into()
    }

    async fn ask(&self) -> Result<Asked<S>> {
        let Self { inner, keys, ttl, min_hold, on_lost, .. } = self;
        let claim = |key: &Key| {
            let holder = inner.keeper.holder().clone();
            Claim { key: key.clone(), token: Token::random(), holder, ttl: *ttl }
        };
        let terms = |key: &Key| Terms {
            renew_every: inner.renew_every,
            min_hold: *min_hold,
            on_lost: *on_lost,
            line: key.clone(),
        };
        ask_all(inner.clone(), keys.iter().map(claim).collect(), terms).await
    }
}

/// Asks the store once for all of the claims, in a task of its own, as for a single lease. They are in the order of their keys.
pub(super) async fn ask_all<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    claims: Vec<Claim>,
    terms: impl Fn(&Key) -> Terms,
) -> Result<Asked<S>> {
    let terms: Vec<_> = claims.iter().map(|it| terms(&it.key)).collect();
    if inner.keeper.is_closed() {
        return Err(Error::Closed {
            key: claims.iter().map(|it| it.key.as_str()).collect::<Vec<_>>().join(" + ").into(),
        });
    }
    let unfinished = inner.keeper.unfinished();
    let asking = tokio::spawn(async move {
        let _unfinished = unfinished;
        let sent = Instant::now();
        // Some may have been granted even if no answer comes.
        let unheard: Vec<_> = claims.iter().map(|it| Unheard::new(inner.clone(), it.clone())).collect();
        let answer = inner.store().acquire_all(&claims).await;
        if is_heard(&answer) {
            for it in unheard {
                drop(it.defuse());
            }
        }
        match answer {
            Ok(Some(AcquiredAll::Granted(grants))) => {
                let leases =
                    claims.into_iter().zip(terms).zip(grants).map(|((claim, terms), grant)| {
                        Lease::granted(inner.clone(), Kept::new(claim, grant, sent, terms))
                    });
                // All of them, before the first error: each lease gives itself back.
                let leases: Vec<_> = leases.collect();
                let leases = leases.into_iter().collect::<Result<Vec<_>>>()?;
                // An answer that took longer than the leases live is no lease.
                Ok(match leases.iter().find(|it| !it.is_trusted()) {
                    None => Asked::Granted(leases),
                    Some(late) => Asked::Held { key: late.key().clone(), free_in: None },
                })
            }
            Ok(Some(AcquiredAll::Held { key, free_in })) => Ok(Asked::Held { key, free_in }),
            Ok(None) => Ok(Asked::Silent),
            Err(err) => Err(err),
        }
    });
    finished("acquiring leases", asking).await
}

pub(super) enum Asked<S: LeaseStore> {
    Granted(Vec<Lease<S>>),
    Held {
        key: Key,
        free_in: Option<Duration>,
    },
    /// No answer came.
    Silent,
}

/// Several leases that this process holds together, in the order of their keys: those of [`Leases::all`], or several permits
/// ([`LeaseRequest::take`](crate::LeaseRequest::take)). Dropping it releases all of them in the background.
#[must_use = "the leases are released as soon as they are dropped: bind them, `let leases = …` (`let _ = …` drops them at once)"]
pub struct MultiLease<S: LeaseStore> {
    leases: Vec<Lease<S>>,
    on_lost: OnLost,
}

impl<S: LeaseStore> MultiLease<S> {
    pub(super) fn new(mut leases: Vec<Lease<S>>, on_lost: OnLost) -> Self {
        leases.sort_unstable_by(|one, other| one.key().cmp(other.key()));
        Self { leases, on_lost }
    }

    /// As [`Lease::handed_out`].
    pub(super) fn handed_out(self) -> Self {
        let leases = self.leases.into_iter().map(Lease::handed_out).collect();
        Self { leases, on_lost: self.on_lost }
    }

    /// The leases, in the order of their keys.
    pub fn leases(&self) -> &[Lease<S>] {
        &self.leases
    }

    /// The lease of this key.
    pub fn get(&self, key: impl AsRef<str>) -> Option<&Lease<S>> {
        self.leases.iter().find(|it| it.key().as_str() == key.as_ref())
    }

    /// Whether this process may still believe that it holds all of the leases. Local, no I/O.
    pub fn is_trusted(&self) -> bool {
        self.leases.iter().all(Lease::is_trusted)
    }

    /// Resolves when one of the leases is lost, with its key; never otherwise.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) -> Key {
        let mut losses: Vec<_> = self.leases.iter().map(|it| (Box::pin(it.lost()), it.key())).collect();
        poll_fn(|context| {
            let lost = losses.iter_mut().find_map(|(lost, key)| lost.as_mut().poll(context).is_ready().then_some(*key));
            lost.map_or(Poll::Pending, |key| Poll::Ready(key.clone()))
        })
        .await
    }

    /// Gives all of the leases back; [`Released::AlreadyLost`] if one of them had been lost before.
    ///
    /// # Errors
    /// [`Error::Database`] when the store cannot be asked. What is not given back is freed by its ttl.
    ///
    /// # Cancel safety
    /// The release goes on in the background if this future is dropped.
    pub async fn release(self) -> Result<Released> {
        let mut released = Released::Held;
        for lease in self.leases {
            if lease.release().await? == Released::AlreadyLost {
                released = Released::AlreadyLost;
            }
        }
        Ok(released)
    }

    /// The same leases for a body that runs under them.
    pub(crate) fn borrowed(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::borrowed).collect(), on_lost: self.on_lost }
    }

    /// The same leases for the body of a function under the attribute, which cannot give them back.
    pub(crate) fn lent(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::lent).collect(), on_lost: self.on_lost }
    }

    /// Runs `body` under the leases, drops it when one of them is lost, and releases them.
    pub(crate) async fn end_with<T, E: From<Error>>(self, body: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let result = self.guarded(body).await;
        self.end().await;
        result
    }

    /// Releases the leases after their body. What the body did counts whether or not the store hears of the release.
    pub(crate) async fn end(self) {
        release_failed(self.release().await);
    }

    /// Runs `body`, and drops it when one of the leases is lost unless it is to go on.
    pub(crate) async fn guarded<T, E: From<Error>>(&self, body: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        guarded(self.watch(), under(self.leases.iter().map(Lease::lock), body)).await
    }

    /// What runs a body under these leases.
    pub(crate) fn watch(&self) -> Watch<'_> {
        let check = || self.leases.iter().try_for_each(Lease::check_body);
        let lost = async {
            let key = self.lost().await;
            let lost = self.get(&key).and_then(|it| it.check_trusted().err());
            lost.expect("BUG: a lease that was lost stays lost")
        };
        Watch::new(self.on_lost, check, lost)
    }
}

impl<DB: LeaseOps> MultiLease<Pool<DB>> {
    /// As [`Lease::verify`](crate::Lease::verify), for all of the leases.
    ///
    /// # Errors
    /// As [`Lease::verify`](crate::Lease::verify).
    ///
    /// # Cancel safety
    /// The rows may or may not be locked in the transaction; roll that back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        for lease in &self.leases {
            lease.verify(conn).await?;
        }
        Ok(())
    }

    /// As [`Lease::commit`](crate::Lease::commit): commits if, and only if, all of the leases are still held at that
    /// moment, and gives them back.
    ///
    /// # Errors
    /// As [`Lease::commit`](crate::Lease::commit).
    ///
    /// # Cancel safety
    /// As [`Lease::commit`](crate::Lease::commit).
    pub async fn commit<T: AnyTx<DB>>(self, tx: T) -> Result<()> {
        commit(&self.leases, tx).await
    }
}

impl<S: LeaseStore> fmt::Debug for MultiLease<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.leases).finish()
    }
}
