//! The watch that runs a body under a lock.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use tracing::Span;

use crate::{
    body::commits::Commits,
    policy::OnLost,
    value::error::{Error, Result},
};

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

    /// Runs the body.
    pub(crate) async fn run<T, E: From<Error>>(mut self, body: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut body = pin!(body);
        let fail = |err: Error| Err(err.into());
        poll_fn(|context| self.poll(context, body.as_mut(), Result::is_ok, fail)).await
    }
}
