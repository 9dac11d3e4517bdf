//! Tasks that shuttle runs.

use std::{
    any::Any,
    cell::RefCell,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
};

use shuttle::{current, future, thread};

// `JoinSet` is what the checks of a store use, which do not run here.
pub use original::task::{JoinSet, Unconstrained, unconstrained};
pub use shuttle::scheduler::TaskId as Id;

/// As in Tokio.
#[derive(Debug)]
pub struct JoinHandle<T>(future::JoinHandle<T>);

/// The task was aborted.
#[derive(Debug)]
pub struct JoinError(());

/// As in Tokio.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    JoinHandle(future::spawn(task))
}

/// As in Tokio.
pub fn try_id() -> Option<Id> {
    current::get_current_task()
}

/// As in Tokio. The task does not stand back, as with shuttle's own: any other may run.
pub async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| JoinError(()))
    }
}

impl JoinError {
    /// As in Tokio. A panic ends the run, so there is none.
    ///
    /// # Errors
    /// Always itself.
    pub fn try_into_panic(self) -> Result<Box<dyn Any + Send>, Self> {
        Err(self)
    }
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task was aborted")
    }
}

impl std::error::Error for JoinError {}

/// As in Tokio, for a value that can be cloned. Each task has its own, as Tokio has it for each thread.
pub struct LocalKey<T: 'static>(#[doc(hidden)] pub &'static thread::LocalKey<RefCell<Option<T>>>);

impl<T> LocalKey<T> {
    /// As in Tokio.
    ///
    /// # Errors
    /// The code is not in a scope.
    pub fn try_with<R>(&'static self, read: impl FnOnce(&T) -> R) -> Result<R, AccessError> {
        self.0.with(|value| value.borrow().as_ref().map(read)).ok_or(AccessError(()))
    }

    /// As in Tokio.
    pub fn sync_scope<R>(&'static self, value: T, run: impl FnOnce() -> R) -> R {
        let before = self.0.with(|it| it.replace(Some(value)));
        let result = run();
        self.0.with(|it| it.replace(before));
        result
    }

    /// As in Tokio, but what the future drops is outside of the scope.
    pub async fn scope<F: Future>(&'static self, value: T, future: F) -> F::Output
    where
        T: Clone,
    {
        let mut future = Box::pin(future);
        poll_fn(|context| self.sync_scope(value.clone(), || future.as_mut().poll(context))).await
    }
}

impl<T> fmt::Debug for LocalKey<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalKey").finish_non_exhaustive()
    }
}

/// The code is not in the scope of a value.
#[derive(Debug)]
pub struct AccessError(());
