//! A request for one lease or several: what is asked for, and on which terms.

mod acquire;
mod any;
mod check;
mod claim;
mod lead;
pub(super) mod mode;
mod pending;
mod permits;
mod reentry;
mod refused;
mod set;
mod shared;
mod tickets;
mod yields;

pub use self::{set::MultiLease, shared::ReadWrite, yields::Yields};

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use self::mode::Mode;
use super::{
    held::Lease,
    inner::Inner,
    life::kept::{Terms, Waiters},
    store::LeaseStore,
};
use crate::{
    policy::{OnLost, Wait},
    value::key::Key,
};

/// A request for one lease, made by [`Leases::lease`](crate::Leases::lease),
/// [`Leases::any`](crate::Leases::any), [`Leases::semaphore`](crate::Leases::semaphore) or
/// [`Leases::rw`](crate::Leases::rw); or for several leases together, made by [`Leases::all`](crate::Leases::all) or
/// [`take`](Self::take). `L` is the type that it yields: a [`Lease`] or a [`MultiLease`].
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct LeaseRequest<S: LeaseStore, L = Lease<S>> {
    pub(in crate::lease) inner: Arc<Inner<S>>,
    pub(in crate::lease) key: Key,
    pub(in crate::lease) mode: Mode,
    pub(in crate::lease) ttl: Duration,
    wait: Duration,
    min_hold: Duration,
    on_lost: OnLost,
    fair: bool,
    yields: PhantomData<fn() -> L>,
}

impl<S: LeaseStore> LeaseRequest<S> {
    /// Serves waiting processes strictly in the order of their arrival.
    ///
    /// The callers of one process always queue in order. After a wait of 50 ms, a plain request cannot be starved by
    /// other processes, but they may still overtake it. A fair request takes a ticket (a short lease
    /// `<key>/queue/<number>`) as soon as it finds the lease held, and asks for the lease when there is no older
    /// ticket. For a strict order, all requests for the lease must be fair.
    ///
    /// A fair request costs two more round trips if there are waiters and one if there are none. A process that dies
    /// while it waits delays the others for the ttl of the lease that it asked for, at most 3 s; if it also held the
    /// lease, its tickets end with the lease. Only for leases made by [`Leases::lease`](crate::Leases::lease).
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    pub(in crate::lease) fn new(inner: Arc<Inner<S>>, key: Key, mode: Mode) -> Self {
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

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// The keys of the requested leases, if they are known in advance.
    pub(in crate::lease) fn keys(&self) -> &[Key] {
        match &self.mode {
            Mode::Exclusive => std::slice::from_ref(&self.key),
            Mode::All(keys) | Mode::Any(keys) => keys,
            _ => &[],
        }
    }

    /// Whether the request cannot be granted without the lease of this key.
    pub(in crate::lease) fn needs(&self, key: &Key) -> bool {
        !matches!(self.mode, Mode::Any(_)) && self.keys().contains(key)
    }

    /// The key of the request's queue in this process. Readers and writers of one key share one queue. Requests for the
    /// same key set share one queue, separate from the single keys' queues.
    pub(in crate::lease) fn queue_key(&self) -> Key {
        match self.mode {
            Mode::Exclusive | Mode::All(_) | Mode::Any(_) => self.key.clone(),
            Mode::Permit(_) | Mode::Permits { .. } | Mode::NoPermits => format!("{}/permit", self.key).into(),
            Mode::Read | Mode::Write => format!("{}/rw", self.key).into(),
        }
    }

    /// The same request again.
    pub(in crate::lease) fn again(&self) -> Self {
        let Self { inner, key, mode, ttl, wait, min_hold, on_lost, fair, yields } = self;
        Self {
            inner: inner.clone(),
            key: key.clone(),
            mode: mode.clone(),
            ttl: *ttl,
            wait: *wait,
            min_hold: *min_hold,
            on_lost: *on_lost,
            fair: *fair,
            yields: *yields,
        }
    }

    /// Whether the request has a nonzero wait.
    pub(in crate::lease) fn waits(&self) -> bool {
        !self.wait.is_zero()
    }

    pub(in crate::lease) fn terms(&self) -> Terms {
        let Self { inner, min_hold, on_lost, .. } = self;
        let waiters = match self.mode {
            Mode::All(_) => Waiters::OfKeyByStore,
            // Its order is that of all processes.
            Mode::Exclusive if self.fair => Waiters::OfKeyByStore,
            Mode::Exclusive | Mode::Any(_) => Waiters::OfKey,
            _ => Waiters::Of(self.queue_key()),
        };
        Terms { renew_every: inner.renew_every, min_hold: *min_hold, on_lost: *on_lost, waiters }
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
