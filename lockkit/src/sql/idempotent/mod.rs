//! Answers that are stored in the transaction of the work, so that a repeated request gets the same answer.
//!
//! A lock alone makes repeated requests run one after the other, and each of them would do the work. So the first one
//! leaves its answer beside its work, and the others find it.
//!
//! A request looks before it begins a transaction: an answer that is stored costs one statement. It looks once more
//! when it has the lock of the key, because another request may have stored its answer since. The lock is that of a
//! named lock, in a set of names of its own. On MySQL and MariaDB its row is the row of the answer, so that a key
//! leaves no second row behind; see `mysql/named` for what its waiters do. Between nodes of a Galera cluster the lock
//! excludes nobody; there the primary key of the answers lets one of two transactions fail when it commits.

mod fingerprint;
pub(crate) mod ops;

use std::{any::type_name, future::Future, iter::once_with, panic::Location, time::Duration};

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Pool;
use tokio::time::{Instant, timeout};

use self::{fingerprint::Fingerprint, ops::IdempotentOps};
use crate::{
    body::{
        guard::Guard,
        scope::{Lock, Realm, Record, is_under},
        task::no_answer,
    },
    policy::Wait,
    sql::{
        AsConnection, Dialect, Unsettled, check_in, connection, failed_on_own_table, is_answered,
        named::NamedLock,
        note_answer,
        tx::{PASS_TX, Terms, Tx, begin_on, check_failed, refuse_under_own_lock},
    },
    value::{
        error::{BoxError, Error, Fault, Result},
        key::Key,
    },
};

const LOOKING: &str = "looking for the answer";
const STORING: &str = "storing the answer";

/// Longest time to store an answer.
const STORE_LIMIT: Duration = Duration::from_secs(30);

/// How long an answer is kept unless the caller says otherwise.
const KEEP: Duration = Duration::from_hours(24);

/// Far longer than an answer is useful, and far from the end of what a clock in microseconds can count.
const LONGEST: Duration = Duration::from_hours(24 * 36_500);

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
/// An answer is a value that serde can write as JSON and read again; one that it cannot read is not stored. An answer
/// of several kinds is an `enum`, or a `Result`: a declined card is an answer, too, and `Ok(Err(Declined))` stores it.
/// What JSON writes as `null`, such as `Some(())`, is read as `None`.
///
/// `#[with_lock(idempotent, …)]` does the same around a function.
///
/// What the transaction cannot undo (a payment at a provider, a mail) is not covered: a crash after it repeats it.
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
#[must_use = "nothing is done until `run` is awaited"]
pub struct Idempotent {
    key: Key,
    request: serde_json::Result<Fingerprint>,
    keep: Duration,
    wait: Wait,
    most: usize,
}

/// An answer, and whether it was stored before.
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
        self.run_at(Location::caller(), pool, body)
    }

    async fn run_at<DB, T, E, F>(
        self,
        at: &'static Location<'static>,
        pool: &Pool<DB>,
        body: F,
    ) -> Result<Answered<T>, E>
    where
        DB: IdempotentOps,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<T, E>,
    {
        match self.begin(pool, at).await? {
            Begun::Before(stored) => Ok(Answered::Before(stored.read(&Form::json())?)),
            Begun::Now(mut tx, answering) => {
                let done = answering.record(pool).run(body(&mut tx)).await;
                answering.end(tx, done, &Form::json()).await.map(Answered::Now)
            }
        }
    }

    /// Looks for the answer, and begins the transaction of the work if there is none.
    pub(crate) async fn begin<DB: IdempotentOps>(
        self,
        pool: &Pool<DB>,
        at: &'static Location<'static>,
    ) -> Result<Begun<DB>> {
        let fingerprint = self.check()?;
        let Self { key, request: _, keep, wait, most } = self;
        let asked = Asked { pool, key: &key, fingerprint, at };
        // Boxed: it is larger than most bodies, which come after it.
        Ok(match Box::pin(asked.begin(wait)).await? {
            Looked::Stored(text) => Begun::Before(Stored { key, text }),
            Looked::Locked(tx) => Begun::Now(tx, Answering { key, fingerprint, keep, most }),
        })
    }

    fn check(&self) -> Result<Fingerprint> {
        self.key.check()?;
        self.wait.check()?;
        if self.keep.is_zero() {
            let reason = "must be longer than 0: an answer that is not kept is never found".to_owned();
            return Err(Error::InvalidOption { option: "keep", reason });
        }
        self.request.as_ref().copied().map_err(|err| Error::InvalidOption {
            option: "request",
            reason: format!("cannot be written as JSON, so its hash cannot be stored: {err}"),
        })
    }
}

