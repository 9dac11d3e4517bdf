//! A granted lease: the operations of its holder, and how it ends.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use super::{bounded::check_ttl, inner::Inner};
use crate::{
    body::{guard::Guard, scope::Lock, watch::Watch},
    lease::{
        bounded::limit_for,
        ending::{Owned, Released, back_out, release},
        life::{kept::Kept, state::Event},
        queue::{HandedOver, Queue},
        store::{Answer, BUSY_PAUSE, LeaseStore, Previous, Renewal},
    },
    observe::{Strategy, holding},
    value::{
        error::{Error, LossReason, Result},
        fence::Fence,
        key::Key,
    },
};

/// A lease that this process holds. lockkit renews it in the background until it is released.
///
/// Dropping the lease releases it in the background, best effort. If that fails, the ttl frees it. Prefer
/// [`release`](Self::release), which reports whether the lease was held to the end, or [`commit`](Self::commit), which
/// makes a transaction depend on it.
#[must_use = "the lease is released as soon as it is dropped: bind it, `let lease = …` (`let _ = …` drops it at once)"]
pub struct Lease<S: LeaseStore> {
    pub(super) kept: Arc<Kept>,
    pub(super) inner: Arc<Inner<S>>,
    owner: Owner<S>,
}

/// Who releases the lease.
pub(super) enum Owner<S: LeaseStore> {
    /// The last of its shares.
    Shares(Arc<Guard<Owned<S>>>),
    /// The request whose body has this handle, unless the body does.
    Request,
    /// `#[with_lock]`, whose body has this handle.
    Attribute,
}

impl<S: LeaseStore> Lease<S> {
    /// Starts renewing a granted lease. A lease that was granted after [`Leases::close`](crate::Leases::close) is
    /// released.
    pub(super) fn granted(inner: Arc<Inner<S>>, kept: Kept) -> Result<Self> {
        let kept = Arc::new(kept);
        let is_kept = inner.keeper.keep(&kept);
        // Kept with the lease, so that those who come to wait find its holder.
        let queue = kept.may_be_handed_over().then(|| inner.queues.queue(&kept.key));
        let is_latest = match &queue {
            Some(queue) => queue.granted(kept.grant.fence, Arc::downgrade(&kept)),
            // Granted together with others, or for something else: nobody is handed this lease.
            None => inner.queues.granted_otherwise(&kept.key, kept.grant.fence),
        };
        if !is_latest {
            kept.on(Event::Stolen);
        }
        let lease = Self::handed_over(inner, kept, queue);
        if is_kept { Ok(lease) } else { Err(Error::Closed { key: lease.kept.key.clone() }) }
    }

    /// A lease that is renewed already.
    pub(super) fn handed_over(inner: Arc<Inner<S>>, kept: Arc<Kept>, queue: Option<Arc<Queue<Self>>>) -> Self {
        inner.leftovers.watch(&kept);
        let owned = Owned { kept: kept.clone(), inner: inner.clone(), queue };
        Self { kept, inner, owner: Owner::Shares(Arc::new(Guard::new(owned))) }
    }

    /// A handle to the same lease for a body that runs under it. Dropping the handle releases nothing.
    pub(super) fn owned_by(&self, owner: Owner<S>) -> Self {
        Self { kept: self.kept.clone(), inner: self.inner.clone(), owner }
    }

    /// The state of the lease in this process.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// The token of this acquisition.
    #[cfg(feature = "testing")]
    pub(crate) fn token(&self) -> crate::value::token::Token {
        self.kept.token
    }

    /// Another handle to the same lease. The lease is released when its last handle is released or dropped.
    ///
    /// Use it to hand a lease to other code that needs it. Acquiring the key a second time would wait for the first
    /// lease: a lock that lets the same process in twice cannot keep two of its tasks apart.
    ///
    /// A share of the handle that a body gets ends with that body.
    pub fn share(&self) -> Self {
        self.owned_by(match &self.owner {
            Owner::Shares(owned) => Owner::Shares(owned.clone()),
            Owner::Request => Owner::Request,
            Owner::Attribute => Owner::Attribute,
        })
    }

