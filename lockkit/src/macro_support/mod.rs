//! The functions that `#[with_lock]` and `#[derive(Versioned)]` expand to. Except for the key template, each function
//! is one step that can be written by hand with the public API. Not covered by semantic versioning.

use std::{
    error::Error as StdError,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

#[cfg(feature = "macros")]
pub use lockkit_macros::key_template;
pub use tokio::time::Instant;

mod mapped;
#[cfg(feature = "sql")]
mod sql;
mod template;

#[cfg(feature = "sql")]
pub use self::sql::*;
pub use self::{mapped::*, template::*};
use crate::{
    body::{scope::Record, watch::Watch},
    lease::{Yields, store::LeaseStore},
    retry::{bounds::Bounded, is_retryable},
    value::error::{BoxError, Result},
};
pub use crate::{
    lease::{
        held::Lease,
        leases::Leases,
        request::{LeaseRequest, MultiLease},
    },
    policy::{OnLost, RetryPolicy, Wait},
    retry::Retry,
    value::{error::Error, key::Key},
};

/// The return type of a function under `#[with_lock]`.
#[diagnostic::on_unimplemented(
    message = "a function under `#[with_lock]` must return `Result<_, E>` with `E: From<lockkit::Error>`, not `{Self}`",
    label = "taking the lock can fail, so this type must be able to carry `lockkit::Error`",
    note = "return a `Result` whose error type is your own, and write `impl From<lockkit::Error> for YourError`"
)]
pub trait Outcome: Sized {
    /// The type of a successful result.
    type Value;
    /// The error type.
    type Error: From<Error>;

    /// The result of a function whose lock could not be taken.
    fn lock_failed(err: Error) -> Self {
        Self::from_result(Err(err.into()))
    }

    /// Whether the function succeeded.
    fn is_ok(&self) -> bool;

    /// The error, if the function failed.
    fn error(&self) -> Option<&Self::Error>;

    /// Converts into a `Result`.
    fn into_result(self) -> Result<Self::Value, Self::Error>;

    /// Converts from a `Result`.
    fn from_result(result: Result<Self::Value, Self::Error>) -> Self;
}

impl<T, E: Carries> Outcome for Result<T, E> {
    type Value = T;
    type Error = E;

    fn is_ok(&self) -> bool {
        Self::is_ok(self)
    }

    fn error(&self) -> Option<&E> {
        self.as_ref().err()
    }

    fn into_result(self) -> Self {
        self
    }

    fn from_result(result: Self) -> Self {
        result
    }
}

/// An error type that can hold a `lockkit::Error`.
#[diagnostic::on_unimplemented(
    message = "a function under `#[with_lock]` cannot return the error type `{Self}`, which is not \
               `From<lockkit::Error>`",
    label = "taking the lock can fail, so this type must be able to carry `lockkit::Error`",
    note = "if `{Self}` is a type of yours, write `impl From<lockkit::Error> for {Self}`, or with thiserror a variant \
            `Lock(#[from] lockkit::Error)`",
    note = "otherwise (`sqlx::Error`, `String`, …) return an error type of your own, `anyhow::Error` or \
            `lockkit::Error`; a type parameter needs the bound `{Self}: From<lockkit::Error>`"
)]
pub trait Carries: From<Error> {}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> Carries for E {}

/// An error that the default test for retryable errors accepts.
#[diagnostic::on_unimplemented(
    message = "`#[with_lock]` cannot tell which errors of type `{Self}` are worth another attempt",
    label = "this error type is not a `std::error::Error + Send + Sync + 'static`",
    note = "implement `std::error::Error` for it, or name a test of your own: `retry_if = path`"
)]
pub trait Judged: Into<BoxError> {
    /// Whether another attempt may succeed.
    fn is_retryable(&self) -> bool;
}

impl<E: StdError + Send + Sync + 'static> Judged for E {
    fn is_retryable(&self) -> bool {
        is_retryable(self)
    }
}

/// A value of any type, for code that never runs.
pub fn never<T>() -> T {
    unreachable!("BUG: this only says of which type a body is")
}

/// The retry loop of an attribute with this policy.
pub fn retry(attempts: Option<u32>, deadline: Option<Duration>) -> Result<Retry> {
    Retry::new(RetryPolicy { attempts, deadline, ..RetryPolicy::new() })
}

/// Evaluates an attempt. Returns the final result, or `None` for another attempt.
pub async fn step<R: Outcome<Error: Judged>>(retry: &mut Retry, ended: Option<R>) -> Option<R> {
    retry.step(ended.map(R::into_result), Judged::is_retryable).await.map(R::from_result)
}

/// The answer of the caller's test for retryable errors. No test is part of a future, where rustc would report a wrong
/// one again.
pub fn is_worth_another<R: Outcome>(ended: &Option<R>, test: impl Fn(&R::Error) -> bool) -> bool {
    ended.as_ref().and_then(Outcome::error).is_some_and(test)
}

/// As [`step`], with the answer of the caller's test for retryable errors.
pub async fn step_if<R: Outcome<Error: Into<BoxError>>>(
    retry: &mut Retry,
    ended: Option<R>,
    is_worth_another: bool,
) -> Option<R> {
    retry.step(ended.map(R::into_result), |_| is_worth_another).await.map(R::from_result)
}

