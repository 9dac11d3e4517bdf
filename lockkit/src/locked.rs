//! Which locks the code that runs now is under, for `assert_locked!`. Without the feature `testing` it keeps no record.

use std::future::Future;
#[cfg(feature = "testing")]
use std::sync::Arc;

#[cfg(feature = "testing")]
use tokio::task::futures::TaskLocalFuture;

use crate::key::Key;

/// A lock that a body runs under, and whether it still is.
pub(crate) type Lock = (Key, Box<dyn Fn() -> bool + Send + Sync>);

#[cfg(feature = "testing")]
tokio::task_local! {
    /// The locks of this body, and of those around it.
    static LOCKS: Arc<Scope>;
}

#[cfg(feature = "testing")]
pub(crate) struct Scope {
    locks: Vec<Lock>,
    around: Option<Arc<Self>>,
}

/// Runs `body`, with a record that it is under these locks.
#[cfg(feature = "testing")]
pub(crate) fn under<F: Future, L: IntoIterator<Item = Lock>>(locks: L, body: F) -> TaskLocalFuture<Arc<Scope>, F> {
    LOCKS.scope(Record::new(locks).0, body)
}

/// Runs `body`.
#[cfg(not(feature = "testing"))]
pub(crate) fn under<F: Future, L: IntoIterator<Item = Lock>>(_locks: L, body: F) -> F {
    body
}

/// The locks of a body that is polled where they are entered: unlike [`under`], this is not compiled for every body.
#[derive(Clone)]
pub(crate) struct Record(#[cfg(feature = "testing")] Arc<Scope>);

impl Record {
    #[cfg(feature = "testing")]
    pub(crate) fn new(locks: impl IntoIterator<Item = Lock>) -> Self {
        let around = LOCKS.try_with(Arc::clone).ok();
        Self(Arc::new(Scope { locks: locks.into_iter().collect(), around }))
    }

    #[cfg(not(feature = "testing"))]
    pub(crate) fn new(_locks: impl IntoIterator<Item = Lock>) -> Self {
        Self()
    }

    /// Runs `poll`, with a record that it is under the locks.
    #[cfg(feature = "testing")]
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        LOCKS.sync_scope(self.0.clone(), poll)
    }

    /// Runs `poll`.
    #[cfg(not(feature = "testing"))]
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        let Self() = self;
        poll()
    }
}

/// Whether the code that runs now is under the lock of this key; if not, what it is under.
#[cfg(feature = "testing")]
pub(crate) fn is_locked(key: &Key) -> Result<(), String> {
    let mut scope = LOCKS.try_with(Arc::clone).ok();
    let mut others = Vec::new();
    while let Some(Scope { locks, around }) = scope.as_deref() {
        for (locked, still) in locks {
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
