//! A lease that was granted: what its holder can ask of it, and how it ends.

use std::{fmt, future::Future, iter::once_with, sync::Arc, time::Duration};

use sqlx::Pool;
use tokio::{
    runtime,
    time::{Instant, sleep, timeout},
};

use super::{Inner, check_ttl, reentry::realm};
use crate::{
    error::{Error, Fault, LossReason, Result},
    fence::Fence,
    guard::{Guard, Hold, Watch, guarded},
    key::Key,
    lease::{
        bounded::limit_for,
        keeper::Unfinished,
        kept::{Kept, release_failed},
        store::{BUSY_PAUSE, Claim, LeaseStore, Previous, Release, Renewal, Scoped},
    },
    observe::{Strategy, holding},
    scope::{Lock, under},
    sql::{
        LeaseOps, depth, failed_on_own_table,
        tx::{AnyTx, ROLLBACK_LIMIT},
    },
    task::{no_answer, timed_out},
};

/// What became of a lease that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// It was held until now, and is free.
    Held,
    /// It had been lost before: whatever was done since then was done without it. Nothing was changed.
    AlreadyLost,
}

/// A lease that this process holds, renewed in the background until it is given back.
///
/// Dropping it releases it in the background, best effort; the ttl is the backstop. Prefer
/// [`release`](Self::release), which says whether the lease was held to the end, or [`commit`](Self::commit), which
/// makes a transaction depend on it.
#[must_use = "the lease is released as soon as it is dropped: bind it, `let lease = …` (`let _ = …` drops it at once)"]
pub struct Lease<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    /// Common to all shares of the lease; absent in the lease that a body run under it gets.
    owned: Option<Arc<Guard<Owned<S>>>>,
}

impl<S: LeaseStore> Lease<S> {
    /// A lease that comes after [`Leases::close`](crate::Leases::close) is given back.
    pub(super) fn granted(inner: Arc<Inner<S>>, kept: Kept) -> Result<Self> {
        let kept = Arc::new(kept);
        let is_kept = inner.keeper.keep(&kept);
        let owned = Owned { kept: kept.clone(), inner: inner.clone() };
        let owned = Some(Arc::new(Guard::new(owned)));
        let lease = Self { kept, inner, owned };
        if is_kept { Ok(lease) } else { Err(Error::Closed { key: lease.kept.key.clone() }) }
    }

    /// The same lease for a body that runs under it.
    pub(crate) fn borrowed(&self) -> Self {
        Self { kept: self.kept.clone(), inner: self.inner.clone(), owned: None }
    }

    /// The same lease for the body of a function under the attribute, which cannot give it back.
    pub(crate) fn lent(&self) -> Self {
        self.kept.set_ends_with_body();
        self.borrowed()
    }

    /// What makes this acquisition unique.
    #[cfg(feature = "testing")]
    pub(crate) fn token(&self) -> crate::lease::store::Token {
        self.kept.token
    }

    /// Another handle to the same lease, which is released when the last of them is released or dropped.
    ///
    /// This is how code that holds a lease hands it to code that needs it too. Acquiring the key a second time would
    /// wait for the first: a lock that let the same process in twice could not tell two of its tasks apart.
    ///
    /// A share of the lease that a body run under it got ends with that body.
    pub fn share(&self) -> Self {
        Self { kept: self.kept.clone(), inner: self.inner.clone(), owned: self.owned.clone() }
    }

    /// The lease's key.
    pub fn key(&self) -> &Key {
        &self.kept.key
    }

    /// The fencing token: greater than that of every holder of this key before.
    pub fn fence(&self) -> Fence {
        self.kept.grant.fence
    }

    /// Whom the lease was taken over from, if the holder before let it expire instead of giving it back: it died, hung or
    /// was cut off, and may have left work half done.
    pub fn previous(&self) -> Option<&Previous> {
        self.kept.grant.previous.as_ref()
    }

