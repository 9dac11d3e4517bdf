//! Answers that are stored once, so that a repeated request gets the same answer.
//!
//! A lock alone makes repeated requests run one after the other, and each of them would do the work. So the first one
//! leaves its answer beside its work, and the others find it.
//!
//! A request looks before it begins a transaction: an answer that is stored costs one statement. It looks once more
//! when it has the lock of the key, because another request may have stored its answer since. The lock is that of a
//! named lock, in a set of names of its own. On MySQL and MariaDB its row is the row of the answer, so that a key
//! leaves no second row behind, and a lock whose row is new has no answer to look for; see `mysql/named` for what its
//! waiters do. The lock or the second look also gets a mark of its transaction. The statement that stores the answer
//! compares it: otherwise an answer would be stored whose work the body has rolled back. So where a failed transaction
//! refuses every statement, a COMMIT after it needs no other check. Between nodes of a Galera cluster the lock
//! excludes nobody; there the primary key of the answers lets one of two transactions fail when it commits.
//!
//! Work in the database has that lock from its begin to its commit. Work outside of it has a lease (`outside`); its
//! transactions take the lock too, so that nothing writes the row of a key without it.

mod answer;
mod asked;
mod fingerprint;
pub(crate) mod ops;
mod outside;

use std::{future::Future, panic::Location, time::Duration};

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Pool;

#[cfg(any(test, feature = "_fuzz"))]
pub use self::answer::check_answer;
pub use self::{
    answer::{Errs, Form, Forms, Stored},
    asked::Answering,
    outside::{Attempt, Outside},
};
use self::{
    asked::{Asked, Looked},
    fingerprint::Fingerprint,
    ops::IdempotentOps,
};
use crate::{
    policy::Wait,
    sql::{Dialect, tx::Tx},
    value::{
        error::{Error, Result},
        key::Key,
    },
};

/// How long an answer is kept unless the caller says otherwise.
const KEEP: Duration = Duration::from_hours(24);

/// Largest answer in bytes unless the caller says otherwise.
const MOST: usize = 1 << 20;

/// Work that is done once for each key, whose answer is stored: a request that is repeated gets the first answer, and
/// the work is not repeated. With the feature `idempotent`.
///
/// The answer is stored in the transaction of the work. So a crash, an `Err`, a panic or a drop leaves neither, and the
/// next request does the work. When the answer of COMMIT is lost, the next request finds out what happened. Of two
/// requests at the same time, the second waits for the first, and gets its answer.
///
/// The key must name the request and whoever sends it, as in `pay:{user_id}:{idempotency_key}`: with a key that the
/// client alone chooses, one user could read the answer of another.
///
/// An answer is a value that serde can write as JSON and read again; one that it cannot read is not stored. What JSON
/// writes as `null`, such as `Some(())`, is read as `None`. A declined card is an answer, too. There are two ways to
/// store it: `Ok(Err(Declined))` is a value like any other, and commits the work of the body, such as a row of an audit
/// log; [`store_err`](Self::store_err) stores an `Err`, whose work is rolled back.
///
/// `#[with_lock(idempotent, …)]` does the same around a function.
///
/// What the transaction cannot undo (a payment at a provider, a mail) is not covered by [`run`](Self::run): a crash
/// after it repeats it. It belongs into [`outside`](Self::outside).
///
/// Expired answers do not count, and are deleted by the sweeps of [`Leases`](crate::Leases) on the same pool.
///
/// # Example
/// ```
/// use lockkit::{Answered, Idempotent};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// # sqlx::query("CREATE TABLE payments (id INTEGER PRIMARY KEY, cents INTEGER)").execute(&pool).await?;
/// let (user_id, cents) = (7, 1999);
/// let pay = || {
///     Idempotent::key(format!("pay:{user_id}:8e03978e")).request(&cents).run(&pool, async |tx| {
///         let paid = sqlx::query("INSERT INTO payments (cents) VALUES (?)").bind(cents).execute(&mut **tx);
///         let paid = paid.await.map_err(|err| lockkit::Error::database("paying", None, lockkit::Fault::Other, err))?;
///         Ok::<_, lockkit::Error>(paid.last_insert_rowid())
///     })
/// };
/// assert_eq!(pay().await?, Answered::Now(1));
/// assert_eq!(pay().await?, Answered::Before(1)); // the client has sent its request again
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "nothing is done until `run` or `outside` is awaited"]
pub struct Idempotent {
    key: Key,
    request: serde_json::Result<Fingerprint>,
    keep: Duration,
    wait: Wait,
    most: usize,
}

/// An answer, and whether it was stored before.
///
/// # Example
/// ```
/// use lockkit::Answered;
///
/// let (first, repeated) = (Answered::Now("receipt 1"), Answered::Before("receipt 1"));
/// assert!(!first.is_before() && repeated.is_before()); // for a log or a header: both are the same answer
/// assert_eq!(first.into_inner(), repeated.into_inner());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered<T> {
    /// The work was done now.
    Now(T),
    /// An earlier request has done the work.
    Before(T),
}

