//! The mutex that everything uses, for shuttle: the place of `lockkit/src/mutex.rs`.

use std::{
    ops::{Deref, DerefMut},
    sync::atomic::Ordering,
};

use shuttle::sync::{self, PoisonError, atomic::AtomicBool};

/// As in lockkit. Another task may run before it is locked, before it is unlocked and after that.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    mutex: sync::Mutex<T>,
    unlocked: AtomicBool,
}

/// As in lockkit.
#[derive(Debug)]
pub(crate) struct MutexGuard<'m, T> {
    guard: Option<sync::MutexGuard<'m, T>>,
    unlocked: &'m AtomicBool,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { mutex: sync::Mutex::new(value), unlocked: AtomicBool::new(false) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard { guard: Some(guard), unlocked: &self.unlocked }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.guard = None;
        // A step of its own, so that what follows may come late.
        self.unlocked.store(true, Ordering::Relaxed);
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_deref().expect("BUG: it is there until the drop")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_deref_mut().expect("BUG: it is there until the drop")
    }
}
