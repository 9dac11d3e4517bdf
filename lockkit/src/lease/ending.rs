//! How a lease ends: given back by its holder, in the background when that is dropped, or by a commit.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use super::Inner;
use crate::{
    error::{LossReason, Result},
    guard::{Guard, Hold},
    lease::{
        bounded::limit_for,
        held::Lease,
        keeper::Unfinished,
        kept::{Kept, release_failed},
        store::{BUSY_PAUSE, LeaseStore},
    },
};

/// What became of a lease that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// It was held until now, and is free.
    WhileHeld,
    /// It had been lost before: whatever was done since then was done without it. Nothing was changed.
    AlreadyLost,
}

/// A lease whose commit is on its way. If that is dropped half-way nobody knows whether the commit gave the lease back, so it is
/// given back once more.
#[cfg_attr(not(feature = "sql"), allow(dead_code))]
pub(crate) struct Committing<S: LeaseStore> {
    kept: Arc<Kept>,
    inner: Arc<Inner<S>>,
    unfinished: Unfinished,
}

impl<S: LeaseStore> Lease<S> {
    /// The lease is given up by the commit of a transaction that begins now.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn begin_commit(&self) -> Guard<Committing<S>> {
        // A renewal that finds the row given up must not take that for a loss.
        self.inner.keeper.forget(self.kept.token);
        let unfinished = self.inner.keeper.unfinished();
        Guard::new(Committing { kept: self.kept.clone(), inner: self.inner.clone(), unfinished })
    }
}

impl<S: LeaseStore> Committing<S> {
    /// The commit gave the lease back.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn committed(committing: Guard<Self>) {
        let Self { kept, inner, unfinished: _ } = committing.defuse();
        kept.committed();
        inner.lines.given_back(kept.line());
    }

    /// Nothing was committed. The lease is still held, by the caller whose body this is or until it is dropped.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    pub(crate) fn refused(committing: Guard<Self>) {
        let Self { kept, inner, unfinished } = committing.defuse();
        if kept.lost().is_none() && !inner.keeper.keep(&kept) {
            // Closed meanwhile, which did not see the lease.
            kept.lose(LossReason::Closed);
            give_back_later(inner, kept, unfinished, Vec::new());
        }
    }
}

impl<S: LeaseStore> Hold for Committing<S> {
    fn abandon(self) {
        let Self { kept, inner, unfinished } = self;
        give_back_later(inner, kept.clone(), unfinished, Vec::new());
        kept.lose(LossReason::Released);
    }
}

/// Gives the lease back, waiting for a transaction that pins it.
pub(super) async fn give_back<S: LeaseStore>(inner: &Inner<S>, kept: &Kept) -> Result<Released> {
    inner.keeper.forget(kept.token);
    if inner.store().release_now(&kept.release(), limit_for(kept.ttl())).await? {
        inner.ended(kept);
        return Ok(Released::WhileHeld);
    }
    kept.lose(LossReason::Stolen);
    inner.lines.freed(kept.line());
    Ok(Released::AlreadyLost)
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
pub(super) fn retry_pause(ttl: Duration) -> Duration {
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

impl<S: LeaseStore> Inner<S> {
    /// The lease was given back in good order.
    fn ended(&self, kept: &Kept) {
        self.keeper.forget(kept.token);
        kept.released();
        self.lines.given_back(kept.line());
    }
}

/// The duty to give a lease back.
pub(super) struct Owned<S: LeaseStore> {
    pub(super) kept: Arc<Kept>,
    pub(super) inner: Arc<Inner<S>>,
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
