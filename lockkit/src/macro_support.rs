//! What `#[with_lock]` and `#[derive(Versioned)]` expand to. Nothing here is an algorithm: each function is one step that can be written by hand
//! with the public API. Not covered by semantic versioning.

use std::{
    error::Error as StdError,
    fmt::{self, Write},
    future::Future,
    iter::once_with,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use sqlx::{Database, Pool};
pub use sqlx::{Encode, FromRow, Type};
pub use tokio::time::Instant;

use crate::{
    body::{Bounded, Under},
    error::{BoxError, Result},
    guard::Watch,
    lease::store::LeaseStore,
    retry::is_retryable,
    scope::{Lock, Realm, Record, is_under},
    sql::{
        Dialect, Known, LeaseOps, NamedOps, RowOps, SessionOps, Sessions,
        holder::with_holder,
        tx::{PASS_TX, begin_within},
    },
};
pub use crate::{
    error::Error,
    key::Key,
    lease::{Lease, LeaseRequest, Leases, MultiLease},
    policy::{OnLost, Policy, Wait},
    retry::Retry,
    sql::{
        named::NamedLock,
        row::RowLock,
        session::{Session, SessionLock},
        tx::Tx,
        version::load,
    },
};

/// What a function under `#[with_lock]` returns.
#[diagnostic::on_unimplemented(
    message = "a function under `#[with_lock]` must return `Result<_, E>` with `E: From<lockkit::Error>`, not `{Self}`",
    label = "taking the lock can fail, so this type must be able to carry `lockkit::Error`",
    note = "return a `Result` whose error type is your own, and write `impl From<lockkit::Error> for YourError`"
)]
pub trait Outcome: Sized {
    /// What it returns when all is well.
    type Value;
    /// What it returns otherwise.
    type Error: From<Error>;

    /// The result of a function whose lock could not be taken.
    fn lock_failed(err: Error) -> Self {
        Self::from_result(Err(err.into()))
    }

    /// Whether all is well.
    fn is_ok(&self) -> bool;

    /// The result as a `Result`.
    fn into_result(self) -> Result<Self::Value, Self::Error>;

    /// The way back.
    fn from_result(result: Result<Self::Value, Self::Error>) -> Self;
}

impl<T, E: Carries> Outcome for Result<T, E> {
    type Value = T;
    type Error = E;

    fn is_ok(&self) -> bool {
        Self::is_ok(self)
    }

    fn into_result(self) -> Self {
        self
    }

    fn from_result(result: Self) -> Self {
        result
    }
}

/// An error that can carry one of lockkit.
#[diagnostic::on_unimplemented(
    message = "a function under `#[with_lock]` cannot return the error type `{Self}`, which is not `From<lockkit::Error>`",
    label = "taking the lock can fail, so this type must be able to carry `lockkit::Error`",
    note = "if `{Self}` is a type of yours, write `impl From<lockkit::Error> for {Self}`, or with thiserror a variant `Lock(#[from] lockkit::Error)`",
    note = "otherwise (`sqlx::Error`, `String`, …) return an error type of your own, `anyhow::Error` or `lockkit::Error`; a type parameter needs the bound `{Self}: From<lockkit::Error>`"
)]
pub trait Carries: From<Error> {}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> Carries for E {}

/// An error that the default test can judge.
#[diagnostic::on_unimplemented(
    message = "`#[with_lock]` cannot tell which errors of type `{Self}` are worth another attempt",
    label = "this error type is not a `std::error::Error + Send + Sync + 'static`",
    note = "implement `std::error::Error` for it, or name a test of your own: `retry_if = path`"
)]
pub trait Judged: Into<BoxError> {
    /// Whether a fresh attempt may succeed.
    fn is_retryable(&self) -> bool;
}

impl<E: StdError + Send + Sync + 'static> Judged for E {
    fn is_retryable(&self) -> bool {
        is_retryable(self)
    }
}

/// Of any type, for code that never runs.
pub fn never<T>() -> T {
    unreachable!("BUG: this only says of which type a body is")
}

/// The loop of an attribute with this policy.
pub fn retry(attempts: Option<u32>, deadline: Option<Duration>) -> Result<Retry> {
    Retry::new(Policy { attempts, deadline, ..Policy::new() })
}

/// What becomes of an attempt: the result, or `None` for another one.
pub async fn step<R: Outcome<Error: Judged>>(retry: &mut Retry, ended: Option<R>) -> Option<R> {
    step_if(retry, ended, Judged::is_retryable).await
}