/// How a request goes on.
#[derive(Debug)]
pub enum Begun<DB: Dialect> {
    /// With the stored answer.
    Before(Stored),
    /// With its work, in a transaction that has the lock of the key.
    Now(Tx<DB>, Answering),
}

/// An answer as it is stored.
#[derive(Debug)]
pub struct Stored {
    key: Key,
    text: Vec<u8>,
}

impl Stored {
    pub(crate) fn read<T>(self, form: &Form<T>) -> Result<T> {
        let Self { key, text } = self;
        let problem = "was stored and cannot be read";
        (form.read)(&text).map_err(|err| Error::Answer { key, problem, what: type_name::<T>(), source: err.into() })
    }
}

/// How an answer is written and read.
#[derive(Debug)]
pub struct Form<T> {
    write: fn(&T) -> serde_json::Result<Vec<u8>>,
    read: fn(&[u8]) -> serde_json::Result<T>,
}

impl<T: Serialize + DeserializeOwned> Form<T> {
    pub(crate) fn json() -> Self {
        Self { write: serde_json::to_vec, read: |text| serde_json::from_slice(text) }
    }
}

/// A request whose work is being done.
#[derive(Debug)]
pub struct Answering {
    key: Key,
    fingerprint: Fingerprint,
    keep: Duration,
    most: usize,
}

impl Answering {
    /// The lock of the key, which the work must not request again.
    pub(crate) fn record<DB: Dialect>(&self, pool: &Pool<DB>) -> Record {
        Record::new(once_with(|| Lock::of(Realm::answers(pool), self.key.clone())))
    }

    /// Stores the answer and commits. Rolls back without an answer, or if it cannot be stored.
    pub(crate) async fn end<DB, T, E>(self, mut tx: Tx<DB>, done: Result<T, E>, form: &Form<T>) -> Result<T, E>
    where
        DB: IdempotentOps,
        E: From<Error>,
    {
        let answer = match done {
            Ok(answer) => answer,
            Err(err) => {
                tx.undo().await;
                return Err(err);
            }
        };
        let stored = match self.written(&answer, form) {
            Ok(text) => Box::pin(self.store(&mut tx, &text)).await,
            Err(err) => Err(err),
        };
        if let Err(err) = stored {
            tx.undo().await;
            return Err(err.into());
        }
        tx.commit().await?;
        Ok(answer)
    }

    /// The answer as text that can be read again.
    fn written<T>(&self, answer: &T, form: &Form<T>) -> Result<Vec<u8>> {
        let Self { key, most, .. } = self;
        let failed = |source: BoxError| Error::Answer {
            key: key.clone(),
            problem: "cannot be stored",
            what: type_name::<T>(),
            source,
        };
        let text = (form.write)(answer).map_err(|err| failed(err.into()))?;
        if text.len() > *most {
            return Err(failed(TooLarge { bytes: text.len(), most: *most }.into()));
        }
        if let Err(err) = (form.read)(&text) {
            return Err(failed(err.into()));
        }
        Ok(text)
    }

    /// Stores the answer, if the transaction of the lock is still open.
    async fn store<DB: IdempotentOps>(&self, tx: &mut Tx<DB>, answer: &[u8]) -> Result<()> {
        let Self { key, fingerprint, keep, most: _ } = self;
        let stored = async {
            let conn = tx.for_query();
            // Otherwise an answer would be stored whose work the body has rolled back. Where the commit checks, nothing
            // that runs after the end of a transaction is committed.
            if !DB::CHECKED_LAST {
                DB::check_open(conn).await.map_err(check_failed::<DB>)?;
            }
            let stored = DB::answer_store(conn, key, fingerprint.as_bytes(), answer, (*keep).min(LONGEST)).await;
            stored.map_err(|err| failed_on_own_table::<DB>(STORING, Some(key), err))
        };
        // It waits for nobody, unless the body has overlooked that the database ended its transaction.
        let stored = timeout(STORE_LIMIT, stored).await.unwrap_or_else(|_| Err(no_answer(STORING, Some(key))));
        note_answer(tx, stored)
    }
}

