//! Which locks the code that runs now is under, so that a task does not wait for itself. Only a body that lockkit runs is
//! known: a guard that the caller keeps may be given to another task.

use std::{future::Future, sync::Arc};

use sqlx::Pool;
use tokio::task::futures::TaskLocalFuture;

use crate::{
    dialect::{Dialect, address},
    key::Key,
    store::Token,
};

tokio::task_local! {
    /// The locks of this body, and of those around it.
    static LOCKS: Arc<Scope>;
}

pub(crate) struct Scope {
    locks: Vec<Lock>,
    around: Option<Arc<Self>>,
}

/// A lock that a body runs under.
pub(crate) struct Lock {
    pub(crate) key: Key,
    pub(crate) realm: Realm,
    /// Of a lease.
    pub(crate) token: Option<Token>,
    /// Whether the body still is under it.
    pub(crate) still: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Lock {
    /// A lock that is held for as long as its body runs.
    pub(crate) fn of(realm: Realm, key: Key) -> Self {
        Self { key, realm, token: None, still: Box::new(|| true) }
    }
}

/// Where two locks of one key are one lock, as far as this process knows. Whatever the address is of lives longer than the
/// body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Realm {
    /// The leases of one `Leases`.
    Leases(usize),
    /// The named locks of one pool.
    Named(usize),
    /// The row locks of one pool, by the names of their tables.
    Rows(usize),
    /// The session locks of one pool.
    Sessions(usize),
    /// Nothing is known of it but the key.
    Elsewhere,
}

impl Realm {
    pub(crate) fn named<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Named(address(pool))
    }

    pub(crate) fn rows<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Rows(address(pool))
    }

    pub(crate) fn sessions<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Sessions(address(pool))
    }

    /// Whether the lock belongs to a transaction that began in this pool and is open while the body runs.
    pub(crate) fn has_transaction_of<DB: Dialect>(self, pool: &Pool<DB>) -> bool {
        matches!(self, Self::Named(it) | Self::Rows(it) if it == address(pool))
    }
}

/// Runs `body`, with a record that it is under these locks.
pub(crate) fn under<F: Future, L: IntoIterator<Item = Lock>>(locks: L, body: F) -> TaskLocalFuture<Arc<Scope>, F> {
    LOCKS.scope(Record::new(locks).0, body)
}

/// How many of these locks the code that runs now is under.
pub(crate) fn count(which: impl Fn(&Lock) -> bool) -> usize {
    let innermost = innermost();
    let scopes = std::iter::successors(innermost.as_deref(), |it| it.around.as_deref());
    scopes.flat_map(|it| &it.locks).filter(|it| which(it) && (it.still)()).count()
}

/// Whether the code that runs now is under one of these locks.
pub(crate) fn is_under(which: impl Fn(&Lock) -> bool) -> bool {
    count(which) > 0
}

fn innermost() -> Option<Arc<Scope>> {
    LOCKS.try_with(Arc::clone).ok()
}

/// The locks of a body that is polled where they are entered: unlike [`under`], this is not compiled for every body.
#[derive(Clone)]
pub(crate) struct Record(Arc<Scope>);

impl Record {
    pub(crate) fn new(locks: impl IntoIterator<Item = Lock>) -> Self {
        Self(Arc::new(Scope { locks: locks.into_iter().collect(), around: innermost() }))
    }

    /// Runs `poll`, with a record that it is under the locks.
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        LOCKS.sync_scope(self.0.clone(), poll)
    }
}

/// Whether the code that runs now is under the lock of this key; if not, what it is under.
#[cfg(feature = "testing")]
pub(crate) fn is_locked(key: &Key) -> Result<(), String> {
    let mut scope = innermost();
    let mut others = Vec::new();
    while let Some(Scope { locks, around }) = scope.as_deref() {
        for Lock { key: locked, still, .. } in locks {
            match (locked == key, still()) {
                (true, true) => return Ok(()),
                (true, false) => return Err(format!("the lease of `{key}` was lost, or given back")),
                (false, _) => others.push(format!("`{locked}`")),
            }
        }
        scope = around.clone();
    }
    Err(match &*others {
        [] => "it is under no lock".to_owned(),
        others => format!("it is under {}", others.join(", ")),
    })
}
