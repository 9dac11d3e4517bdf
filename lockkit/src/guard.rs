//! What must be undone if its owner is dropped, the one `Drop` that undoes it, and the body that runs under it.

use std::{
    fmt,
    future::{Future, poll_fn},
    ops::Deref,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
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

tokio::task_local! {
    /// The commits of the body that runs now.
    static COMMITS: Arc<Commits>;
}

/// The commits of one body that were sent and not answered yet.
struct Commits {
    unanswered: AtomicUsize,
    around: Option<Arc<Self>>,
}

/// A commit that is on its way. Until this is dropped, no body around it is stopped: only the answer to the commit tells
/// whether the work was done.
pub(crate) struct CommitSent(Option<Arc<Commits>>);

impl CommitSent {
    /// The commit is sent next.
    pub(crate) fn now() -> Self {
        let innermost = COMMITS.try_with(Arc::clone).ok();
        bodies(innermost.as_deref()).for_each(|it| _ = it.unanswered.fetch_add(1, Ordering::Relaxed));
        Self(innermost)
    }
}

impl Drop for CommitSent {
    fn drop(&mut self) {
        bodies(self.0.as_deref()).for_each(|it| _ = it.unanswered.fetch_sub(1, Ordering::Relaxed));
    }
}

/// The innermost body and those around it.
fn bodies(innermost: Option<&Commits>) -> impl Iterator<Item = &Commits> {
    std::iter::successors(innermost, |it| it.around.as_deref())
}

/// Runs `body`, and ends it with an error when the lock that it runs under is lost.
///
/// A body whose commit is on its way is not ended: the caller would repeat work that was done.
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
    let commits = Arc::new(Commits { unanswered: AtomicUsize::new(0), around: COMMITS.try_with(Arc::clone).ok() });
    let is_committing = || commits.unanswered.load(Ordering::Relaxed) > 0;
    let (mut body, mut lost) = (pin!(COMMITS.scope(commits.clone(), body)), pin!(lost));
    poll_fn(|context| {
        let committing = is_committing();
        if !committing {
            // Check the clock before each poll: after SIGSTOP the body's I/O can wake before the timer.
            if let Err(err) = check() {
                return Poll::Ready(Err(err.into()));
            }
            if let Poll::Ready(err) = lost.as_mut().poll(context) {
                return Poll::Ready(Err(err.into()));
            }
        }
        if let Poll::Ready(result) = body.as_mut().poll(context) {
            return Poll::Ready(result.and_then(|value| check().map(|()| value).map_err(E::from)));
        }
        // The commit was answered during this poll: from here on the loss must wake the body again.
        if committing
            && !is_committing()
            && let Poll::Ready(err) = lost.as_mut().poll(context)
        {
            return Poll::Ready(Err(err.into()));
        }
        Poll::Pending
    })
    .await
}