    /// The lease's key.
    pub fn key(&self) -> &Key {
        &self.kept.key
    }

    /// The fencing token. It is greater than the token of every earlier holder of this key.
    pub fn fence(&self) -> Fence {
        self.kept.grant.fence
    }

    /// The previous holder, if it let the lease expire instead of releasing it. That holder died, hung or was cut off,
    /// and may have left work half done.
    pub fn previous(&self) -> Option<&Previous> {
        self.kept.grant.previous.as_ref()
    }

    /// The instant after which this process must stop acting as the holder, unless a renewal moves it: the start of the
    /// last successful request plus the ttl, minus 1 % of the ttl (at least 10 ms). Monotonic.
    ///
    /// The clock keeps counting while the process is stopped. On Linux it does not count while the machine is
    /// suspended: after a suspend, only the fence, [`verify`](Self::verify) and [`commit`](Self::commit) protect.
    pub fn trusted_until(&self) -> std::time::Instant {
        self.kept.until().into_std()
    }

    /// Whether this process may still act as the holder of the lease. Local, no I/O.
    ///
    /// The lease can be lost a moment after this returned `true`. A write that must not happen without the lease
    /// belongs in a transaction that ends with [`commit`](Self::commit).
    pub fn is_trusted(&self) -> bool {
        self.kept.lost().is_none()
    }

