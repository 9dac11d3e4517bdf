//! What the leases, requests and builders of one `Leases` share.

use std::{fmt, sync::Arc, time::Duration};

use super::held::Lease;
use crate::{
    body::{inline::Inline, scope::Realm},
    lease::{
        batch::Calls,
        bounded::Bounded,
        leftovers::Leftovers,
        life::{keeper::Keeper, kept::HandOver},
        queue::{Queues, wait::Freed},
        store::{LeaseInfo, LeaseRecord, LeaseStore},
    },
    value::key::Key,
};

pub(super) struct Inner<S: LeaseStore> {
    /// The store that the caller gave. Transactions begin here. The keeper's store may have connections of its own.
    pub(super) caller_store: S,
    pub(super) keeper: Keeper<S>,
    pub(super) queues: Queues<Lease<S>>,
    /// The claims and releases in flight.
    pub(super) calls: Calls,
    /// What these `Leases` may have left in the store.
    pub(super) leftovers: Leftovers,
    /// The claims that run in the tasks of their callers.
    pub(super) inline: Inline,
    /// As the service has set it, see [`Inner::hand_over`].
    pub(super) hand_over: HandOver,
    pub(super) fence_domain: Key,
    pub(super) listener: Option<Arc<dyn ReportsReleases>>,
    pub(super) ttl: Duration,
    pub(super) wait: Duration,
    pub(super) renew_every: Option<Duration>,
}

/// Notifies waiting requests of releases. A late or missing notification costs one pause.
pub(crate) trait ReportsReleases: fmt::Debug + Send + Sync {
    /// Completes when the lease may have been released since the first poll of this future.
    fn freed<'k>(&'k self, key: &'k Key) -> Freed<'k>;
}

impl<S: LeaseStore> Inner<S> {
    pub(super) fn store(&self) -> &Bounded<S> {
        self.keeper.store()
    }

    /// The realm of these leases, in which two leases of one key exclude each other.
    pub(super) fn realm(self: &Arc<Self>) -> Realm {
        Realm::Leases(Arc::as_ptr(self).addr())
    }

    /// How long a lease may be handed over in this process without asking the store. `None` if it may not.
    pub(super) fn hand_over(&self) -> Option<HandOver> {
        Some(self.hand_over).filter(|it| it.times > 0 && self.store().profile().shows_writes_at_once)
    }

    /// The public description of a held lease.
    pub(super) fn shown(&self, held: LeaseRecord) -> LeaseInfo {
        let LeaseRecord { token, mut info } = held;
        info.is_released = token.is_nobody();
        if let Some(kept) = self.keeper.kept(token) {
            info.is_this_process = true;
            // The store knows only the first holder of those to whom the lease was handed over.
            info.fence = kept.grant.fence;
        }
        info
    }

    /// Completes when the store reports a release of the lease.
    pub(super) fn freed<'k>(&'k self, key: &'k Key) -> Freed<'k> {
        match &self.listener {
            Some(listener) => listener.freed(key),
            None => Box::pin(self.store().unbounded().lease_freed(key)),
        }
    }
}

impl<S: LeaseStore> fmt::Debug for Inner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("holder", self.keeper.holder())
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .field("keeper", &self.keeper)
            .finish_non_exhaustive()
    }
}
