//! The key that a client has sent, and its user.

use std::fmt::Display;

use axum::extract::OriginalUri;
use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use http::{Method, Uri, request::Parts};
use lockkit::Idempotent;
use serde::Serialize;

use super::{
    header::{self, IdempotencyKeyRejection},
    request::IdempotentRequest,
};

/// Extractor: the key of the header `Idempotency-Key` ([draft 07]). With the feature `idempotent`.
///
/// [draft 07]: https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07
///
/// The first request with a key does its work in a transaction, which commits together with the answer: status, body,
/// and the headers that are [stored](IdempotentRequest::store_header). A request that is repeated gets this answer,
/// byte for byte, with the header `Idempotent-Replayed: true`, and the work is not done again. After a crash, an `Err`,
/// a panic or a client that disconnects there is neither work nor answer, and the next request does the work.
///
/// | the request | the answer |
/// |---|---|
/// | has no key, where it is not an `Option<IdempotencyKey>` | 400 |
/// | has a key that is empty, repeated, longer than 128 bytes, or not ASCII | 400 |
/// | has the key of one that is still being processed | that one's answer, or 409 after [`wait`](IdempotentRequest::wait) |
/// | has the key of another request: other method, path, query or payload | 422 |
/// | has the key of one that was answered | its answer |
///
/// The header is a string in quotes (RFC 9651), `"8e03978e"`. Without the quotes, as most clients send it, it is the
/// same key, if it has no spaces, quotes, commas and semicolons.
///
/// Use it for work that is in the database. The transaction cannot undo a payment at a provider or a mail: see
/// [`Idempotent`](lockkit::Idempotent).
///
/// # Keys of two users never meet
///
/// A client chooses its keys. If the key alone named the answer, a client that guesses a key, or reads one in a log,
/// would get the answer to another user; and two clients that count `1`, `2`, `3` would get each other's answers. So a
/// key has no method that does anything before [`for_user`](Self::for_user) has named its user.
///
/// # Example
/// ```
/// use axum::{Json, Router, extract::{Path, State}, http::StatusCode, response::Response, routing::post};
/// use lockkit_axum::{IdempotencyKey, LockError};
/// use serde::{Deserialize, Serialize};
/// use sqlx::SqlitePool;
///
/// #[derive(Serialize, Deserialize)]
/// struct Payment { cents: i64 }
///
/// async fn pay(
///     Path(user_id): Path<i64>, // in a service: the user who has signed in, not one that the request names
///     key: IdempotencyKey,
///     State(pool): State<SqlitePool>,
///     Json(payment): Json<Payment>,
/// ) -> Result<Response, LockError> {
///     key.for_user(user_id)
///         .request(&payment)
///         .run(&pool, async |tx| {
///             # let database = |err| lockkit::Error::database("paying", None, lockkit::Fault::Other, err);
///             let paid = sqlx::query("INSERT INTO payments (cents) VALUES (?)").bind(payment.cents);
///             let id = paid.execute(&mut **tx).await.map_err(database)?.last_insert_rowid();
///             Ok((StatusCode::CREATED, Json(id)))
///         })
///         .await
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// # sqlx::query("CREATE TABLE payments (id INTEGER PRIMARY KEY, cents INTEGER)").execute(&pool).await?;
/// # use tower::ServiceExt;
/// let app = Router::new().route("/users/{user_id}/payments", post(pay)).with_state(pool);
/// # let send = || app.clone().oneshot(axum::http::Request::post("/users/7/payments")
/// #     .header("idempotency-key", "\"8e03978e\"").header("content-type", "application/json")
/// #     .body(axum::body::Body::from("{\"cents\":1999}")).unwrap());
/// # let (first, again) = (send().await?, send().await?);
/// # assert_eq!((first.status(), again.status()), (StatusCode::CREATED, StatusCode::CREATED));
/// # assert_eq!(again.headers()["idempotent-replayed"], "true");
/// # assert_eq!(axum::body::to_bytes(again.into_body(), 99).await?, "1");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a key does nothing until `for_user`, `request` and `run` are called"]
pub struct IdempotencyKey {
    text: String,
    method: Method,
    uri: Uri,
}

impl IdempotencyKey {
    /// Names the user of the key: the id of the user, tenant or API client that the service has authenticated. The
    /// same key of another user is another request.
    ///
    /// The answer is stored as `http:{user}:{key}`, with `%3A` for a colon in `user` and `%25` for a `%`. If several
    /// services share one database, make their names part of it, as in `for_user(format!("billing/{id}"))`. User and
    /// key have at most 249 bytes together; hash an id that may be longer than 121. A longer name is
    /// [`Error::InvalidKey`](lockkit::Error::InvalidKey). An empty name is
    /// [`Error::InvalidOption`](lockkit::Error::InvalidOption): all who have none would be one user. Both are errors of
    /// [`run`](IdempotentRequest::run), which does nothing then.
    pub fn for_user(self, user: impl Display) -> UserKey {
        let Self { text, method, uri } = self;
        let user = user.to_string();
        let is_nobody = user.trim().is_empty();
        // The first colon is the end of the user, so that two users cannot make one key.
        let user = user.replace('%', "%25").replace(':', "%3A");
        UserKey { key: format!("http:{user}:{text}"), is_nobody, method, uri }
    }

    /// The key as the client has sent it, without quotes.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn of(parts: &Parts) -> Result<Self, IdempotencyKeyRejection> {
        let text = header::key(&parts.headers)?;
        // In a nested router, the other one lacks what the outer router has matched.
        let uri = parts.extensions.get().map_or(&parts.uri, |OriginalUri(whole)| whole);
        Ok(Self { text, method: parts.method.clone(), uri: uri.clone() })
    }
}

impl<State: Sync> FromRequestParts<State> for IdempotencyKey {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Self, IdempotencyKeyRejection> {
        Self::of(parts)
    }
}

impl<State: Sync> OptionalFromRequestParts<State> for IdempotencyKey {
    type Rejection = IdempotencyKeyRejection;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Option<Self>, IdempotencyKeyRejection> {
        match Self::of(parts) {
            Err(IdempotencyKeyRejection::Missing) => Ok(None),
            key => key.map(Some),
        }
    }
}

/// The idempotency key of a user, made by [`IdempotencyKey::for_user`]. It needs the payload of the request next.
#[derive(Debug, Clone)]
#[must_use = "a key does nothing until `request` and `run` are called"]
pub struct UserKey {
    key: String,
    /// The name of the user is empty.
    is_nobody: bool,
    method: Method,
    uri: Uri,
}

impl UserKey {
    /// The payload of the request: the value that the handler got by `Json`, `Form` or otherwise, or `&()` if there is
    /// none. Method, path and query of the request count by themselves.
    ///
    /// Another request with the same key is refused with 422, so that a client that uses a key twice by mistake does
    /// not get the answer to something else. As in [`Idempotent::request`], the order of fields does not count.
    pub fn request(self, payload: &(impl Serialize + ?Sized)) -> IdempotentRequest {
        let Self { key, is_nobody, method, uri } = self;
        let target = uri.path_and_query().map_or("/", |it| it.as_str());
        IdempotentRequest::new(Idempotent::key(key).request(&(method.as_str(), target, payload)), is_nobody)
    }

    /// As [`request`](Self::request), with the bytes of the body. JSON with other spaces is another request then.
    pub fn request_bytes(self, body: &[u8]) -> IdempotentRequest {
        // As text whose characters are the bytes: an array of numbers would take 32 times as much memory.
        let text: String = body.iter().map(|&it| char::from(it)).collect();
        self.request(&text)
    }
}