/// Returns its argument. A value of another type fails to compile here.
pub fn leases<S: LeaseStore>(leases: &Leases<S>) -> &Leases<S> {
    leases
}

/// Clones the handle, so that the body may move the value it came from.
pub fn own_leases<S: LeaseStore>(leases: &Leases<S>) -> Leases<S> {
    leases.clone()
}

/// A type that can be the key of a lock.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the key of a lock",
    label = "a key is text: `&str`, `String` or `lockkit::Key`",
    note = "to make a key of a value, write a template that captures it: `key = \"order:{{id}}\"`"
)]
pub trait AsKey {
    /// Converts into a key.
    fn into_key(self) -> Key;
}

#[diagnostic::do_not_recommend]
impl<K: Into<Key>> AsKey for K {
    fn into_key(self) -> Key {
        self.into()
    }
}

/// Converts a value into a key.
pub fn key(key: impl AsKey) -> Key {
    key.into_key()
}

/// Converts values into keys.
pub fn keys(keys: impl IntoIterator<Item = impl AsKey>) -> Vec<Key> {
    keys.into_iter().map(AsKey::into_key).collect()
}

/// A type that can be a wait.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot say how long to wait",
    label = "expected a `std::time::Duration` or a `lockkit::Wait`",
    note = "write `wait = \"2s\"`, or give an expression such as `Duration::from_secs(2)` or `Wait::Unbounded`"
)]
pub trait AsWait {
    /// Converts into a wait.
    fn into_wait(self) -> Wait;
}

#[diagnostic::do_not_recommend]
impl<W: Into<Wait>> AsWait for W {
    fn into_wait(self) -> Wait {
        self.into()
    }
}

/// Converts a value into a wait.
pub fn wait(wait: impl AsWait) -> Wait {
    wait.into_wait()
}

/// A request for one lease.
pub fn lease<S: LeaseStore>(leases: &Leases<S>, key: Key) -> LeaseRequest<S> {
    leases.lease(key)
}

/// A request for several leases.
pub fn leases_of_all<S: LeaseStore>(
    leases: &Leases<S>,
    keys: impl IntoIterator<Item = Key>,
) -> LeaseRequest<S, MultiLease<S>> {
    leases.all(keys)
}

/// [`LeaseRequest::acquire`].
pub fn acquire<S: LeaseStore, L: Yields<Store = S>>(
    request: LeaseRequest<S, L>,
) -> impl Future<Output = Result<L>> + Send {
    request.acquire()
}

/// A lock that is held while a body runs: a lease, several leases, or a session lock.
pub trait Holding: Sized {
    /// The handle that the body gets.
    type Lent<'a>
    where
        Self: 'a;

    /// Creates the handle for the body.
    fn lend(&self) -> Self::Lent<'_>;

    /// The watch that runs the body, and the locks of the body.
    #[doc(hidden)]
    fn watch(&self) -> Watched<'_>;

    /// Releases the lock.
    fn end<T, E: From<Error>>(self, result: Result<T, E>) -> impl Future<Output = Result<T, E>>;
}

/// Runs a body until its lock is lost.
pub struct Watched<'a> {
    watch: Watch<'a>,
    record: Record,
}

impl<L: Yields> Holding for L {
    type Lent<'a>
        = Self
    where
        Self: 'a;

    fn lend(&self) -> Self {
        self.lent()
    }

    fn watch(&self) -> Watched<'_> {
        let (watch, record) = self.watched();
        Watched { watch, record }
    }

    async fn end<T, E: From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        // The future of a release is larger than most bodies. Boxing keeps it out of the future of each body.
        Box::pin(self.end_after_body()).await;
        result
    }
}

/// Creates the handle for the body.
pub fn lend<H: Holding>(held: &H) -> H::Lent<'_> {
    held.lend()
}

/// Runs the body until its lock is lost.
pub fn guarded<'a, H: Holding, F: Future<Output: Outcome>>(
    held: &'a H,
    body: Pin<&'a mut F>,
) -> impl Future<Output = F::Output> {
    Guarded { watched: held.watch(), body }
}

/// See [`guarded`].
struct Guarded<'a, F> {
    watched: Watched<'a>,
    body: Pin<&'a mut F>,
}

impl<F: Future<Output: Outcome>> Future for Guarded<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { watched, body } = &mut *self;
        watched.poll(context, body.as_mut())
    }
}

impl fmt::Debug for Watched<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}

impl Watched<'_> {
    /// Takes a `dyn Future`, so it is not compiled once per body.
    fn poll<R: Outcome>(&mut self, context: &mut Context<'_>, body: Pin<&mut dyn Future<Output = R>>) -> Poll<R> {
        let Self { watch, record } = self;
        record.enter(|| watch.poll(context, body, R::is_ok, R::lock_failed))
    }
}

/// Releases the lock.
pub async fn end_held<H: Holding, R: Outcome>(held: H, result: R) -> R {
    R::from_result(held.end(result.into_result()).await)
}

/// Runs the body of an attempt until the deadline of the retry.
pub fn until<F: Future>(retry: &Retry, body: Pin<&mut F>) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(None, retry.deadline(), body).within(retry.attempts())
}