/// As [`step`], with the caller's test.
pub async fn step_if<R: Outcome<Error: Into<BoxError>>>(
    retry: &mut Retry,
    ended: Option<R>,
    worth_another: impl Fn(&R::Error) -> bool,
) -> Option<R> {
    retry.step(ended.map(R::into_result), worth_another).await.map(R::from_result)
}

/// The leases. What is no leases is an error here.
pub fn leases<S: LeaseStore>(leases: &Leases<S>) -> &Leases<S> {
    leases
}

/// Clones the handle, so that the body may move the value it came from.
pub fn own_leases<S: LeaseStore>(leases: &Leases<S>) -> Leases<S> {
    leases.clone()
}

/// As [`own_leases`], where a transaction is to begin in their database.
pub fn leases_with_tx<S: Transacts>(leases: &Leases<S>) -> Leases<Pool<<S::Db as Known>::Itself>> {
    S::with_pool(leases)
}

/// A store in which a transaction can begin.
#[diagnostic::on_unimplemented(
    message = "a lease with `tx` needs leases that are kept in a database, not in `{Self}`",
    label = "`tx` is a transaction in the database that keeps the leases: `&Leases<Pool<_>>`",
    note = "remove `tx`, and begin the transaction in the body: `lease.commit(tx)` makes it depend on the lease"
)]
pub trait Transacts: LeaseStore {
    /// Its database.
    type Db: LeaseOps;

    /// The leases, known to be kept in a pool.
    fn with_pool(leases: &Leases<Self>) -> Leases<Pool<Self::Db>>;
}

impl<DB: LeaseOps> Transacts for Pool<DB> {
    type Db = DB;

    fn with_pool(leases: &Leases<Self>) -> Leases<Self> {
        leases.clone()
    }
}

/// The pool. What is no pool is an error here.
pub fn pool<DB: Database>(pool: &Pool<DB>) -> &Pool<DB> {
    pool
}

/// Clones the handle, so that the body may move the value it came from. Of a database that lockkit does not know, the
/// result has no type: rustc reports the mistake here, and not at every later step as well.
pub fn known_pool<DB: Dialect>(pool: &Pool<DB>) -> Pool<<DB as Known>::Itself> {
    pool.clone()
}

/// As [`known_pool`], for row locks.
pub fn row_pool<DB: RowOps>(pool: &Pool<DB>) -> Pool<<DB as Known>::Itself> {
    pool.clone()
}

/// As [`known_pool`], for named locks.
pub fn named_pool<DB: NamedOps>(pool: &Pool<DB>) -> Pool<<DB as Known>::Itself> {
    pool.clone()
}

/// As [`known_pool`], for session locks.
pub fn session_pool<DB: SessionOps>(pool: &Pool<DB>) -> Pool<<DB as Known<Sessions>>::Itself> {
    pool.clone()
}

/// What can be the key of a lock.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the key of a lock",
    label = "a key is text: `&str`, `String` or `lockkit::Key`",
    note = "to make a key of a value, write a template that captures it: `key = \"order:{{id}}\"`"
)]
pub trait AsKey {
    /// The key.
    fn into_key(self) -> Key;
}

#[diagnostic::do_not_recommend]
impl<K: Into<Key>> AsKey for K {
    fn into_key(self) -> Key {
        self.into()
    }
}

/// A key.
pub fn key(key: impl AsKey) -> Key {
    key.into_key()
}

/// Several keys.
pub fn keys(keys: impl IntoIterator<Item = impl AsKey>) -> Vec<Key> {
    keys.into_iter().map(AsKey::into_key).collect()
}

/// How long to wait.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot say how long to wait",
    label = "expected a `std::time::Duration` or a `lockkit::Wait`",
    note = "write `wait = \"2s\"`, or give an expression such as `Duration::from_secs(2)` or `Wait::Forever`"
)]
pub trait AsWait {
    /// The wait.
    fn into_wait(self) -> Wait;
}

#[diagnostic::do_not_recommend]
impl<W: Into<Wait>> AsWait for W {
    fn into_wait(self) -> Wait {
        self.into()
    }
}

/// A wait.
pub fn wait(wait: impl AsWait) -> Wait {
    wait.into_wait()
}

/// A lease request.
pub fn lease<S: LeaseStore>(leases: &Leases<S>, key: Key) -> LeaseRequest<S> {
    leases.lease(key)
}

