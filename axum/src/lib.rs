//! [lockkit] in HTTP services: a lease around a handler, the `Idempotency-Key` header, and answers to refused locks.
//! For axum 0.8; the lease also for any other service of tower, such as those of tonic.
//!
//! ```
//! use std::time::Duration;
//!
//! use axum::{Json, Router, extract::{Path, State}, http::StatusCode, response::Response, routing::post};
//! use lockkit::Leases;
//! use lockkit_axum::{Held, IdempotencyKey, LeaseLayer, LockError};
//! use sqlx::SqlitePool;
//!
//! /// Done once, however often the client sends its request; each time with the same answer.
//! async fn pay(
//!     Path(user_id): Path<i64>,
//!     key: IdempotencyKey,
//!     State(pool): State<SqlitePool>,
//!     Json(cents): Json<i64>,
//! ) -> Result<Response, LockError> {
//!     key.for_user(user_id)
//!         .request(&cents)
//!         .run(&pool, async |tx| {
//!             // … write with `&mut **tx`, which commits together with this answer …
//!             Ok((StatusCode::CREATED, Json(cents)))
//!         })
//!         .await
//! }
//!
//! /// Runs once at a time, in one process of many, and is stopped if its lease is lost.
//! async fn rebuild(Held(lease): Held<SqlitePool>) {
//!     println!("fence {}", lease.fence());
//! }
//!
//! fn app(pool: SqlitePool, leases: Leases<SqlitePool>) -> Router {
//!     let one_at_a_time = LeaseLayer::new(move |Path(report): Path<u64>| {
//!         leases.lease(format!("report:{report}")).wait(Duration::from_secs(2)) // then 409, `Retry-After: 1`
//!     });
//!     Router::new()
//!         .route("/reports/{report}/rebuild", post(rebuild).layer(one_at_a_time))
//!         .route("/users/{user_id}/payments", post(pay))
//!         .with_state(pool)
//! }
//! ```
//!
//! # Which one should you use?
//!
//! | | a request is handled | use it when | use another when |
//! |---|---|---|---|
//! | [`LeaseLayer`] | one at a time | the work takes long, or calls other services | each repetition would do the work again |
//! | [`IdempotencyKey`] | once | clients repeat what got no answer; the work is one transaction | the work leaves the database |
//! | `#[with_lock]`, [`LockError`] | one at a time, in one transaction | it is about rows or names | it takes long |
//!
//! They can be combined: the layer is outside, so a request waits for its lease first.
//!
//! # What a client gets
//!
//! Refusals are JSON of RFC 9457, `application/problem+json`. [`LockError`] has the table of statuses: 409 if another
//! request is in the way, 422 for an idempotency key of another request, 503 if the database or store does not answer
//! or a lease was lost. `Retry-After` says that the same request may succeed a second later. No answer has the text of
//! a key, the name of a table or SQL; these are in the log.
//!
//! # Readiness and the end of the process
//!
//! `leases.health().is_ready()` answers a readiness probe without I/O. At SIGTERM, let axum finish its requests
//! (`with_graceful_shutdown`), then call [`Leases::close`](lockkit::Leases::close); otherwise a lease may stay taken
//! until its ttl has passed. The example `axum_orders` of the repository has all of it, with metrics and traces.
//!
//! # Features
//!
//! | feature | what it brings |
//! |---|---|
//! | `idempotent` | [`IdempotencyKey`], over sqlx. Switch on the database in lockkit: `postgres`, `mysql` or `sqlite` |
//!
//! Without it, nothing here needs sqlx: leases may live in Redis, `ZooKeeper` or etcd.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
#[cfg(feature = "idempotent")]
mod idempotency;
mod lease;
mod problem;

#[cfg(feature = "idempotent")]
pub use self::idempotency::{IDEMPOTENT_REPLAYED, IdempotencyKey, IdempotencyKeyRejection, IdempotentRequest, UserKey};
pub use self::{
    error::LockError,
    lease::{Held, IntoLease, LeaseLayer, LeaseService, NotHeld},
};
