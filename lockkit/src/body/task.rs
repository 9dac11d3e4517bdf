//! Tasks that continue without their caller, and work with a deadline. Knows no store and no database.

use std::{future::Future, io};

use tokio::{
    task::{JoinError, JoinHandle},
    time::{Instant, timeout_at},
};

use crate::value::{
    error::{Error, Fault, Result},
    key::Key,
};

/// Waits for a task that continues even if the caller is dropped.
pub(crate) async fn finished<T>(doing: &'static str, task: JoinHandle<Result<T>>) -> Result<T> {
    result_of(doing, task.await)
}

/// What a task has returned, or its panic.
pub(crate) fn result_of<T>(doing: &'static str, ended: Result<Result<T>, JoinError>) -> Result<T> {
    match ended {
        Ok(result) => result,
        Err(failed) => {
            if let Ok(panic) = failed.try_into_panic() {
                std::panic::resume_unwind(panic);
            }
            Err(runtime_ended(doing, None))
        }
    }
}

/// The error of a task that ended with its runtime.
pub(crate) fn runtime_ended(doing: &'static str, key: Option<&Key>) -> Error {
    Error::database(doing, key, Fault::Unavailable, io::Error::other("the runtime has shut down"))
}

/// The error of a call without an answer in time.
pub(crate) fn no_answer(doing: &'static str, key: Option<&Key>) -> Error {
    Error::database(doing, key, Fault::Unavailable, timed_out())
}

/// The I/O error of a server that does not answer, as the operating system would report it.
pub(crate) fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server did not answer in time")
}

/// Whether this is the server's answer. Otherwise the last statement may still be on its way.
pub(crate) fn is_answered(err: &Error) -> bool {
    !matches!(err, Error::Database { fault: Fault::Unavailable, .. } | Error::OutcomeUnknown { .. })
}

/// Runs `work` until `deadline`. Drops `work` and returns `None` if the deadline comes first.
pub(crate) async fn until<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => timeout_at(deadline, work).await.ok(),
        None => Some(work.await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_server_is_its_answer_and_a_broken_connection_is_none() {
        let failed = |fault| Error::database("testing", None, fault, "?");
        assert!([Fault::Deadlock, Fault::Contended, Fault::Other].into_iter().all(|it| is_answered(&failed(it))));
        assert!(!is_answered(&failed(Fault::Unavailable)) && !is_answered(&no_answer("testing", None)));
        assert!(!is_answered(&Error::OutcomeUnknown { source: "?".into() }));
    }
}