/// A request for all of the leases.
pub fn leases_of_all<S: LeaseStore>(
    leases: &Leases<S>,
    keys: impl IntoIterator<Item = Key>,
) -> LeaseRequest<S, MultiLease<S>> {
    leases.all(keys)
}

/// [`LeaseRequest::acquire`].
pub fn acquire<S: LeaseStore>(request: LeaseRequest<S>) -> impl Future<Output = Result<Lease<S>>> + Send {
    request.acquire()
}

/// [`LeaseRequest::acquire`].
pub fn acquire_all<S: LeaseStore>(
    request: LeaseRequest<S, MultiLease<S>>,
) -> impl Future<Output = Result<MultiLease<S>>> + Send {
    request.acquire()
}

/// A row lock in the database of the pool.
pub fn row_lock<DB: RowOps>(_pool: &Pool<DB>, table: &'static str) -> RowLock<DB> {
    RowLock::table(table)
}

/// A value of a column.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the value of a column in `{DB}`",
    label = "sqlx cannot bind this: it is not `sqlx::Encode` and `sqlx::Type` for `{DB}`",
    note = "for one of several values write `by_any(column = values)`"
)]
pub trait Value<'v, DB: Database>: Encode<'v, DB> + Type<DB> {}

#[diagnostic::do_not_recommend]
impl<'v, DB: Database, T: Encode<'v, DB> + Type<DB>> Value<'v, DB> for T {}

/// [`RowLock::by`].
pub fn by<'v, DB: RowOps>(lock: RowLock<DB>, column: &str, value: impl Value<'v, DB>) -> RowLock<DB> {
    lock.by(column, value)
}

/// [`RowLock::by_any`].
pub fn by_any<'v, DB: RowOps, T: Value<'v, DB> + Ord>(
    lock: RowLock<DB>,
    column: &str,
    values: impl IntoIterator<Item = T>,
) -> RowLock<DB> {
    lock.by_any(column, values)
}

/// What is held while a body runs: a lease, several, or a session lock.
pub trait Holding: Sized {
    /// What the body gets of it.
    type Lent<'a>
    where
        Self: 'a;

    /// For the body.
    fn lend(&self) -> Self::Lent<'_>;

    /// What runs the body, and the locks that it runs under.
    #[doc(hidden)]
    fn watch(&self) -> Watched<'_>;

    /// Gives it back.
    fn end<T, E: From<Error>>(self, result: Result<T, E>) -> impl Future<Output = Result<T, E>>;
}

/// What runs a body until its lock is lost.
pub struct Watched<'a> {
    watch: Watch<'a>,
    record: Record,
}

/// What a commit can depend on.
pub trait Committing<DB: LeaseOps>: Holding {
    /// Commits if it is still held, and gives it back.
    fn commit(self, tx: Tx<DB>) -> impl Future<Output = Result<()>>;
}

impl<S: LeaseStore> Holding for Lease<S> {
    type Lent<'a> = Self;

    fn lend(&self) -> Self {
        self.lent()
    }

    fn watch(&self) -> Watched<'_> {
        Watched { watch: self.watch(), record: Record::new(once_with(|| self.lock())) }
    }

    async fn end<T, E: From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        // A release is larger than most bodies, and part of the future of each of them.
        Box::pin(self.end()).await;
        result
    }
}

impl<DB: LeaseOps> Committing<DB> for Lease<Pool<DB>> {
    async fn commit(self, tx: Tx<DB>) -> Result<()> {
        Box::pin(self.commit(tx)).await
    }
}

impl<S: LeaseStore> Holding for MultiLease<S> {
    type Lent<'a> = Self;

    fn lend(&self) -> Self {
        self.lent()
    }

    fn watch(&self) -> Watched<'_> {
        Watched { watch: self.watch(), record: Record::new(self.leases().iter().map(Lease::lock)) }
    }

    async fn end<T, E: From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        // A release is larger than most bodies, and part of the future of each of them.
        Box::pin(self.end()).await;
        result
    }
}

impl<DB: LeaseOps> Committing<DB> for MultiLease<Pool<DB>> {
    async fn commit(self, tx: Tx<DB>) -> Result<()> {
        Box::pin(self.commit(tx)).await
    }
}

impl<DB: SessionOps> Holding for Session<DB> {
    type Lent<'a> = &'a Self;