    /// The instant after which this process must stop believing that it holds the lease, unless a renewal moves it:
    /// the start of the last successful request plus the ttl, less 1 % (at least 10 ms). Monotonic.
    ///
    /// The clock behind it counts while the process is stopped, but on Linux not while the whole machine sleeps:
    /// after that only the fence, [`verify`](Self::verify) and [`commit`](Self::commit) protect.
    pub fn trusted_until(&self) -> std::time::Instant {
        self.kept.until().into_std()
    }

    /// Whether this process may still believe that it holds the lease. Local, no I/O.
    ///
    /// True now says nothing of a moment later; what must not happen without the lease belongs in a transaction that
    /// ends with [`commit`](Self::commit).
    pub fn is_trusted(&self) -> bool {
        self.kept.lost().is_none()
    }

    /// Resolves when the lease is lost, never otherwise. Works without reaching the store.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) -> LossReason {
        self.kept.wait_until_lost().await
    }

    /// Makes the lease live for at least `ttl` from now, and renews it with that ttl from here. Never shortens it.
    ///
    /// # Errors
    /// [`Error::Lost`] when it is not held any more; [`Error::InvalidOption`]; [`Error::Database`] when the store
    /// cannot be asked: the lease goes on until its trust runs out.
    ///
    /// # Cancel safety
    /// The lease is extended or not; it stays held either way, at least as long as before.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        check_ttl(ttl)?;
        self.inner.keeper.visit();
        while self.is_trusted() {
            let sent = Instant::now();
            let renewal = Renewal { key: self.kept.key.clone(), token: self.kept.token, ttl };
            match self.inner.store().renew(&[renewal], limit_for(self.kept.ttl())).await?.pop() {
                Some(Scoped::Done) => {
                    self.kept.set_ttl(ttl);
                    self.kept.renewed(sent, ttl);
                    self.inner.keeper.renewed(&self.kept);
                    break;
                }
                Some(Scoped::Gone) => self.kept.lose(LossReason::Stolen),
                // Another statement has its row locked.
                Some(Scoped::Busy) | None => sleep(BUSY_PAUSE).await,
            }
        }
        self.check_trusted()
    }

    /// Gives the lease back, and says whether it was held until now. Of several [shares](Self::share) the last one does.
    ///
    /// While a transaction of your own pins the lease ([`verify`](Self::verify)) this waits for its end: end it first.
    ///
    /// The key stays known, so that the next holder's fence is greater.
    ///
    /// # Errors
    /// [`Error::Database`] when the store cannot be asked. The lease is not renewed any more, and its ttl frees it.
    /// [`Error::InvalidOption`] for the lease of a function under `#[with_lock]`, which gives it back itself when its body
    /// returns; it stays held.
    ///
    /// # Cancel safety
    /// The release goes on in the background if this future is dropped.
    pub async fn release(mut self) -> Result<Released> {
        if self.owned.is_none() && self.kept.ends_with_body() {
            let reason =
                "is for leases that were acquired by hand; `#[with_lock]` gives this one back when the body returns";
            return Err(Error::InvalidOption { option: "release", reason: reason.to_owned() });
        }
        let owned = match self.owned.take() {
            None => None,
            Some(owned) => match Arc::into_inner(owned) {
                Some(last) => Some(last),
                None => return Ok(if self.is_trusted() { Released::Held } else { Released::AlreadyLost }),
            },
        };
        let released = give_back(&self.inner, &self.kept).await?;
        owned.map(Guard::defuse);
        Ok(released)
    }

    /// For the caller. What is given back before that was not held by anybody.
    pub(super) fn handed_out(self) -> Self {
        self.kept.hand_out();
        self
    }

    /// Gives back what was granted a moment ago, without waking those who wait: nothing has changed for them.
    pub(super) async fn back_out(self) -> Result<()> {
        self.inner.keeper.forget(self.kept.token);
        let release = Release { min_hold: Duration::ZERO, ..self.kept.release() };
        while self.inner.store().release(&release, limit_for(self.kept.ttl())).await? == Scoped::Busy {
            sleep(BUSY_PAUSE).await;
        }
        self.kept.lose(LossReason::Released);
        Ok(())
    }

    /// Runs `body` under this lease, drops it when the lease is lost, and releases the lease.
    pub(crate) async fn end_with<T, E: From<Error>>(self, body: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let result = self.guarded(body).await;
        self.end().await;
        result
    }

    /// Releases the lease after its body. What the body did counts whether or not the store hears of the release.
    pub(crate) async fn end(self) {
        if self.kept.lost().is_none() {
            release_failed(self.release().await);
        }
    }

    /// Runs `body`, and drops it when the lease is lost unless it is to go on.
    pub(crate) async fn guarded<T, E: From<Error>>(&self, body: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        guarded(self.watch(), under(once_with(|| self.lock()), body)).await
    }

    /// What runs a body under this lease.
    pub(crate) fn watch(&self) -> Watch<'_> {
        self.inner.keeper.visit();
        let lost = async { self.lost_error(self.kept.wait_until_lost().await) };
        let span = holding(Strategy::Lease, self.key());
        Watch::new(self.kept.terms.on_lost, || self.check_body(), lost).in_span(span)
    }

    /// What a body under this lease is under.
    pub(crate) fn lock(&self) -> Lock {
        let kept = self.kept.clone();
        Lock {
            key: kept.key.clone(),
            realm: realm(&self.inner),
            token: Some(kept.token),
            still: Box::new(move || kept.lost().is_none()),
        }
    }

    /// A body may go on while the lease is trusted, and after it has given the lease back itself.
    pub(super) fn check_body(&self) -> Result<()> {
        match self.kept.lost() {
            None | Some(LossReason::Released) => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    pub(super) fn check_trusted(&self) -> Result<()> {
        match self.kept.lost() {
            None => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    pub(super) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { key: self.kept.key.clone(), fence: self.kept.grant.fence, reason }
    }
}

impl<DB: LeaseOps> Lease<Pool<DB>> {
    /// Inside a transaction: makes sure that this lease is current, and keeps everybody else from taking it until the
    /// transaction ends, even if the lease expires meanwhile.
    ///
    /// Call it before reading what the lease protects. A transaction whose first statement is `verify` has real
    /// exclusion for data in the same database.
    ///
    /// The lease is renewed beside it, however long the transaction takes, except on SQLite, whose only write lock the
    /// transaction has, and in PostgreSQL's REPEATABLE READ and SERIALIZABLE: there `verify` itself renews, and the
    /// transaction must be shorter than the ttl.
    ///
    /// # Errors
    /// [`Error::Lost`] unless the lease is current; [`Error::InvalidOption`] outside a transaction;
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The row may or may not be locked in the transaction; roll that back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        self.inner.keeper.visit();
        self.check_trusted()?;
        if depth::<DB>(conn).await? == 0 {
            let reason = "needs a transaction: outside of one it would protect nothing".to_owned();
            return Err(Error::InvalidOption { option: "verify", reason });
        }
        let pinned = DB::lease_pin(conn, &self.kept.key, self.kept.token, self.kept.ttl())
            .await
            .map_err(|err| failed_on_own_table::<DB>("verifying lease", Some(&self.kept.key), err))?;
        if pinned {
            self.kept.pin();
        } else {
            self.kept.lose(LossReason::Stolen);
        }
        self.check_trusted()
    }

    /// Commits the transaction if, and only if, the lease is still held at that moment, and gives the lease back: one
    /// atomic act. Takes a [`Tx`](crate::Tx) or a `sqlx::Transaction`.
    ///
    /// This is what keeps a stale holder (stopped, slow, partitioned away) from writing after somebody else took over.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is not held any more; the transaction is rolled back. Otherwise those of
    /// [`Tx::commit`](crate::Tx::commit); the lease is released in the background then.
    ///
    /// # Cancel safety
    /// Dropping this future leaves it unknown whether the commit happened, as with any commit. The lease is given back
    /// in either case.
    pub async fn commit<T: AnyTx<DB>>(self, tx: T) -> Result<()> {
        commit(std::slice::from_ref(&self), tx).await
    }
}

/// Commits the transaction if all of the leases are still held, and gives them back.
pub(super) async fn commit<DB: LeaseOps, T: AnyTx<DB>>(leases: &[Lease<Pool<DB>>], mut tx: T) -> Result<()> {
    if let Some(lost) = leases.iter().find_map(|it| it.check_trusted().err()) {
        undo(tx).await;
        return Err(lost);
    }
    let limit = leases.iter().map(|it| it.kept.ttl()).max().unwrap_or(LEAST_COMMIT).clamp(LEAST_COMMIT, MOST_COMMIT);
    let mut committing = Vec::with_capacity(leases.len());
    for lease in leases {
        // A renewal that finds the row given up must not take that for a loss.
        lease.inner.keeper.forget(lease.kept.token);
        committing.push(Guard::new(Committing {
            kept: lease.kept.clone(),
            inner: lease.inner.clone(),
            unfinished: lease.inner.keeper.unfinished(),
        }));
    }
    let given_up = async {
        tx.check_open().await?;
        for lease in leases {
            let Kept { key, token, terms, .. } = &*lease.kept;
            let given_up =
                DB::lease_give_up(tx.connection(), key, *token, terms.min_hold, lease.kept.is_pinned()).await;
            if !given_up.map_err(|err| give_up_failed::<DB>(key, err))? {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    };
    let doing = "committing with lease";
    let given_up = timeout(limit, given_up).await;
    let refused = match given_up.unwrap_or_else(|_| Err(no_answer(doing, leases.first().map(Lease::key)))) {
        Ok(None) => {
            // From here on only the answer tells whether the work was done.
            let committed = timeout(limit, tx.commit_open()).await;
            match committed.unwrap_or_else(|_| Err(Error::OutcomeUnknown { source: timed_out().into() })) {
                Ok(()) => {
                    committing.into_iter().map(Guard::defuse).for_each(|it| it.inner.committed(&it.kept));
                    return Ok(());
                }
                // The leases are given back, in case that it did not happen.
                Err(err @ Error::OutcomeUnknown { .. }) => return Err(err),
                Err(err) => err,
            }
        }
        Ok(Some(lost)) => {
            // The loss is the news; a rollback that fails is done by the database.
            undo(tx).await;
            lost.kept.lose(LossReason::Stolen);
            lost.lost_error(lost.kept.lost().unwrap_or(LossReason::Stolen))
        }
        Err(err) => {
            // It may have the rows of some leases locked, and sqlx rolls back on a connection of the caller's only when that
            // is used again.
            undo(tx).await;
            err
        }
    };
    for Committing { kept, inner, unfinished } in committing.into_iter().map(Guard::defuse) {
        // Still held, by the caller whose body this is or until they are dropped.
        if kept.lost().is_none() && !inner.keeper.keep(&kept) {
            // Closed meanwhile, which did not see the lease.
            kept.lose(LossReason::Closed);
            give_back_later(inner, kept, unfinished, Vec::new());
        }
    }
    Err(refused)
}

/// Rolls back a transaction that was refused, if the server answers in time. What takes longer is done by the drop.
async fn undo<DB: LeaseOps, T: AnyTx<DB>>(tx: T) {
    drop(timeout(ROLLBACK_LIMIT, tx.rollback()).await);
}

/// The least and the most time that a commit may take; in between it is the ttl of its lease.
const LEAST_COMMIT: Duration = Duration::from_secs(5);
const MOST_COMMIT: Duration = Duration::from_secs(30);

/// A lease whose commit is on its way. If that is dropped half-way nobody knows whether the commit gave the lease back, so it is
/// given back once more.
struct Committing<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    unfinished: Unfinished,
}

impl<S: LeaseStore> Hold for Committing<S> {
    fn abandon(self) {
        let Self { kept, inner, unfinished } = self;
        give_back_later(inner, kept.clone(), unfinished, Vec::new());
        kept.lose(LossReason::Released);
    }
}

/// The error of a transaction that refused to give the lease up: nothing was committed.
fn give_up_failed<DB: LeaseOps>(key: &Key, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::NoTransaction => Error::TransactionEnded { source: source.into() },
        _ => failed_on_own_table::<DB>("committing with lease", Some(key), source),
    }
}

/// Gives the lease back, waiting for a transaction that pins it.
async fn give_back<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) -> Result<Released> {
    inner.keeper.forget(kept.token);
    loop {
        match inner.store().release(&kept.release(), limit_for(kept.ttl())).await? {
            Scoped::Done => {
                inner.ended(kept);
                return Ok(Released::Held);
            }
            Scoped::Gone => {
                kept.lose(LossReason::Stolen);
                inner.lines.freed(&kept.terms.line);
                return Ok(Released::AlreadyLost);
            }
            Scoped::Busy => sleep(BUSY_PAUSE).await,
        }
    }
}