/// A request that is made of this database.
struct Asked<'a, DB: Dialect> {
    pool: &'a Pool<DB>,
    key: &'a Key,
    fingerprint: Fingerprint,
    at: &'static Location<'static>,
}

/// What a look for an answer has found.
enum Looked<DB: Dialect> {
    Stored(Vec<u8>),
    /// None, and this transaction has the lock of the key.
    Locked(Tx<DB>),
}

impl<DB: IdempotentOps> Asked<'_, DB> {
    /// Looks for the answer, and begins a transaction that has the lock of the key if there is none.
    async fn begin(&self, wait: Wait) -> Result<Looked<DB>> {
        let Self { pool, key, .. } = *self;
        let realm = Realm::answers(pool);
        if is_under(|it| it.realm == realm && it.key == *key) {
            return Err(Error::Reentrant { lock: "the lock of the answer", key: key.clone(), hint: PASS_TX });
        }
        refuse_under_own_lock(pool)?;
        let started = Instant::now();
        loop {
            let left = (wait != Wait::Unbounded).then(|| wait.limit().saturating_sub(started.elapsed()));
            match self.begin_once(Wait::within(Some(wait), left)).await {
                // A deadlock among those who wait. Nothing was done.
                Err(err) if err.is_transient() && started.elapsed() < wait.limit() => {}
                begun => return begun,
            }
        }
    }

    async fn begin_once(&self, wait: Wait) -> Result<Looked<DB>> {
        let Self { pool, key, at, .. } = *self;
        let started = Instant::now();
        let mut looking = Guard::new(Unsettled::new(connection(pool, LOOKING, Some(key)).await?));
        match self.look(&mut looking.get_mut().conn).await {
            Ok(None) => {}
            // Another process has locked the database, even for readers: it is waited for as the wait says.
            Err(Error::Database { fault: Fault::Contended, .. }) if DB::ONE_WRITER => {}
            Ok(Some(answer)) => {
                check_in::<DB>(looking.defuse().conn);
                return Ok(Looked::Stored(answer));
            }
            Err(err) => {
                if is_answered(&err) {
                    check_in::<DB>(looking.defuse().conn);
                }
                return Err(err);
            }
        }
        let terms = Terms { wait: Some(wait), deadline: None, started, at };
        let mut tx = begin_on(looking, pool, terms).await?;
        let locked = async {
            // There, the transaction has the one lock of the database.
            if !DB::ONE_WRITER {
                NamedLock::of_answer(key.clone(), wait).lock(&mut tx).await?;
            }
            // Another request may have stored its answer since.
            let answer = self.look(tx.for_query()).await;
            note_answer(&mut tx, answer)
        };
        match locked.await {
            Ok(None) => Ok(Looked::Locked(tx)),
            Ok(Some(answer)) => {
                tx.undo().await;
                Ok(Looked::Stored(answer))
            }
            Err(err) => {
                tx.undo().await;
                Err(err)
            }
        }
    }

    /// The stored answer to this request.
    async fn look(&self, conn: &mut DB::Connection) -> Result<Option<Vec<u8>>> {
        let Self { key, fingerprint, .. } = *self;
        let stored = DB::answer_look(conn, key).await;
        match stored.map_err(|err| failed_on_own_table::<DB>(LOOKING, Some(key), err))? {
            Some(stored) if stored.fingerprint != fingerprint.as_bytes() => Err(Error::Mismatch { key: key.clone() }),
            stored => Ok(stored.map(|it| it.answer)),
        }
    }
}

/// Why an answer is not stored.
#[derive(Debug, thiserror::Error)]
#[error("it has {bytes} bytes, and `max_answer` allows {most}")]
struct TooLarge {
    bytes: usize,
    most: usize,
}