    fn lend(&self) -> &Self {
        self
    }

    fn watch(&self) -> Watched<'_> {
        Watched { watch: self.watch(), record: Record::new(once_with(|| self.lock())) }
    }

    async fn end<T, E: From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        self.end_with(result).await
    }
}

/// What the body gets of what is held.
pub fn lend<H: Holding>(held: &H) -> H::Lent<'_> {
    held.lend()
}

/// Runs the body until what is held is lost.
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
    /// Not compiled for every body.
    fn poll<R: Outcome>(&mut self, context: &mut Context<'_>, body: Pin<&mut dyn Future<Output = R>>) -> Poll<R> {
        let Self { watch, record } = self;
        record.enter(|| watch.poll(context, body, R::is_ok, R::lock_failed))
    }
}

/// Gives back what is held.
pub async fn end_held<H: Holding, R: Outcome>(held: H, result: R) -> R {
    R::from_result(held.end(result.into_result()).await)
}

/// A transaction in the database that keeps the leases.
pub async fn lease_tx<DB: LeaseOps>(leases: &Leases<Pool<DB>>) -> Result<Tx<DB>> {
    begin_within(leases.store(), None, None).await
}

/// Commits under what is held, or rolls back and gives it back.
pub async fn end_held_tx<DB: LeaseOps, H: Committing<DB>, R: Outcome>(held: H, tx: Tx<DB>, result: R) -> R {
    R::from_result(match result.into_result() {
        Ok(value) => held.commit(tx).await.map(|()| value).map_err(R::Error::from),
        Err(err) => {
            tx.undo().await;
            held.end(Err(err)).await
        }
    })
}

/// A transaction without a lock.
pub async fn plain_tx<DB: Dialect>(pool: &Pool<DB>, deadline: Option<Instant>) -> Result<Tx<DB>> {
    begin_within(pool, None, deadline).await
}

/// A transaction that holds row locks.
pub async fn row_tx<DB: RowOps>(pool: &Pool<DB>, deadline: Option<Instant>, lock: RowLock<DB>) -> Result<Tx<DB>> {
    let mut tx = begin_within(pool, lock.bound(), deadline).await?;
    match lock.until(deadline).lock(&mut *tx).await {
        Ok(_) => Ok(tx),
        Err(err) => {
            tx.undo().await;
            Err(with_holder(pool, err, DB::row_holder).await)
        }
    }
}

/// The locked rows, as the body gets them.
#[diagnostic::on_unimplemented(
    message = "the locked rows cannot be read as `{Self}`",
    label = "the rows are a `Vec` of a type that is `sqlx::FromRow` for `{DB}`",
    note = "write `#[derive(sqlx::FromRow)]` on the struct, or take a `Vec` of tuples"
)]
pub trait LockedRows<DB: Database>: Sized {
    /// Locks and reads them.
    fn fetch(lock: RowLock<DB>, conn: &mut DB::Connection) -> impl Future<Output = Result<Self>> + Send;
}

#[diagnostic::do_not_recommend]
impl<DB: RowOps, T: for<'r> FromRow<'r, DB::Row> + Send> LockedRows<DB> for Vec<T> {
    async fn fetch(lock: RowLock<DB>, conn: &mut DB::Connection) -> Result<Self> {
        lock.lock_and_fetch(conn).await
    }
}

/// A transaction that holds row locks, and the rows. Their type comes last, when the database is known: or rustc reports
/// it for any database, and for this one.
pub async fn row_tx_with_rows<R: LockedRows<DB>, DB: RowOps>(
    pool: &Pool<DB>,
    deadline: Option<Instant>,
    lock: RowLock<DB>,
    _rows: PhantomData<R>,
) -> Result<(Tx<DB>, R)> {
    let mut tx = begin_within(pool, lock.bound(), deadline).await?;
    match R::fetch(lock.until(deadline), &mut *tx).await {
        Ok(rows) => Ok((tx, rows)),
        Err(err) => {
            tx.undo().await;
            Err(with_holder(pool, err, DB::row_holder).await)
        }
    }
}

