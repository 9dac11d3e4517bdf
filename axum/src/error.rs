//! What a client is told of an error of lockkit.

use std::error::Error as StdError;

use axum_core::response::{IntoResponse, Response};
use http::StatusCode;
use lockkit::{Error, Fault};
use tracing::{debug, error, warn};

use crate::problem::{Problem, TARGET};

/// An error of lockkit as an HTTP answer.
///
/// | what happened | status | `Retry-After` |
/// |---|---|---|
/// | another holder has the lock, or another writer was first (`is_contended`, `is_conflict`) | 409 | yes |
/// | the stock is sold out | 409 | no |
/// | the idempotency key was used for another request ([`Error::Mismatch`]) | 422 | no |
/// | the row to lock does not exist ([`Error::NoSuchRow`]) | 404 | no |
/// | the text of a key is not valid ([`Error::InvalidKey`]): a client's part of it, as a rule | 400 | no |
/// | the lock was lost: a part of the work may be done | 503 | no |
/// | the service is closing | 503 | yes |
/// | the store or the database cannot be used now, the pool is full, or retries ran out | 503 | yes |
/// | anything else, such as a mistake in the program | 500 | no |
///
/// After a lost lock no `Retry-After` asks a client to repeat what may have been done, and [`Error::OutcomeUnknown`] is
/// a 500 for the same reason. The body is JSON of [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) with the members
/// `type`, `title`, `status` and `detail`, and names no key, no table and no SQL. All of that goes to
/// [`tracing`](https://docs.rs/tracing), with the target `lockkit_axum`: at the level `error` for a 500, `warn` for a
/// 503, and `debug` for the others.
///
/// # Example
/// Alone as the error of a handler, or as the answer of one variant of the service's own error:
/// ```
/// use axum::response::{IntoResponse, Response};
/// use lockkit_axum::LockError;
///
/// #[derive(Debug, thiserror::Error)]
/// enum ApiError {
///     #[error("declined")]
///     Declined,
///     #[error(transparent)]
///     Lock(#[from] lockkit::Error), // what `#[with_lock]` and all of lockkit convert into
/// }
///
/// impl IntoResponse for ApiError {
///     fn into_response(self) -> Response {
///         match self {
///             Self::Declined => axum::http::StatusCode::PAYMENT_REQUIRED.into_response(),
///             Self::Lock(err) => LockError(err).into_response(),
///         }
///     }
/// }
///
/// let answer = ApiError::Lock(lockkit::Error::conflict()).into_response();
/// assert_eq!(answer.status(), 409);
/// assert_eq!(answer.headers()["retry-after"], "1");
/// ```
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct LockError(#[from] pub Error);

impl LockError {
    /// The status of the answer.
    ///
    /// ```
    /// use lockkit_axum::LockError;
    ///
    /// let held = lockkit::Error::contended("nightly", std::time::Duration::ZERO, None);
    /// assert_eq!(LockError(held).status(), 409);
    /// ```
    pub fn status(&self) -> StatusCode {
        self.problem().status
    }

    fn problem(&self) -> Problem {
        let Self(err) = self;
        let problem = |status, detail| Problem { status, kind: None, detail, may_repeat: false };
        let for_now = |status, detail| Problem { may_repeat: true, ..problem(status, detail) };
        match err {
            err if err.is_contended() => {
                for_now(StatusCode::CONFLICT, "Another request is being processed that excludes this one.")
            }
            err if err.is_conflict() => for_now(StatusCode::CONFLICT, "Another request has changed the data first."),
            err if err.is_lost() => problem(
                StatusCode::SERVICE_UNAVAILABLE,
                "The request lost its lock and was stopped. A part of it may be done.",
            ),
            Error::Database { fault: Fault::Contended, .. } => {
                for_now(StatusCode::CONFLICT, "Another request is using the data.")
            }
            Error::Database { fault: Fault::Unavailable | Fault::ReadOnly, .. }
            | Error::PoolStarved { .. }
            | Error::RetriesExhausted { .. } => {
                for_now(StatusCode::SERVICE_UNAVAILABLE, "The service cannot process the request at the moment.")
            }
            err if err.is_transient() => {
                for_now(StatusCode::SERVICE_UNAVAILABLE, "The service cannot process the request at the moment.")
            }
            Error::Closed { .. } => for_now(StatusCode::SERVICE_UNAVAILABLE, "The service is stopping."),
            Error::SoldOut { .. } => problem(StatusCode::CONFLICT, "Sold out."),
            Error::NoSuchRow { .. } => problem(StatusCode::NOT_FOUND, "There is no such resource."),
            Error::InvalidKey { .. } => problem(
                StatusCode::BAD_REQUEST,
                "A name in the request is empty, too long, or has characters that are not allowed.",
            ),
            Error::Mismatch { .. } => problem(
                StatusCode::UNPROCESSABLE_ENTITY,
                "The idempotency key was used for another request. Give this one a key of its own.",
            ),
            _ => problem(StatusCode::INTERNAL_SERVER_ERROR, "The service has failed."),
        }
    }
}

impl IntoResponse for LockError {
    fn into_response(self) -> Response {
        let problem = self.problem();
        let status = problem.status.as_u16();
        let error: &(dyn StdError + 'static) = &self.0;
        match problem.status {
            StatusCode::INTERNAL_SERVER_ERROR => error!(target: TARGET, error, status, "request failed"),
            StatusCode::SERVICE_UNAVAILABLE => warn!(target: TARGET, error, status, "request refused"),
            _ => debug!(target: TARGET, error, status, "request refused"),
        }
        problem.into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        iter::successors,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use tracing::{
        Event, Level, Subscriber,
        field::{Field, Visit},
    };
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

    use super::*;

    /// The level of each event, and its error with the sources.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<(Level, String)>>>);

    struct Text(String);

    impl Visit for Text {
        fn record_error(&mut self, _: &Field, err: &(dyn StdError + 'static)) {
            let sources = successors(Some(err), |&err| err.source());
            self.0 = sources.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        }

        fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
    }

    impl<S: Subscriber> Layer<S> for Log {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            assert_eq!(event.metadata().target(), "lockkit_axum");
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push((*event.metadata().level(), text.0));
        }
    }

    #[test]
    fn the_log_has_what_the_client_is_not_told() {
        let key = lockkit::Key::from("secret:42");
        let database = |fault| Error::database("renewing leases", &key, fault, "SELECT 1 FROM t_secret");
        let held = || Error::contended("secret:42", Duration::ZERO, None);
        let log = Log::default();
        let logging = tracing::subscriber::set_default(tracing_subscriber::registry().with(log.clone()));
        for err in [database(Fault::Other), database(Fault::Unavailable), held()] {
            let _answer = LockError(err).into_response();
        }
        drop(logging);
        let failed = "database error while renewing leases `secret:42`: SELECT 1 FROM t_secret".to_owned();
        let expected = [(Level::ERROR, failed.clone()), (Level::WARN, failed), (Level::DEBUG, held().to_string())];
        assert_eq!(*log.0.lock().unwrap(), expected);
    }
}
