//! The commits of a running body that have no answer yet.
//!
//! A body whose commit is in flight is not stopped when its lease is lost, because a caller that gets `Lost` repeats
//! the work. Until the answer to the COMMIT arrives, no loss of trust ends the body, and the answer decides. A commit
//! that does not depend on the lease is also waited for; the loss is reported after it. The deadline of a `RetryPolicy`
//! follows the same rule (`Deadline` in `retry::bounds`). Neither waits for longer than [`COMMIT_LIMIT`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// How long a body that is to end may wait for the answer to its commit.
pub(crate) const COMMIT_LIMIT: Duration = Duration::from_secs(30);

tokio::task_local! {
    /// The commits of the running body.
    static COMMITS: Arc<Commits>;
}

/// The commits of one body that were sent and have no answer yet.
#[derive(Debug)]
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
#[allow(unreachable_pub, reason = "a simulation has a transaction of its own")]
#[derive(Debug)]
pub struct CommitSent(Option<Arc<Commits>>);

impl CommitSent {
    /// Registers a commit that is sent next.
    #[allow(unreachable_pub, reason = "as above")]
    pub fn now() -> Self {
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