/// A transaction that holds a named lock.
pub async fn named_tx<DB: NamedOps>(pool: &Pool<DB>, deadline: Option<Instant>, lock: NamedLock) -> Result<Tx<DB>> {
    let realm = Realm::named(pool);
    if is_under(|it| it.realm == realm && it.key == *lock.key()) {
        return Err(Error::Reentrant { lock: "named lock", key: lock.key().clone(), hint: PASS_TX });
    }
    let mut tx = begin_within(pool, lock.bound(), deadline).await?;
    match lock.until(deadline).lock(&mut *tx).await {
        Ok(()) => Ok(tx),
        Err(err) => {
            tx.undo().await;
            Err(with_holder(pool, err, DB::named_holder).await)
        }
    }
}

/// Runs the body of an attempt, until its time is over.
pub fn until<F: Future>(retry: &Retry, body: Pin<&mut F>) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(None, retry.deadline(), body)
}

/// As [`until`], under row locks that the attempt's transaction holds.
pub fn under_rows_until<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    retry: &Retry,
    body: Pin<&mut F>,
) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(Some(rows(pool, key)), retry.deadline(), body)
}

/// As [`until`], under a named lock that the attempt's transaction holds.
pub fn under_name_until<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    retry: &Retry,
    body: Pin<&mut F>,
) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(Some(name(pool, key)), retry.deadline(), body)
}

/// Runs the body, which is under row locks that its transaction holds.
pub fn under_rows<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    body: Pin<&mut F>,
) -> impl Future<Output = F::Output> {
    Under::new(rows(pool, key), body)
}

/// Runs the body, which is under a named lock that its transaction holds.
pub fn under_name<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    body: Pin<&mut F>,
) -> impl Future<Output = F::Output> {
    Under::new(name(pool, key), body)
}

fn rows<DB: Dialect>(pool: &Pool<DB>, key: &Key) -> Record {
    Record::new(once_with(|| Lock::of(Realm::rows(pool), key.clone())))
}

fn name<DB: Dialect>(pool: &Pool<DB>, key: &Key) -> Record {
    Record::new(once_with(|| Lock::of(Realm::named(pool), key.clone())))
}

/// Commits on `Ok`, rolls back on `Err`.
pub async fn end_tx<DB: Dialect, R: Outcome>(tx: Tx<DB>, result: R) -> R {
    R::from_result(match result.into_result() {
        Ok(value) => tx.commit().await.map(|()| value).map_err(R::Error::from),
        Err(err) => {
            tx.undo().await;
            Err(err)
        }
    })
}

/// Ends an attempt that did not run out of time, as [`end_tx`] does, and rolls back one that did.
pub async fn end_attempt<DB: Dialect, R: Outcome>(tx: Tx<DB>, ended: Option<R>) -> Option<R> {
    match ended {
        Some(result) => Some(end_tx(tx, result).await),
        // In the background: there is no time left.
        None => None,
    }
}

/// A part of a template.
#[derive(Debug)]
pub enum Piece<'a> {
    /// Of the template itself.
    Text(&'static str),
    /// A captured value.
    Capture(fmt::Arguments<'a>),
}

/// The key of a template whose punctuation is `reserved`.
///
/// `%`, control characters and the punctuation of the template are percent-encoded in what is captured, so that two
/// different sets of captured values never make one key.
pub fn key_of(reserved: &'static str, pieces: &[Piece<'_>]) -> Key {
    let mut text = String::new();
    for piece in pieces {
        match *piece {
            Piece::Text(literal) => text.push_str(literal),
            Piece::Capture(value) => {
                let mut escaped = Escaped { text: &mut text, reserved };
                // A Display that reports an error has written what it could; `format!` would panic.
                let _ = escaped.write_fmt(value);
            }
        }
    }
    text.into()
}

struct Escaped<'a> {
    text: &'a mut String,
    reserved: &'static str,
}

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            if char == '%' || char.is_control() || self.reserved.contains(char) {
                for byte in char.encode_utf8(&mut [0; 4]).bytes() {
                    write!(self.text, "%{byte:02X}")?;
                }
            } else {
                self.text.push(char);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(first: &str, second: &str) -> Key {
        key_of(
            ".",
            &[Piece::Capture(format_args!("{first}")), Piece::Text("."), Piece::Capture(format_args!("{second}"))],
        )
    }

    #[test]
    fn different_captures_never_make_one_key() {
        assert_eq!(two("a", "b"), "a.b");
        assert_ne!(two("a.b", "c"), two("a", "b.c"));
        assert_ne!(two("a%2Eb", "c"), two("a.b", "c"));
        assert_eq!(two("a.b", "c"), "a%2Eb.c");
        assert_eq!(two("a\n", "ключ"), "a%0A.ключ");
    }
}
