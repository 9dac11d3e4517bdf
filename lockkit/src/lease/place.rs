//! What a request has while it waits, and gives back when it stops waiting.

use std::{
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, timeout};

use super::{attempt::Waiting, held::Lease};
use crate::{
    fence::Fence,
    key::Key,
    lease::{kept::release_failed, store::LeaseStore},
};

/// The longest time for giving back what was taken while waiting. The rest goes on in the background.
const GIVE_BACK: Duration = Duration::from_secs(1);

/// How much later an expiry must be to be another one: answers take different times.
const ANSWERS_DIFFER: Duration = Duration::from_millis(5);

/// The state of one waiting request. Dropping it gives back in the background what it took.
#[derive(Debug)]
pub(super) struct Place<S: LeaseStore> {
    /// Whether the request asks until its wait is over.
    pub(super) waits: bool,
    asked: OnceLock<Instant>,
    taken: Mutex<Taken<S>>,
}

#[derive(Debug)]
struct Taken<S: LeaseStore> {
    ticket: Option<Ticket<S>>,
    /// The lease that lets one request of its kind keep something while it waits: the writer's, or that of the request that
    /// gathers permits.
    gate: Option<Lease<S>>,
    /// Permits, until there are enough.
    gathered: Vec<Lease<S>>,
    /// Claims that were refused and will be sent again.
    claims: Vec<Waiting<S>>,
    /// The key that was held last, of those that are asked for.
    in_the_way: Option<Key>,
}

/// A place in the queue of the processes.
#[derive(Debug)]
struct Ticket<S: LeaseStore> {
    lease: Lease<S>,
    progress: Progress,
}

/// What a ticket's owner has seen of the queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// How many older tickets there were, and the oldest of them. `None` before the first look.
    pub(super) seen: Option<(u32, Fence)>,
    /// When that changed last, or the lease got another holder.
    pub(super) moved: Instant,
    /// When the holder's lease ends.
    pub(super) expires: Option<Instant>,
    /// Since when the lease is seen free without any of the older tickets taking it.
    pub(super) free_since: Option<Instant>,
}

impl Progress {
    /// The lease is held. Another holder has a later expiry, and so has a renewal; without one, the lease is locked for a
    /// moment.
    pub(super) fn held(&mut self, free_in: Option<Duration>) {
        let now = Instant::now();
        let expires = free_in.map(|it| now + it);
        let changed = match (expires, self.expires) {
            (Some(expires), Some(before)) => expires > before + ANSWERS_DIFFER,
            (expires, before) => expires.is_some() != before.is_some(),
        };
        if changed {
            self.moved = now;
            self.expires = expires;
        }
    }
}

impl<S: LeaseStore> Place<S> {
    /// The place of a request that asks until its wait is over.
    pub(super) fn waiting() -> Self {
        Self { waits: true, ..Self::default() }
    }

    /// How long ago the first question was asked; `None` if this is the first one.
    pub(super) fn waited(&self) -> Option<Duration> {
        if let Some(asked) = self.asked.get() {
            return Some(asked.elapsed());
        }
        self.asked.get_or_init(Instant::now);
        None
    }

    /// The ticket's number and name, if it can still be trusted.
    pub(super) fn ticket(&self) -> Option<(Fence, Key)> {
        let taken = self.taken();
        let ticket = taken.ticket.as_ref().filter(|it| it.lease.is_trusted())?;
        Some((ticket.lease.fence(), ticket.lease.key().clone()))
    }

    /// Replaces a ticket that was lost.
    pub(super) fn set_ticket(&self, lease: Lease<S>) {
        let progress = Progress { seen: None, moved: Instant::now(), expires: None, free_since: None };
        self.taken().ticket = Some(Ticket { lease, progress });
    }

    /// What the ticket's owner has seen of the queue; changed by `change`.
    pub(super) fn progress(&self, change: impl FnOnce(&mut Progress)) -> Option<Progress> {
        let mut taken = self.taken();
        let progress = &mut taken.ticket.as_mut()?.progress;
        change(progress);
        Some(*progress)
    }

    /// Gives the ticket back in the background.
    pub(super) fn drop_ticket(&self) {
        // Not within the lock.
        let ticket = self.taken().ticket.take();
        drop(ticket);
    }

    /// Whether it has the gate's lease, and can still trust it.
    pub(super) fn has_gate(&self) -> bool {
        self.taken().gate.as_ref().is_some_and(Lease::is_trusted)
    }

    pub(super) fn set_gate(&self, gate: Lease<S>) {
        let before = self.taken().gate.replace(gate);
        // Not within the lock.
        drop(before);
    }

    pub(super) fn take_gate(&self) -> Option<Lease<S>> {
        let gate = self.taken().gate.take();
        gate.filter(Lease::is_trusted)
    }

    /// Keeps these permits.
    pub(super) fn gather(&self, leases: impl IntoIterator<Item = Lease<S>>) {
        self.taken().gathered.extend(leases);
    }

    /// How many permits it keeps that can be trusted. The others are given up.
    pub(super) fn gathered(&self) -> u32 {
        let lost: Vec<_> = self.taken().gathered.extract_if(.., |it| !it.is_trusted()).collect();
        drop(lost);
        u32::try_from(self.taken().gathered.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn take_gathered(&self) -> Vec<Lease<S>> {
        std::mem::take(&mut self.taken().gathered)
    }

    /// The claims of these keys that were refused. Those of other keys are given up.
    pub(super) fn take_claims(&self, keys: &[Key]) -> Vec<Waiting<S>> {
        let mut claims = std::mem::take(&mut self.taken().claims);
        claims.retain(|it| keys.contains(&it.key));
        claims
    }

    pub(super) fn keep_claims(&self, claims: Vec<Waiting<S>>) {
        let before = std::mem::replace(&mut self.taken().claims, claims);
        // Not within the lock.
        drop(before);
    }

    pub(super) fn in_the_way(&self) -> Option<Key> {
        self.taken().in_the_way.clone()
    }

    pub(super) fn set_in_the_way(&self, key: Key) {
        self.taken().in_the_way = Some(key);
    }

    /// Gives back what was taken on the way, so that it keeps nobody out once the request is answered.
    pub(super) async fn give_back(&self) {
        drop(self.take_claims(&[]));
        let leases: Vec<_> = {
            let Taken { ticket, gate, gathered, claims: _, in_the_way: _ } = &mut *self.taken();
            gathered.drain(..).chain(gate.take()).chain(ticket.take().map(|it| it.lease)).collect()
        };
        let giving_back = async {
            for lease in leases {
                release_failed(lease.release().await);
            }
        };
        // A release that takes longer goes on in the background.
        drop(timeout(GIVE_BACK, giving_back).await);
    }

    fn taken(&self) -> MutexGuard<'_, Taken<S>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: LeaseStore> Default for Place<S> {
    fn default() -> Self {
        let taken =
            Mutex::new(Taken { ticket: None, gate: None, gathered: Vec::new(), claims: Vec::new(), in_the_way: None });
        Self { waits: false, asked: OnceLock::new(), taken }
    }
}
