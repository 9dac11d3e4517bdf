//! A lease that was granted: what its holder can ask of it, and how it ends.

use std::{fmt, iter::once_with, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    Inner, check_ttl,
    ending::{Owned, Released, give_back},
    reentry::realm,
    request::Yields,
};
use crate::{
    error::{Error, LossReason, Result},
    fence::Fence,
    guard::{Guard, Watch},
    key::Key,
    lease::{
        bounded::limit_for,
        kept::{Kept, release_failed},
        store::{Answer, BUSY_PAUSE, LeaseStore, Previous, Release, Renewal},
    },
    observe::{Strategy, holding},
    policy::OnLost,
    scope::{Lock, Record},
};

/// A lease that this process holds, renewed in the background until it is given back.
///
/// Dropping it releases it in the background, best effort; the ttl is the backstop. Prefer
/// [`release`](Self::release), which says whether the lease was held to the end, or [`commit`](Self::commit), which
/// makes a transaction depend on it.
#[must_use = "the lease is released as soon as it is dropped: bind it, `let lease = …` (`let _ = …` drops it at once)"]
pub struct Lease<S: LeaseStore> {
    pub(super) kept: Arc<Kept>,
    pub(super) inner: Arc<Inner<S>>,
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
    fn without_ownership(&self) -> Self {
        Self { kept: self.kept.clone(), inner: self.inner.clone(), owned: None }
    }

    /// What the process knows of the lease.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// The current runtime can renew the lease too.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn visit(&self) {
        self.inner.keeper.visit();
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
        check_ttl(self.inner.store(), ttl)?;
        self.inner.keeper.visit();
        while self.is_trusted() {
            let sent = Instant::now();
            let renewal = Renewal { key: self.kept.key.clone(), token: self.kept.token, ttl };
            match self.inner.store().renew(&[renewal], limit_for(self.kept.ttl())).await?.pop() {
                Some(Answer::Done) => {
                    self.kept.set_ttl(ttl);
                    self.kept.renewed(sent, ttl);
                    self.inner.keeper.renewed(&self.kept);
                    break;
                }
                Some(Answer::Gone) => self.kept.lose(LossReason::Stolen),
                // Another statement has its row locked.
                Some(Answer::Busy) | None => sleep(BUSY_PAUSE).await,
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
                None => return Ok(if self.is_trusted() { Released::WhileHeld } else { Released::AlreadyLost }),
            },
        };
        let released = give_back(&self.inner, &self.kept).await?;
        owned.map(Guard::defuse);
        Ok(released)
    }

    /// For the caller. What is given back before that was not held by anybody.
    pub(super) fn hand_out(&self) {
        self.kept.hand_out();
    }

    /// Gives back what was granted a moment ago, without waking those who wait: nothing has changed for them.
    pub(super) async fn back_out(self) -> Result<()> {
        self.inner.keeper.forget(self.kept.token);
        let release = Release { min_hold: Duration::ZERO, ..self.kept.release() };
        self.inner.store().release_now(&release, limit_for(self.kept.ttl())).await?;
        self.kept.lose(LossReason::Released);
        Ok(())
    }

    /// What runs a body under this lease.
    fn watch(&self) -> Watch<'_> {
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

    pub(crate) fn check_trusted(&self) -> Result<()> {
        match self.kept.lost() {
            None => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { key: self.kept.key.clone(), fence: self.kept.grant.fence, reason }
    }
}

impl<S: LeaseStore> Yields for Lease<S> {
    type Store = S;

    fn of(leases: Vec<Self>, _on_lost: OnLost) -> Self {
        leases.into_iter().next().expect("BUG: one lease was asked for")
    }

    fn borrowed(&self) -> Self {
        self.without_ownership()
    }

    fn lent(&self) -> Self {
        self.kept.set_ends_with_body();
        self.without_ownership()
    }

    fn watched(&self) -> (Watch<'_>, Record) {
        (self.watch(), Record::new(once_with(|| self.lock())))
    }

    async fn end_after_body(self) {
        if self.kept.lost().is_none() {
            release_failed(self.release().await);
        }
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
