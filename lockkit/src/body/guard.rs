//! A resource with a cleanup on drop, and the watch that runs a body under a lock.
//!
//! A body whose commit is in flight is not stopped when its lease is lost, because a caller that gets `Lost` repeats
//! the work. Until the answer to the COMMIT arrives, no loss of trust ends the body (`CommitSent`), and the answer
//! decides. A commit that does not depend on the lease is also waited for; the loss is reported after it. The deadline
//! of a `RetryPolicy` follows the same rule (`Deadline` in `retry::bounds`), for 30 s at most.

use std::{
    fmt,
    future::{Future, poll_fn},
    ops::Deref,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use tracing::Span;

use crate::{
    policy::OnLost,
    value::error::{Error, Result},
};

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

tokio::task_local! {
    /// The commits of the running body.
    static COMMITS: Arc<Commits>;
}

/// The commits of one body that were sent and have no answer yet.
pub(crate) struct Commits {
    unanswered: AtomicUsize,
    around: Option<Arc<Self>>,
}

impl Commits {
    /// Those of a body that begins here.
    pub(crate) fn new() -> Arc<Self> {
        let around = COMMITS.try_with(Arc::clone).ok();
        Arc::new(Self { unanswered: AtomicUsize::new(0), around })
    }

    /// Whether a commit is in flight.
    pub(crate) fn are_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) > 0
    }

    /// Runs `poll`, which polls the body.
    pub(crate) fn enter<T>(self: &Arc<Self>, poll: impl FnOnce() -> T) -> T {
        COMMITS.sync_scope(self.clone(), poll)
    }
}

/// A commit in flight. Until this is dropped, no enclosing body is stopped, because only the answer to the commit tells
/// whether the work was done.
pub(crate) struct CommitSent(Option<Arc<Commits>>);

impl CommitSent {
    /// Registers a commit that is sent next.
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

/// The innermost body and all enclosing ones.
fn bodies(innermost: Option<&Commits>) -> impl Iterator<Item = &Commits> {
    std::iter::successors(innermost, |it| it.around.as_deref())
}

/// Runs a body, and ends it with an error when its lock is lost.
///
/// A body with a commit in flight is not ended. Otherwise the caller could repeat work that was committed.
///
/// The body is passed to each poll as a `dyn Future`. So this code is compiled once instead of once per body, and the
/// future that runs a body is `Send` if the body is.
pub struct Watch<'a> {
    on_lost: OnLost,
    check: Box<dyn Fn() -> Result<()> + Send + Sync + 'a>,
    lost: Pin<Box<dyn Future<Output = Error> + Send + 'a>>,
    commits: Arc<Commits>,
    span: Span,
}

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("on_lost", &self.on_lost).finish_non_exhaustive()
    }
}

impl<'a> Watch<'a> {
    /// `check` fails if the lock is no longer held. `lost` completes when the lock is lost.
    pub(crate) fn new(
        on_lost: OnLost,
        check: impl Fn() -> Result<()> + Send + Sync + 'a,
        lost: impl Future<Output = Error> + Send + 'a,
    ) -> Self {
        Self { on_lost, check: Box::new(check), lost: Box::pin(lost), commits: Commits::new(), span: Span::none() }
    }

    /// Runs the body in this span.
    pub(crate) fn in_span(self, span: Span) -> Self {
        Self { span, ..self }
    }

    /// Polls the body. `fail` turns an error of the watch into a result of the body.
    pub(crate) fn poll<R>(
        &mut self,
        context: &mut Context<'_>,
        body: Pin<&mut dyn Future<Output = R>>,
        is_ok: impl FnOnce(&R) -> bool,
        fail: impl FnOnce(Error) -> R,
    ) -> Poll<R> {
        let committing = self.commits.are_unanswered();
        if let Err(err) = self.before(committing, context) {
            return Poll::Ready(fail(err));
        }
        let polled = match self.on_lost {
            OnLost::Continue => self.span.in_scope(|| body.poll(context)),
            OnLost::Stop => self.commits.enter(|| self.span.in_scope(|| body.poll(context))),
        };
        let after = match &polled {
            Poll::Ready(result) if is_ok(result) => (self.check)(),
            Poll::Ready(_) => Ok(()),
            Poll::Pending => self.after(committing, context),
        };
        match after {
            Ok(()) => polled,
            Err(err) => Poll::Ready(fail(err)),
        }
    }

    fn before(&mut self, committing: bool, context: &mut Context<'_>) -> Result<()> {
        if self.on_lost == OnLost::Continue || committing {
            return Ok(());
        }
        // Check the clock before each poll: after SIGSTOP the body's I/O can wake before the timer.
        (self.check)()?;
        self.lost(context)
    }

    /// Polls for a loss if the commit was answered during this poll. From here on, the loss must wake the body again.
    fn after(&mut self, was_committing: bool, context: &mut Context<'_>) -> Result<()> {
        if was_committing && !self.commits.are_unanswered() { self.lost(context) } else { Ok(()) }
    }

    fn lost(&mut self, context: &mut Context<'_>) -> Result<()> {
        match self.lost.as_mut().poll(context) {
            Poll::Ready(err) => Err(err),
            Poll::Pending => Ok(()),
        }
    }
}

/// Runs `body` under a [`Watch`].
pub(crate) async fn guarded<T, E: From<Error>>(
    mut watch: Watch<'_>,
    body: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let mut body = pin!(body);
    let fail = |err: Error| Err(err.into());
    poll_fn(|context| watch.poll(context, body.as_mut(), Result::is_ok, fail)).await
}
