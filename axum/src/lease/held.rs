//! The lease of a request, for its handler.

use std::{convert::Infallible, ops::Deref};

use axum_core::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};
use lockkit::{Lease, LeaseStore};
use tracing::error;

use crate::problem::{Problem, TARGET};

/// Extractor: the lease that a [`LeaseLayer`](crate::LeaseLayer) has taken for this request, for its fence, or to
/// commit a transaction with it.
///
/// `Option<Held<S>>` is `None` where the layer took none. Of two layers with leases of one store, it is the lease of
/// the inner one. Outside axum, it is one of the request's extensions: `request.extensions().get::<Held<S>>()`.
///
/// The layer releases the lease after the handler has returned. From then on a handle that the handler has given to
/// another task, or to the stream of its answer, is not trusted any more, and commits nothing.
///
/// # Example
/// ```
/// use axum::{Router, extract::{Path, State}, routing::post};
/// use lockkit::Leases;
/// use lockkit_axum::{Held, LeaseLayer, LockError};
/// use sqlx::SqlitePool;
///
/// /// Commits only if the lease is still held at that moment.
/// async fn close(Held(lease): Held<SqlitePool>, State(pool): State<SqlitePool>) -> Result<(), LockError> {
///     let tx = lockkit::begin(&pool).await?;
///     // … write …
///     Ok(lease.commit(tx).await?)
/// }
///
/// fn app(pool: SqlitePool, leases: Leases<SqlitePool>) -> Router {
///     let layer = LeaseLayer::new(move |Path(month): Path<String>| leases.lease(format!("month:{month}")));
///     Router::new().route("/months/{month}/close", post(close)).route_layer(layer).with_state(pool)
/// }
/// ```
#[derive(Debug)]
pub struct Held<S: LeaseStore>(pub Lease<S>);

impl<S: LeaseStore> Clone for Held<S> {
    fn clone(&self) -> Self {
        Self(self.0.share())
    }
}

impl<S: LeaseStore> Deref for Held<S> {
    type Target = Lease<S>;

    fn deref(&self) -> &Lease<S> {
        &self.0
    }
}

impl<S: LeaseStore, State: Sync> FromRequestParts<State> for Held<S> {
    type Rejection = NotHeld;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Self, NotHeld> {
        parts.extensions.get().cloned().ok_or(NotHeld)
    }
}

impl<S: LeaseStore, State: Sync> OptionalFromRequestParts<State> for Held<S> {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The handler needs a lease, and no [`LeaseLayer`](crate::LeaseLayer) with leases of that store has taken one for this
/// request. Answered with 500.
#[derive(Debug, thiserror::Error)]
#[error("no lease was taken for this request: put a `LeaseLayer` with leases of this store around the handler")]
#[non_exhaustive]
pub struct NotHeld;

impl IntoResponse for NotHeld {
    fn into_response(self) -> Response {
        error!(target: TARGET, "{self}");
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Problem { status, kind: None, detail: "The service has failed.", may_repeat: false }.into_response()
    }
}
