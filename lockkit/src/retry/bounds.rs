//! Runs a body under locks and until a deadline. The body is passed to each poll as a `dyn Future`, so this code is
//! compiled once instead of once per body, and its future is `Send` if the body is. Knows no database.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    task::{Unconstrained, unconstrained},
    time::{Instant, Sleep, sleep_until},
};

use crate::{
    body::{
        commits::{COMMIT_LIMIT, Commits},
        scope::Record,
    },
    retry::context::Attempts,
};

/// Runs a body until a deadline. Yields `None` if the deadline comes first. A commit that is on its way then is waited
/// for, because only its answer tells whether the work was done.
pub(crate) struct Bounded<'a, F> {
    bound: Bound,
    body: Pin<&'a mut F>,
}

/// The locks, the retry and the deadline of a body.
struct Bound {
    record: Option<Record>,
    attempts: Option<Attempts>,
    deadline: Option<Deadline>,
}

struct Deadline {
    /// Unconstrained by tokio's cooperative budget, so that a body that is always ready cannot starve it.
    sleep: Pin<Box<Unconstrained<Sleep>>>,
    commits: Arc<Commits>,
    has_passed: bool,
}

impl<'a, F> Bounded<'a, F> {
    pub(crate) fn new(record: Option<Record>, deadline: Option<Instant>, body: Pin<&'a mut F>) -> Self {
        let deadline = deadline.map(Deadline::new);
        Self { bound: Bound { record, attempts: None, deadline }, body }
    }

    /// Runs the body as an attempt of a retry.
    pub(crate) fn within(mut self, attempts: &Attempts) -> Self {
        self.bound.attempts = Some(attempts.clone());
        self
    }
}

impl<F: Future> Future for Bounded<'_, F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<F::Output>> {
        let Self { bound, body } = &mut *self;
        bound.poll(context, body.as_mut())
    }
}

impl Bound {
    fn poll<R>(&mut self, context: &mut Context<'_>, body: Pin<&mut dyn Future<Output = R>>) -> Poll<Option<R>> {
        let poll = || match &self.record {
            Some(record) => record.enter(|| body.poll(context)),
            None => body.poll(context),
        };
        let poll = || match &self.deadline {
            Some(deadline) => deadline.commits.enter(poll),
            None => poll(),
        };
        let polled = match &self.attempts {
            Some(attempts) => attempts.enter(poll),
            None => poll(),
        };
        match (polled, &mut self.deadline) {
            (Poll::Ready(result), _) => Poll::Ready(Some(result)),
            (Poll::Pending, Some(deadline)) => {
                let Ended { commits } = ready!(deadline.poll(context));
                if let Some(attempts) = self.attempts.as_ref().filter(|_| commits) {
                    attempts.set_outcome_unknown();
                }
                Poll::Ready(None)
            }
            (Poll::Pending, None) => Poll::Pending,
        }
    }
}

/// A body that did not end by itself.
struct Ended {
    /// Whether a commit was on its way at the deadline.
    commits: bool,
}

impl Deadline {
    fn new(at: Instant) -> Self {
        Self { sleep: Box::pin(unconstrained(sleep_until(at))), commits: Commits::new(), has_passed: false }
    }

    /// Whether a body that is not ready has to end.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        if !self.has_passed {
            ready!(self.sleep.as_mut().poll(context));
            if !self.commits.are_unanswered() {
                return Poll::Ready(Ended { commits: false });
            }
            self.has_passed = true;
            self.sleep = Box::pin(unconstrained(sleep_until(Instant::now() + COMMIT_LIMIT)));
        }
        // The body may go on after the answer, to release a lease for example. Only its result tells what the answer
        // was.
        ready!(self.sleep.as_mut().poll(context));
        Poll::Ready(Ended { commits: true })
    }
}
