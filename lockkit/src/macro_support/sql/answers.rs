//! The functions that the attribute expands to for `idempotent`.

use std::{future::Future, panic::Location, pin::Pin};

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Pool;

use super::Outcome;

pub use crate::sql::idempotent::{Answering, Begun, Form, Idempotent, Stored};
use crate::{
    body::scope::Under,
    sql::{Dialect, IdempotentOps, Known, tx::Tx},
    value::error::Result,
};

/// As [`known_pool`](super::known_pool), for answers that are stored.
pub fn answers_pool<DB: IdempotentOps>(pool: &Pool<DB>) -> Pool<<DB as Known>::Itself> {
    pool.clone()
}

/// An answer that can be stored.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be stored as an answer",
    label = "`#[with_lock(idempotent, …)]` stores the answer as JSON, and reads it for the next request",
    note = "write `#[derive(serde::Serialize, serde::Deserialize)]` on the type"
)]
pub trait Storable: Serialize + DeserializeOwned {}

#[diagnostic::do_not_recommend]
impl<T: Serialize + DeserializeOwned> Storable for T {}

/// Looks for the answer, and begins the transaction of the work if there is none.
#[track_caller]
pub fn answer_tx<DB: IdempotentOps>(pool: &Pool<DB>, request: Idempotent) -> impl Future<Output = Result<Begun<DB>>> {
    request.begin(pool, Location::caller())
}

/// How the answer is stored. A type that cannot be stored fails to compile here.
pub fn answer_form<T: Storable>() -> Form<T> {
    Form::json()
}

/// The answer of an earlier request.
pub fn answer_before<R: Outcome>(stored: Stored, form: &Form<R::Value>) -> R {
    R::from_result(stored.read(form).map_err(R::Error::from))
}

/// Runs the body with the lock of the answer registered.
pub fn under_answer<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    answering: &Answering,
    body: Pin<&mut F>,
) -> impl Future<Output = F::Output> {
    Under::new(answering.record(pool), body)
}

/// Stores the answer and commits on `Ok`, rolls back on `Err`.
pub async fn end_answer<DB: IdempotentOps, R: Outcome>(
    answering: Answering,
    tx: Tx<DB>,
    result: R,
    form: Form<R::Value>,
) -> R {
    R::from_result(answering.end(tx, result.into_result(), &form).await)
}