impl<T> Answered<T> {
    /// The answer.
    pub fn into_inner(self) -> T {
        match self {
            Self::Now(answer) | Self::Before(answer) => answer,
        }
    }

    /// Whether an earlier request has done the work.
    pub fn is_before(&self) -> bool {
        matches!(self, Self::Before(_))
    }
}

impl<T, E> Answered<Result<T, E>> {
    /// The value, where no error is stored.
    fn value(self) -> Result<Answered<T>, E> {
        Ok(match self {
            Self::Now(done) => Answered::Now(done?),
            Self::Before(done) => Answered::Before(done?),
        })
    }
}

impl Idempotent {
    /// Work that is done once for this key.
    pub fn key(key: impl Into<Key>) -> Self {
        let request = Ok(Fingerprint::none());
        Self { key: key.into(), request, keep: KEEP, wait: Wait::DEFAULT, most: MOST }
    }

    /// What is requested. Another request with the same key is refused with [`Error::Mismatch`], so that a client that
    /// uses a key twice by mistake does not get the answer to something else.
    ///
    /// The hash of the request as JSON is stored, not the request. The order of its fields does not count. Give it
    /// integers and text: a `HashSet` has another order each time, and a float may be written in another way.
    pub fn request(mut self, request: &(impl Serialize + ?Sized)) -> Self {
        self.request = Fingerprint::of(request);
        self
    }

    /// How long the answer is kept. Defaults to 24 h. After that the work is done again.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    /// Longest wait for another request with the same key. Defaults to [`Wait::DEFAULT`], 10 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// Largest answer in bytes of JSON. Defaults to 1 MiB.
    pub fn max_answer(mut self, bytes: usize) -> Self {
        self.most = bytes;
        self
    }

