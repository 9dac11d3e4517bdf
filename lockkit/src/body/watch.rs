//! The watch that runs a body under a lock.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use tokio::{
    task::{Unconstrained, unconstrained},
    time::{Sleep, sleep},
};
use tracing::Span;

use crate::{
    body::{
        commits::{COMMIT_LIMIT, Commits},
        task::timed_out,
    },
    policy::OnLost,
    value::error::{Error, Result},
};

/// Runs a body, and ends it with an error when its lock is lost.
///
/// A body with a commit in flight is not ended before the answer, which is waited for at most [`COMMIT_LIMIT`] after
/// the loss. Otherwise the caller could repeat work that was committed. Without an answer the outcome is unknown.
///
/// The body is passed to each poll as a `dyn Future`. So this code is compiled once instead of once per body, and the
/// future that runs a body is `Send` if the body is.
pub struct Watch<'a> {
    on_lost: OnLost,
    check: Box<dyn Fn() -> Result<()> + Send + Sync + 'a>,
    losses: Box<dyn Fn() -> Lost<'a> + Send + Sync + 'a>,
    lost: Lost<'a>,
    commits: Arc<Commits>,
    /// How long the answer to a commit is still waited for. `None` before the loss.
    patience: Option<Pin<Box<Unconstrained<Sleep>>>>,
    span: Span,
}

/// Completes when the lock is lost.
type Lost<'a> = Pin<Box<dyn Future<Output = Error> + Send + 'a>>;

impl fmt::Debug for Watch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("on_lost", &self.on_lost).finish_non_exhaustive()
    }
}

impl<'a> Watch<'a> {
    /// `check` fails if the lock is no longer held. The futures of `lost` complete when the lock is lost.
    pub(crate) fn new<F>(
        on_lost: OnLost,
        check: impl Fn() -> Result<()> + Send + Sync + 'a,
        lost: impl Fn() -> F + Send + Sync + 'a,
    ) -> Self
    where
        F: Future<Output = Error> + Send + 'a,
    {
        let losses = Box::new(move || Box::pin(lost()) as Lost<'a>);
        let (check, lost, commits) = (Box::new(check), losses(), Commits::new());
        Self { on_lost, check, losses, lost, commits, patience: None, span: Span::none() }
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
        let was_committing = self.commits.are_unanswered();
        if let Err(err) = self.before(was_committing, context) {
            return Poll::Ready(fail(err));
        }
        let polled = match self.on_lost {
            OnLost::Continue => self.span.in_scope(|| body.poll(context)),
            OnLost::Stop => self.commits.enter(|| self.span.in_scope(|| body.poll(context))),
        };
        let after = match &polled {
            Poll::Ready(result) if is_ok(result) => (self.check)(),
            Poll::Pending if self.commits.are_unanswered() => self.committing(context),
            // The commit was answered during this poll. From here on, the loss must wake the body again.
            Poll::Pending if was_committing => self.lost(context),
            Poll::Ready(_) | Poll::Pending => Ok(()),
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

    /// Waits for the answer to a commit, after a loss with a limit.
    fn committing(&mut self, context: &mut Context<'_>) -> Result<()> {
        let patience = match &mut self.patience {
            Some(patience) => patience,
            None if self.lost.as_mut().poll(context).is_pending() => return Ok(()),
            // Unconstrained by tokio's cooperative budget, so that a body that is always ready cannot starve it.
            unlimited => unlimited.insert(Box::pin(unconstrained(sleep(COMMIT_LIMIT)))),
        };
        match patience.as_mut().poll(context) {
            Poll::Ready(()) => Err(Error::OutcomeUnknown { source: timed_out().into() }),
            Poll::Pending => Ok(()),
        }
    }

    /// Fails if the lock is lost, and otherwise lets its loss wake the body.
    fn lost(&mut self, context: &mut Context<'_>) -> Result<()> {
        if self.patience.take().is_some() {
            // The commit may have ended the lease whose loss was seen, which is no loss then.
            self.lost = (self.losses)();
        }
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

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use tokio::time::{Instant, sleep_until};

    use super::*;
    use crate::{
        body::commits::CommitSent,
        value::{error::LossReason, fence::Fence},
    };

    const SECOND: Duration = Duration::from_secs(1);

    fn lost() -> Error {
        Error::lost("k", Fence::from(1), LossReason::Stolen)
    }

    /// Runs the body under a lock that is lost after a second.
    async fn run(on_lost: OnLost, body: impl Future<Output = Result<()>>) -> Result<()> {
        let until = Instant::now() + SECOND;
        let check = || if Instant::now() < until { Ok(()) } else { Err(lost()) };
        let losing = || async move {
            sleep_until(until).await;
            lost()
        };
        Watch::new(on_lost, check, losing).run(body).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_goes_on_after_the_loss_returns_it_unless_it_has_failed_itself() {
        let ended = async |on_lost, result| {
            let body = async {
                sleep(2 * SECOND).await;
                result
            };
            run(on_lost, body).await.unwrap_err()
        };
        let failed = || Err(Error::InvalidKey { key: "of the body".into(), reason: "?" });
        assert!(ended(OnLost::Continue, Ok(())).await.is_lost());
        assert!(matches!(ended(OnLost::Continue, failed()).await, Error::InvalidKey { .. }));
        assert!(ended(OnLost::Stop, failed()).await.is_lost());
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_in_flight_has_a_limited_time_from_the_loss_on_and_not_before() {
        let commit = async |takes: Duration| {
            let sent = CommitSent::now();
            sleep(takes).await;
            drop(sent);
            Ok(())
        };
        let never_lost = Watch::new(OnLost::Stop, || Ok(()), pending);
        never_lost.run::<_, Error>(commit(2 * COMMIT_LIMIT)).await.unwrap();
        let late = run(OnLost::Stop, commit(COMMIT_LIMIT + 2 * SECOND)).await;
        assert!(matches!(late, Err(Error::OutcomeUnknown { .. })), "{late:?}");
    }
}
