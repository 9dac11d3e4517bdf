//! What must be undone if its owner is dropped, the one `Drop` that undoes it, and the body that runs under it.

use std::{
    fmt,
    future::{Future, poll_fn},
    ops::Deref,
    pin::pin,
    task::Poll,
};

use crate::{
    error::{Error, Result},
    policy::OnLost,
};

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

/// Runs `body`, and ends it with an error when the lease that it runs under is lost.
pub(crate) async fn guarded<T, E: From<Error>>(
    on_lost: OnLost,
    check: impl Fn() -> Result<()>,
    lost: impl Future<Output = Error>,
    body: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    if on_lost == OnLost::Continue {
        let value = body.await?;
        check()?;
        return Ok(value);
    }
    let (mut body, mut lost) = (pin!(body), pin!(lost));
    poll_fn(|context| {
        // The clock is asked before every step. A process that was stopped may hear of what its body waits for before
        // it hears of the timer.
        if let Err(err) = check() {
            return Poll::Ready(Err(err.into()));
        }
        if let Poll::Ready(err) = lost.as_mut().poll(context) {
            return Poll::Ready(Err(err.into()));
        }
        body.as_mut().poll(context).map(|result| check().map_err(E::from).and(result))
    })
    .await
}
