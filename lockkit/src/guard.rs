//! What must be undone if its owner is dropped, and the one `Drop` that undoes it.

use std::{fmt, ops::Deref};

/// Something that may not simply be forgotten.
pub(crate) trait Hold: Send + Sized {
    /// Undoes it after its owner was dropped: never blocks, never panics, may leave work to a background task.
    fn abandon(self);
}

/// Owns a [`Hold`] and abandons it on drop, unless it was taken out before.
pub(crate) struct Guard<H: Hold>(Option<H>);

impl<H: Hold> Guard<H> {
    pub(crate) fn new(hold: H) -> Self {
        Self(Some(hold))
    }

    pub(crate) fn get_mut(&mut self) -> &mut H {
        self.0.as_mut().expect("BUG: a guard is empty only after `defuse`, which consumes it")
    }

    /// Takes the hold out; nothing will be abandoned.
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
