//! The functions that the attribute expands to for `idempotent`.

use std::{future::Future, panic::Location, pin::Pin};

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Pool;

use super::{Mapped, Outcome};

pub use crate::sql::idempotent::{Answering, Begun, Errs, Form, Forms, Idempotent, Stored};
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
pub fn answer_tx<DB: IdempotentOps, T, E>(
    pool: &Pool<DB>,
    request: Idempotent,
    forms: &Forms<T, E>,
) -> impl Future<Output = Result<Begun<DB>>> {
    Box::pin(request.begin(pool, Location::caller(), forms))
}

/// How the answer is stored. A type that cannot be stored fails to compile here.
pub fn answer_form<T: Storable>() -> Form<T> {
    Form::json()
}

/// Which errors are stored. A type that cannot be stored fails to compile here.
pub fn answer_errs<E: Storable>(are_answers: impl Fn(&E) -> bool + Send + Sync + 'static) -> Errs<E> {
    Errs::json(are_answers)
}

/// As [`answer_errs`], for a function with `map_err`.
pub fn answer_errs_mapped<E: Storable>(are_answers: impl Fn(&E) -> bool + Send + Sync + 'static) -> Errs<Mapped<E>> {
    Errs::json(move |err| matches!(err, Mapped::Body(err) if are_answers(err)))
}

/// Errors are not stored.
pub fn answers<T, E>(values: Form<T>) -> Forms<T, E> {
    Forms::of_values(values)
}

/// Errors are stored, too.
pub fn answers_and_errs<T, E>(values: Form<T>, errs: Errs<E>) -> Forms<T, E> {
    Forms::with_errs(values, errs)
}

/// The answer of an earlier request.
pub fn answer_before<R: Outcome>(stored: Stored, forms: &Forms<R::Value, R::Error>) -> R {
    R::from_result(stored.read(forms).map_err(R::Error::from).flatten())
}

/// Runs the body with the lock of the answer registered.
pub fn under_answer<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    answering: &Answering,
    body: Pin<&mut F>,
) -> impl Future<Output = F::Output> {
    Under::new(answering.record(pool), body)
}

/// Stores the answer and commits, or rolls back.
pub async fn end_answer<DB: IdempotentOps, R: Outcome>(
    answering: Answering,
    tx: Tx<DB>,
    result: R,
    forms: Forms<R::Value, R::Error>,
) -> R {
    R::from_result(Box::pin(answering.end(tx, result.into_result(), &forms)).await.flatten())
}