/// Gives the lease back in the background, again and again until the store has answered or the lease has expired; on another
/// runtime if the first one ends.
fn give_back_later<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    kept: Arc<Kept>,
    unfinished: Unfinished,
    mut tried: Vec<runtime::Id>,
) {
    // Without a runtime the ttl frees it.
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

/// The pause before a release is tried again that got no answer.
fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 10).clamp(BUSY_PAUSE, Duration::from_secs(1))
}

/// A release in the background. If its runtime ends, it goes on on another one.
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

/// A claim whose answer was not heard yet. If it never is, the claim is given back in the background, in case that it was granted;
/// on another runtime if the first one ends.
pub(super) struct Unheard<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    claim: Claim,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
}

/// Whether the answer to a claim leaves nothing to give back but what it says.
pub(super) fn is_heard<T>(answer: &Result<Option<T>>) -> bool {
    // The statement was refused: no table; a character that the database does not have.
    let is_refused = |err: &Error| match err {
        Error::NotMigrated { .. } | Error::InvalidKey { .. } => true,
        Error::Database { fault, .. } => *fault == Fault::Encoding,
        _ => false,
    };
    match answer {
        Ok(heard) => heard.is_some(),
        Err(err) => is_refused(err),
    }
}

impl<S: LeaseStore> Unheard<S> {
    pub(super) fn new(inner: Arc<Inner<S>>, claim: Claim) -> Guard<Self> {
        let unfinished = inner.keeper.unfinished();
        Guard::new(Self { inner, claim, unfinished, tried: Vec::new() })
    }
}