    /// Completes when the lease is lost, and never otherwise. Works while the store is unreachable.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) -> LossReason {
        self.kept.wait_until_lost().await
    }

    /// Extends the lease to at least `ttl` from now, and uses that ttl for later renewals. Never shortens the lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is no longer held; [`Error::InvalidOption`]; [`Error::Database`] when the store
    /// cannot be reached. In the last case the lease stays trusted until its current trust ends.
    ///
    /// # Cancel safety
    /// After a drop the lease may or may not be extended. It stays held either way, at least as long as before.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        check_ttl(self.inner.store(), ttl)?;
        // The store shows the whole ttl, even if it cannot be trusted for that long.
        let whole = ttl;
        let ttl = self.kept.grant.ttl.map_or(ttl, |most| most.min(ttl));
        self.inner.keeper.visit();
        if ttl != self.kept.ttl() {
            // From here on it is not handed over: an answer may come late, and the ttl is this holder's.
            self.kept.on(Event::StoreOnly);
        }
        while self.is_trusted() {
            let (sent, call) = (Instant::now(), self.kept.asks());
            let renewal = Renewal { key: self.kept.key.clone(), token: self.kept.token, ttl: whole };
            let renewed = self.inner.store().renew(&[renewal], limit_for(self.kept.ttl())).await;
            match renewed?.pop() {
                Some(Answer::Done) => {
                    self.kept.had_the_row(call);
                    self.kept.on(Event::Extended { sent, ttl });
                    self.inner.keeper.renewed(&self.kept);
                    break;
                }
                Some(Answer::Gone) => {
                    self.kept.answered(call);
                    self.kept.on(Event::Gone);
                }
                // Another statement has the row of the lease locked.
                Some(Answer::Busy) | None => {
                    self.kept.answered(call);
                    sleep(BUSY_PAUSE).await;
                }
            }
        }
        self.check_trusted()
    }

    /// Releases the lease and returns whether it was held until now. If the lease has several [shares](Self::share),
    /// only the release of the last one releases the lease.
    ///
    /// While one of your own transactions pins the lease ([`verify`](Self::verify)), this waits for that transaction.
    /// End it first.
    ///
    /// The store remembers the key, so that the next holder gets a greater fence.
    ///
    /// # Errors
    /// [`Error::Database`] when the store cannot be reached. The lease is no longer renewed, and its ttl frees it.
    /// [`Error::InvalidOption`] for the lease of a function under `#[with_lock]`: the attribute releases that lease
    /// when the body returns, and it stays held until then.
    ///
    /// # Cancel safety
    /// The release continues in the background if this future is dropped.
    pub async fn release(mut self) -> Result<Released> {
        if matches!(self.owner, Owner::Attribute) {
            let reason =
                "is for leases that were acquired by hand; `#[with_lock]` releases this one when the body returns";
            return Err(Error::InvalidOption { option: "release", reason: reason.to_owned() });
        }
        // Declared before `owned`, so dropped after it: if this future is dropped, the release is registered before
        // this count ends.
        let mut _unfinished = None;
        let owned = match std::mem::replace(&mut self.owner, Owner::Request) {
            // A body ends it before its request does.
            Owner::Request | Owner::Attribute => {
                Guard::new(Owned { kept: self.kept.clone(), inner: self.inner.clone(), queue: None })
            }
            Owner::Shares(owned) => match Arc::into_inner(owned) {
                Some(last) => last,
                None => return Ok(if self.is_trusted() { Released::WhileHeld } else { Released::AlreadyLost }),
            },
        };
        let released = if owned.hand_over() {
            Released::WhileHeld
        } else {
            // Before the lease leaves the keeper: `close` waits for a release that it does not see there.
            _unfinished = Some(self.inner.keeper.unfinished());
            // From here on it is not handed over. If it was, the store must not be asked: the token is the next
            // holder's.
            self.inner.keeper.leave_to_store(&self.kept);
            match self.kept.lost() {
                Some(LossReason::Released) => Released::AlreadyLost,
                // Boxed: it is large, and part of the future of each caller, who has it while waiting for the lease.
                _ => Box::pin(release(&self.inner, &self.kept)).await?,
            }
        };
        owned.defuse();
        Ok(released)
    }

    /// Marks the lease as returned to the caller. `min_hold` does not apply to a lease that is released before that.
    pub(super) fn deliver(&self) {
        self.kept.deliver();
    }

    /// Releases a lease that was granted a moment ago. Does not wake waiters, for whom nothing has changed. A writer
    /// that has seen this reader asks again after its pause.
    pub(super) async fn back_out(self) -> Result<()> {
        let _unfinished = self.inner.keeper.unfinished();
        // Dropped before that, and so released in the background while it still counts.
        let Self { kept, inner, owner } = self;
        back_out(&inner, &kept).await?;
        if let Owner::Shares(owned) = owner {
            Arc::into_inner(owned).map(Guard::defuse);
        }
        Ok(())
    }

    /// The watch that runs a body under this lease.
    pub(super) fn watch(&self) -> Watch<'_> {
        self.inner.keeper.visit();
        let lost = move || async move { self.lost_error(self.kept.wait_until_lost().await) };
        let span = holding(Strategy::Lease, self.key());
        Watch::new(self.kept.terms.on_lost, || self.check_body(), lost).in_span(span)
    }

    /// The lock that a body under this lease is registered with.
    pub(crate) fn lock(&self) -> Lock {
        let kept = self.kept.clone();
        Lock {
            key: kept.key.clone(),
            realm: self.inner.realm(),
            token: Some(kept.token),
            still: Box::new(move || kept.lost().is_none()),
        }
    }

    /// Succeeds while the lease is trusted, and after the body itself has released it.
    pub(super) fn check_body(&self) -> Result<()> {
        match self.kept.lost() {
            None | Some(LossReason::Released) => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { key: self.kept.key.clone(), fence: self.kept.grant.fence, reason }
    }

    pub(crate) fn check_trusted(&self) -> Result<()> {
        match self.kept.lost() {
            None => Ok(()),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }
}

impl<S: LeaseStore> HandedOver for Lease<S> {
    fn is_trusted(&self) -> bool {
        Lease::is_trusted(self)
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
