//! The mutex of all of lockkit.

use std::sync::PoisonError;

pub(crate) use std::sync::MutexGuard;

/// A mutex that is not poisoned: what it guards is whole again before anything that could panic runs.
///
/// The standard library's, because those who find it locked wait in the kernel after a short spin. `parking_lot`'s call
/// `sched_yield` up to seven times before, which on two cores cost a hand-over a tenth of its time.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
