//! Tasks that go on without their caller, and work that ends at a deadline. Knows no store and no database.

use std::{future::Future, io};

use tokio::{
    task::JoinHandle,
    time::{Instant, timeout_at},
};

use crate::{
    error::{Error, Fault, Result},
    key::Key,
};

/// The result of a task that goes on even if the caller is dropped.
pub(crate) async fn finished<T>(doing: &'static str, task: JoinHandle<Result<T>>) -> Result<T> {
    match task.await {
        Ok(result) => result,
        Err(failed) => {
            if let Ok(panic) = failed.try_into_panic() {
                std::panic::resume_unwind(panic);
            }
            let source = io::Error::other("the runtime has shut down");
            Err(Error::database(doing, None, Fault::Unavailable, source))
        }
    }
}

/// No answer came in time.
pub(crate) fn no_answer(doing: &'static str, key: Option<&Key>) -> Error {
    Error::database(doing, key, Fault::Unavailable, timed_out())
}

/// What the operating system would say of a server that does not answer, if it noticed.
pub(crate) fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server did not answer in time")
}

/// Runs `work` until `deadline`; `None` when that comes first. `work` is dropped then.
pub(crate) async fn until<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => timeout_at(deadline, work).await.ok(),
        None => Some(work.await),
    }
}