    /// Stores errors, too, if `is_answer` says that they are answers: the same error is the answer to a request that is
    /// repeated. By default no `Err` is stored, and the next request does the work again.
    ///
    /// An `Err` rolls the work back, as always; only the error is stored. An error that is stored is within
    /// [`Answered`], which says whether it was stored before; one that is not is the outer result. Call it last, right
    /// before `run` or `outside`.
    ///
    /// # Example
    /// ```
    /// use lockkit::{Answered, Idempotent};
    ///
    /// #[derive(Debug, PartialEq, thiserror::Error, serde::Serialize, serde::Deserialize)]
    /// enum PayError {
    ///     #[error("declined: {0}")]
    ///     Declined(String),
    ///     #[error("failed: {0}")]
    ///     Failed(String),
    /// }
    ///
    /// impl From<lockkit::Error> for PayError {
    ///     fn from(err: lockkit::Error) -> Self {
    ///         Self::Failed(err.to_string())
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # lockkit::migrate(&pool).await?;
    /// let pay = || {
    ///     let pay = Idempotent::key("pay:7:8e03978e").store_err(|err| matches!(err, PayError::Declined(_)));
    ///     pay.run(&pool, async |_tx| Err::<u64, _>(PayError::Declined("no funds".to_owned())))
    /// };
    /// let declined = || Err(PayError::Declined("no funds".to_owned()));
    /// assert_eq!(pay().await?, Answered::Now(declined()));
    /// assert_eq!(pay().await?, Answered::Before(declined()));
    /// # Ok(()) }
    /// ```
    pub fn store_err<E>(self, is_answer: impl Fn(&E) -> bool + Send + Sync + 'static) -> StoresErr<E>
    where
        E: Serialize + DeserializeOwned,
    {
        StoresErr { request: self, errs: Errs::json(is_answer) }
    }

    /// Returns the stored answer, or does the work in a transaction, which commits together with its answer.
    ///
    /// An answer that is stored costs one statement. `body` must not end the transaction, and is not called again after
    /// an error: whether to repeat it is the decision of the caller.
    ///
    /// # Errors
    /// - What `body` returns. The transaction is rolled back, and nothing is stored.
    /// - [`Error::Contended`] when another request with this key is still at work after the wait; on SQLite when any
    ///   other writer is, which has the one lock of the database.
    /// - [`Error::Mismatch`] when the key was answered for another request.
    /// - [`Error::Answer`] when the answer cannot be written as JSON or is too large: the work is rolled back. And when
    ///   the stored answer cannot be read as a `T`, because a deployment has changed the type: the work is not done.
    /// - [`Error::Reentrant`] in the body of the same key; on SQLite also in a function under a row or named lock of
    ///   the same pool.
    /// - [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::PoolStarved`];
    ///   [`Error::Database`], which may be transient; and the errors of [`Tx::commit`].
    ///
    /// # Cancel safety
    /// A dropped future leaves neither the work nor an answer, unless COMMIT was sent; then both are there or none.
    #[track_caller]
    pub fn run<DB, T, E, F>(self, pool: &Pool<DB>, body: F) -> impl Future<Output = Result<Answered<T>, E>>
    where
        DB: IdempotentOps,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<T, E>,
    {
        self.run_at(Location::caller(), pool, Forms::of_values(Form::json()), body, Answered::value)
    }

    /// `given` makes the result of the answer. (A future around this one would be twice as large.)
    async fn run_at<DB, T, E, F, R>(
        self,
        at: &'static Location<'static>,
        pool: &Pool<DB>,
        forms: Forms<T, E>,
        body: F,
        given: Gives<T, E, R>,
    ) -> Result<R, E>
    where
        DB: IdempotentOps,
        E: From<Error>,
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<T, E>,
    {
        given(match Box::pin(self.begin(pool, at, &forms)).await? {
            Begun::Before(stored) => Answered::Before(stored.read(&forms)?),
            Begun::Now(mut tx, answering) => {
                let done = answering.record(pool).run(body(&mut tx)).await;
                Answered::Now(Box::pin(answering.end(tx, done, &forms)).await?)
            }
        })
    }

    /// Looks for the answer, and begins the transaction of the work if there is none. Callers box it: it is larger than
    /// most bodies, which come after it.
    pub(crate) async fn begin<DB: IdempotentOps, T, E>(
        self,
        pool: &Pool<DB>,
        at: &'static Location<'static>,
        forms: &Forms<T, E>,
    ) -> Result<Begun<DB>> {
        let (mut answering, wait) = self.checked()?;
        let Answering { key, fingerprint, .. } = &answering;
        let asked = Asked { pool, key, fingerprint: *fingerprint, at };
        let (mut tx, earlier) = match asked.begin(wait).await? {
            Looked::Answer(text) => return Ok(Begun::Before(Stored { key: answering.key, text })),
            Looked::Locked(tx, earlier) => (tx, earlier),
        };
        answering.is_marked = true;
        let marked = match earlier {
            Some(_) => Err(of_outside()),
            None if forms.have_errs() => answering.mark(&mut tx).await,
            None => Ok(()),
        };
        match marked {
            Ok(()) => Ok(Begun::Now(tx, answering)),
            Err(err) => {
                tx.undo().await;
                Err(err)
            }
        }
    }

    /// The checked options, and the wait.
    fn checked(self) -> Result<(Answering, Wait)> {
        let Self { key, request, keep, wait, most } = self;
        key.check()?;
        wait.check()?;
        if keep.is_zero() {
            let reason = "must be longer than 0: an answer that is not kept is never found".to_owned();
            return Err(Error::InvalidOption { option: "keep", reason });
        }
        if most == 0 {
            let reason = "must be greater than 0: even `()` has 4 bytes in JSON".to_owned();
            return Err(Error::InvalidOption { option: "max_answer", reason });
        }
        let fingerprint = request.map_err(|err| Error::InvalidOption {
            option: "request",
            reason: format!("cannot be written as JSON, so its hash cannot be stored: {err}"),
        })?;
        Ok((Answering { key, fingerprint, keep, most, is_marked: false }, wait))
    }
}

/// The error of work in the database whose key belongs to work outside of it.
fn of_outside() -> Error {
    let reason = "was called for a key whose work has begun by `outside`, and has no answer yet; call `outside` for it";
    Error::InvalidOption { option: "run", reason: reason.to_owned() }
}

/// An [`Idempotent`] that stores errors, too. Made by [`Idempotent::store_err`], which has an example.
#[derive(Debug)]
#[must_use = "nothing is done until `run` or `outside` is awaited"]
pub struct StoresErr<E> {
    request: Idempotent,
    errs: Errs<E>,
}

impl<E: From<Error>> StoresErr<E> {
    /// As [`Idempotent::run`]. An error that is stored is within [`Answered`].
    ///
    /// # Errors
    /// As [`Idempotent::run`]. When the body has ended its transaction, or the database has, no error is stored, and
    /// the result is [`Error::TransactionEnded`].
    ///
    /// # Cancel safety
    /// As [`Idempotent::run`].
    #[track_caller]
    pub fn run<DB, T, F>(self, pool: &Pool<DB>, body: F) -> impl Future<Output = Result<Answered<Result<T, E>>, E>>
    where
        DB: IdempotentOps,
        T: Serialize + DeserializeOwned,
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<T, E>,
    {
        let Self { request, errs } = self;
        request.run_at(Location::caller(), pool, Forms::with_errs(Form::json(), errs), body, Ok)
    }
}

/// What makes the result of a request.
type Gives<T, E, R> = fn(Answered<Result<T, E>>) -> Result<R, E>;

/// How a request goes on.
#[derive(Debug)]
pub enum Begun<DB: Dialect> {
    /// With the stored answer.
    Before(Stored),
    /// With its work, in a transaction that has the lock of the key.
    Now(Tx<DB>, Answering),
}
