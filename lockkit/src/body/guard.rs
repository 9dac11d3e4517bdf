//! A resource with a cleanup on drop.

use std::{fmt, ops::Deref};

/// A resource that needs cleanup when its owner is dropped.
pub(crate) trait Hold: Send + Sized {
    /// Cleans up after the owner was dropped. Never blocks and never panics. May leave work to a background task.
    fn abandon(self);
}

/// Owns a [`Hold`] and abandons it on drop, unless [`defuse`](Self::defuse) took it out before.
pub(crate) struct Guard<H: Hold>(Option<H>);

impl<H: Hold> Guard<H> {
    pub(crate) fn new(hold: H) -> Self {
        Self(Some(hold))
    }

    pub(crate) fn get_mut(&mut self) -> &mut H {
        self.0.as_mut().expect("BUG: a guard is empty only after `defuse`, which consumes it")
    }

    /// Takes the resource out, so that nothing is abandoned.
    pub(crate) fn defuse(mut self) -> H {
        self.0.take().expect("BUG: a guard is empty only after `defuse`, which consumes it")
    }
}

impl<H: Hold> Deref for Guard<H> {
    type Target = H;

    fn deref(&self) -> &H {
        self.0.as_ref().expect("BUG: a guard is empty only after `defuse`, which consumes it")
    }
}

impl<H: Hold> Drop for Guard<H> {
    fn drop(&mut self) {
        if let Some(hold) = self.0.take() {
            hold.abandon();
        }
    }
}

impl<H: Hold> fmt::Debug for Guard<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