impl<S: LeaseStore> Hold for Unheard<S> {
    fn abandon(self) {
        let Self { inner, claim, unfinished, mut tried } = self;
        let Some(runtime) = inner.keeper.runtime(&tried) else { return };
        tried.push(runtime.id());
        let unheard = Guard::new(Self { inner: inner.clone(), claim: claim.clone(), unfinished, tried });
        runtime.spawn(async move {
            let Claim { key, token, ttl, .. } = claim;
            let expired = Instant::now() + ttl;
            let release = Release { key, token, min_hold: Duration::ZERO };
            while !matches!(inner.store().release(&release, limit_for(ttl)).await, Ok(Scoped::Done | Scoped::Gone))
                && Instant::now() < expired
            {
                sleep(retry_pause(ttl)).await;
            }
            inner.lines.freed(&release.key);
            drop(unheard.defuse());
        });
    }
}

impl<S: LeaseStore> Inner<S> {
    /// The lease was given back in good order.
    fn ended(&self, kept: &Kept) {
        self.keeper.forget(kept.token);
        kept.released();
        self.lines.given_back(&kept.terms.line);
    }

    /// The lease was given up by a commit.
    fn committed(&self, kept: &Kept) {
        kept.committed();
        self.lines.given_back(&kept.terms.line);
    }
}

/// The duty to give a lease back.
struct Owned<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
}

impl<S: LeaseStore> Hold for Owned<S> {
    fn abandon(self) {
        let Self { kept, inner } = self;
        inner.keeper.forget(kept.token);
        // Given back by the body that ran under it, or by closing: nothing is left to release.
        if matches!(kept.lost(), Some(LossReason::Released | LossReason::Closed)) {
            return;
        }
        let unfinished = inner.keeper.unfinished();
        give_back_later(inner, kept, unfinished, Vec::new());
    }
}

impl<S: LeaseStore> fmt::Debug for Lease<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.kept.key)
            .field("fence", &self.kept.grant.fence)
            .field("lost", &self.kept.lost())
            .finish_non_exhaustive()
    }
}
