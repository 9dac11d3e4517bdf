//! Work that leaves the database: a payment at a provider, a mail, a job of hours.
//!
//! A transaction cannot undo it, and cannot be open for so long. So a lease keeps the other requests of the key away.
//! That the work has begun is committed before the body runs, and the answer with the end of the lease after it:
//!
//! ```text
//! no row ── begun ──▶ begun ── answered, in `Lease::commit` ──▶ answer
//!                     │   ▲
//!                     └───┘ crash, `Err`, panic, drop, loss of the lease; the next attempt is `After`
//! ```
//!
//! An attempt can end anywhere between. What it did outside is unknown to whoever finds the row, so the row tells the
//! next attempt that there was one, and nothing but an answer ends that. A holder that has lost its lease cannot store
//! an answer, because its commit finds no lease.
//!
//! Each transaction takes the lock of the key, which orders it with the others that write the row: a stale holder that
//! stores that its work has begun sees an answer that was stored meanwhile, and `run` sees that `outside` has begun.

use std::{
    fmt,
    future::Future,
    panic::Location,
    time::{Duration, SystemTime},
};

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Pool;
use tokio::time::{Instant, sleep};

use crate::{
    lease::{Yields, held::Lease, leases::Leases},
    policy::{Backoff, Wait, half_jitter},
    sql::{
        LeaseOps,
        idempotent::{
            Answered, Gives, Idempotent, StoresErr,
            answer::{Form, Forms, Stored},
            asked::{Answering, Asked, Earlier, Looked, STORE_LIMIT, left, mark, unmark},
            ops::IdempotentOps,
        },
        tx::{Tx, begin_within},
        units::duration,
    },
    value::{
        error::{Error, Result},
        key::Key,
    },
};

/// The pauses between attempts to store an answer: from half of these to the whole.
const PAUSES: Backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(5) };

/// Shortest wait for the lock of a key whose lease is held: no other request is at work then.
const LEAST_WAIT: Duration = Duration::from_secs(10);

/// What is known of earlier attempts at this work. [`Idempotent::outside`] has an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// There was none that the database remembers. That an attempt has begun is as durable as a commit there: a
    /// failover may lose it, and so may a crash of the server that writes its log late
    /// (`innodb_flush_log_at_trx_commit` other than 1 on MySQL and MariaDB, `PRAGMA synchronous` below `FULL` on SQLite
    /// if the power fails). On PostgreSQL it is on the server's disk even with `synchronous_commit = off`.
    First,
    /// An earlier attempt has begun and left no answer: its process crashed or lost the lease, or its body failed or
    /// was dropped. It may have done all of its work, a part, or nothing, and a request that it has sent may still
    /// arrive. Look there before you do the work.
    #[non_exhaustive]
    After {
        /// When the first of them began, by the clock of the database.
        begun: SystemTime,
        /// How long ago that is, by the same clock.
        ago: Duration,
    },
}

/// Work that leaves the database, as its body gets it from [`Idempotent::outside`], which has an example.
pub struct Outside<DB: IdempotentOps + LeaseOps> {
    attempt: Attempt,
    idempotency_key: String,
    lease: Lease<Pool<DB>>,
    pool: Pool<DB>,
    tx: Option<Tx<DB>>,
    at: &'static Location<'static>,
}

impl<DB: IdempotentOps + LeaseOps> Outside<DB> {
    /// Whether an earlier attempt may have done the work already.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// A key to hand on, for a provider that does the same request once for each key: a UUID, the same for each attempt
    /// with this key and request, in each process.
    ///
    /// It is made of both and of nothing else. So it is the same again after the answer has expired, or was lost with
    /// the database: give the key what tells two payments apart, such as the number of the order or the month.
    pub fn idempotency_key(&self) -> &str {
        &self.idempotency_key
    }

    /// The lease that keeps other requests with this key away. Its [fence](Lease::fence) is for systems that refuse
    /// older ones, and [`trusted_until`](Lease::trusted_until) bounds a call that must not outlast it.
    pub fn lease(&self) -> &Lease<Pool<DB>> {
        &self.lease
    }

    /// The transaction that stores the answer, for rows that belong to it. It begins with the first call, and commits
    /// when the body has returned its answer; after an `Err` it is rolled back.
    ///
    /// Call it when the work outside is done: the transaction holds a connection, and on SQLite the one lock of the
    /// database.
    ///
    /// # Errors
    /// As [`begin`](crate::begin).
    ///
    /// # Cancel safety
    /// As [`begin`](crate::begin): no transaction is left open.
    ///
    /// # Example
    /// ```
    /// # use lockkit::{Answered, Error, Fault, Idempotent};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool.clone()); leases.migrate().await?;
    /// # sqlx::query("CREATE TABLE paid (charge INTEGER)").execute(&pool).await?;
    /// # async fn charge(_key: &str) -> Result<i64, Error> { Ok(42) }
    /// let pay = || {
    ///     Idempotent::key("pay:7:8e03978e").outside(&leases, async |work| {
    ///         let charge = charge(work.idempotency_key()).await?; // no transaction is open meanwhile
    ///         let row = sqlx::query("INSERT INTO paid VALUES (?)").bind(charge);
    ///         let stored = row.execute(&mut **work.tx().await?).await;
    ///         stored.map_err(|err| Error::database("storing the charge", None, Fault::Other, err))?;
    ///         Ok::<_, Error>(charge) // committed with the row
    ///     })
    /// };
    /// assert_eq!(pay().await?, Answered::Now(42));
    /// assert_eq!(pay().await?, Answered::Before(42));
    /// # let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM paid").fetch_one(&pool).await?;
    /// # assert_eq!(rows, 1);
    /// # Ok(()) }
    /// ```
    pub async fn tx(&mut self) -> Result<&mut Tx<DB>> {
        let tx = match self.tx.take() {
            Some(tx) => tx,
            None => Box::pin(begin_marked(&self.pool, self.at)).await?,
        };
        Ok(self.tx.insert(tx))
    }
}

impl<DB: IdempotentOps + LeaseOps> fmt::Debug for Outside<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outside")
            .field("attempt", &self.attempt)
            .field("idempotency_key", &self.idempotency_key)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl Idempotent {
    /// Returns the stored answer, or does work that leaves the database, such as a payment at a provider.
    ///
    /// The work runs under a lease of these `leases` with the key `<key>/answer`, and holds neither a transaction nor a
    /// connection. That it has begun is stored before, and the answer after it, in a transaction that also gives up the
    /// lease. When an attempt ends without an answer, by a crash, an `Err`, a panic, a drop or the loss of its lease,
    /// the next one gets [`Attempt::After`]: what was done outside is unknown, so it must look there first.
    ///
    /// No double payment happens if the provider does a request once for each
    /// [`idempotency_key`](Outside::idempotency_key), or refuses an older fence. If it can only be asked, a request of
    /// an attempt that lost its lease may arrive after the question.
    ///
    /// Of two requests at the same time, the second waits for the first, and gets its answer. After a crash it waits
    /// for the ttl of the lease as well. `body` is dropped when the lease is lost, as in
    /// [`LeaseRequest::run`](crate::LeaseRequest::run); bound the calls in it by a timeout of their own.
    ///
    /// If the database is away or busy when the body has ended, the answer is stored in later attempts, for 30 s at
    /// most and while the lease is held. There is one attempt if the body has used [`tx`](Outside::tx), whose work
    /// cannot be repeated, and none after a commit whose outcome is unknown.
    ///
    /// That work has begun is known for 90 days from the last attempt on, or for [`keep`](Self::keep) if that is
    /// longer; the answer for [`keep`](Self::keep).
    ///
    /// # Errors
    /// - What `body` returns. Nothing is stored, and the next attempt is `After`. Where the provider has said no for
    ///   certain, store that: return it in an `Ok`, or use [`store_err`](Self::store_err).
    /// - [`Error::Contended`] when another request with this key is still at work after the wait.
    /// - [`Error::Mismatch`] when the key was used for another request, also if that one has only begun.
    /// - [`Error::Lost`] when the lease was lost. Nothing is stored.
    /// - [`Error::OutcomeUnknown`] when the commit of the answer was not answered. The next request finds out whether
    ///   it is stored. Also when the lease was lost and a commit of `body` was not answered within 30 s.
    /// - [`Error::Answer`], [`Error::InvalidKey`] (`/answer` needs 7 bytes of the key's 255), and all else as
    ///   [`run`](Self::run) and [`LeaseRequest::acquire`](crate::LeaseRequest::acquire).
    ///
    /// # Cancel safety
    /// A dropped future leaves no lock, and no answer unless its COMMIT was sent. The next attempt is `After` if this
    /// one had begun.
    ///
    /// # Example
    /// ```
    /// use lockkit::{Answered, Idempotent, idempotent::Attempt};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// # struct Provider;
    /// # impl Provider {
    /// #     async fn find(&self, _key: &str) -> Result<Option<u64>, lockkit::Error> { Ok(None) }
    /// #     async fn charge(&self, _key: &str, _cents: u64) -> Result<u64, lockkit::Error> { Ok(42) }
    /// # }
    /// # let provider = Provider;
    /// let cents = 1999;
    /// let pay = || {
    ///     Idempotent::key("pay:7:8e03978e").request(&cents).outside(&leases, async |work| {
    ///         if let Attempt::After { .. } = work.attempt()
    ///             && let Some(charge) = provider.find(work.idempotency_key()).await?
    ///         {
    ///             return Ok(charge); // the first attempt had charged, and could not say so
    ///         }
    ///         provider.charge(work.idempotency_key(), cents).await
    ///     })
    /// };
    /// assert_eq!(pay().await?, Answered::Now(42));
    /// assert_eq!(pay().await?, Answered::Before(42)); // the client has sent its request again
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn outside<DB, T, E, F>(
        self,
        leases: &Leases<Pool<DB>>,
        body: F,
    ) -> impl Future<Output = Result<Answered<T>, E>>
    where
        DB: IdempotentOps + LeaseOps,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut Outside<DB>) -> Result<T, E>,
    {
        self.outside_at(Location::caller(), leases, Forms::of_values(Form::json()), body, Answered::value)
    }

    async fn outside_at<DB, T, E, F, R>(
        self,
        at: &'static Location<'static>,
        leases: &Leases<Pool<DB>>,
        forms: Forms<T, E>,
        body: F,
        given: Gives<T, E, R>,
    ) -> Result<R, E>
    where
        DB: IdempotentOps + LeaseOps,
        E: From<Error>,
        F: AsyncFnOnce(&mut Outside<DB>) -> Result<T, E>,
    {
        let (lease, answering, mut work) = match Box::pin(self.claim(leases, at)).await? {
            Claimed::Before(stored) => return given(Answered::Before(stored.read(&forms)?)),
            Claimed::Now(claim) => *claim,
        };
        let (watch, record) = lease.watched();
        let done = watch.run(record.run(body(&mut work))).await;
        given(Answered::Now(Box::pin(end(lease, answering, work, done, &forms)).await?))
    }

    /// Looks for the answer; if there is none, takes the lease and stores that the work has begun.
    async fn claim<DB: IdempotentOps + LeaseOps>(
        self,
        leases: &Leases<Pool<DB>>,
        at: &'static Location<'static>,
    ) -> Result<Claimed<DB>> {
        let (answering, wait) = self.checked()?;
        let Answering { key, fingerprint, .. } = &answering;
        let lease_key = Key::new(format!("{key}/answer"))?;
        let (pool, started) = (leases.store(), Instant::now());
        let asked = Asked { pool, key, fingerprint: *fingerprint, at };
        if let Some(text) = asked.answer(wait).await? {
            return Ok(Claimed::Before(Stored { key: answering.key, text }));
        }
        let lease = leases.lease(lease_key).wait(wait).acquire().await.map_err(|err| named(err, key))?;
        let wait = match left(wait, started) {
            Wait::Unbounded => Wait::Unbounded,
            left => Wait::AtMost(left.limit().max(LEAST_WAIT)),
        };
        let begun = async {
            let (mut tx, earlier) = match asked.begin(wait).await? {
                Looked::Answer(text) => return Ok(Err(text)),
                Looked::Locked(tx, earlier) => (tx, earlier),
            };
            if let Err(err) = answering.begin(&mut tx).await {
                tx.undo().await;
                return Err(err);
            }
            tx.commit().await?;
            Ok(Ok(earlier.map_or(Attempt::First, Attempt::after)))
        };
        match begun.await {
            Ok(Ok(attempt)) => {
                let idempotency_key = fingerprint.uuid(key);
                let work = Outside { attempt, idempotency_key, lease: lease.lent(), pool: pool.clone(), tx: None, at };
                Ok(Claimed::Now(Box::new((lease, answering, work))))
            }
            Ok(Err(text)) => {
                lease.end_after_body().await;
                Ok(Claimed::Before(Stored { key: answering.key, text }))
            }
            Err(err) => {
                lease.end_after_body().await;
                Err(err)
            }
        }
    }
}

impl<E: From<Error>> StoresErr<E> {
    /// As [`Idempotent::outside`]. An error that is stored is within [`Answered`], and rolls back what the body has
    /// done in its [transaction](Outside::tx).
    ///
    /// # Errors
    /// As [`Idempotent::outside`].
    ///
    /// # Cancel safety
    /// As [`Idempotent::outside`].
    #[track_caller]
    pub fn outside<DB, T, F>(
        self,
        leases: &Leases<Pool<DB>>,
        body: F,
    ) -> impl Future<Output = Result<Answered<Result<T, E>>, E>>
    where
        DB: IdempotentOps + LeaseOps,
        T: Serialize + DeserializeOwned,
        F: AsyncFnOnce(&mut Outside<DB>) -> Result<T, E>,
    {
        let Self { request, errs } = self;
        request.outside_at(Location::caller(), leases, Forms::with_errs(Form::json(), errs), body, Ok)
    }
}

/// How a request goes on.
enum Claimed<DB: IdempotentOps + LeaseOps> {
    /// With the stored answer.
    Before(Stored),
    /// With its work, under the lease of the key.
    Now(Box<(Lease<Pool<DB>>, Answering, Outside<DB>)>),
}

impl Attempt {
    fn after(Earlier { begun_us, age_us }: Earlier) -> Self {
        Self::After { begun: SystemTime::UNIX_EPOCH + duration(begun_us), ago: duration(age_us) }
    }
}

/// Begins the transaction of the body, and marks it unless the commit finds out by itself whether it has ended. Without
/// that, an answer would be stored whose rows the body has rolled back.
async fn begin_marked<DB: IdempotentOps>(pool: &Pool<DB>, at: &'static Location<'static>) -> Result<Tx<DB>> {
    let mut tx = begin_within(pool, None, None, at).await?;
    if DB::CHECKED_LAST {
        return Ok(tx);
    }
    match mark(&mut tx, None).await {
        Ok(()) => Ok(tx),
        Err(err) => {
            tx.undo().await;
            Err(err)
        }
    }
}

/// Stores the answer and gives up the lease in one commit, or gives up the lease alone. The outer result is an error if
/// nothing was stored.
async fn end<DB, T, E>(
    lease: Lease<Pool<DB>>,
    answering: Answering,
    work: Outside<DB>,
    done: Result<T, E>,
    forms: &Forms<T, E>,
) -> Result<Result<T, E>, E>
where
    DB: IdempotentOps + LeaseOps,
    E: From<Error>,
{
    let Outside { tx, pool, at, .. } = work;
    // Otherwise the body was stopped, and may have left a statement on its way. Dropped, the transaction is rolled
    // back.
    let tx = tx.filter(|_| lease.is_trusted());
    let Some(text) = forms.written(&done, &answering.key, answering.most) else {
        undo(tx).await;
        lease.end_after_body().await;
        return done.map(Ok);
    };
    let storing = Storing { lease: &lease, answering: &answering };
    let stored = match (text, tx) {
        // What the body has done in its transaction cannot be done again here.
        (Ok(text), Some(tx)) if done.is_ok() => storing.store_with_work(tx, &text).await,
        (Ok(text), tx) => {
            undo(tx).await;
            storing.store_alone(&pool, at, &text).await
        }
        (Err(err), tx) => {
            undo(tx).await;
            Err(err)
        }
    };
    // Nothing, if it has ended with the commit.
    lease.end_after_body().await;
    stored?;
    Ok(done)
}

/// An answer that ends the lease of its work.
struct Storing<'a, DB: IdempotentOps + LeaseOps> {
    lease: &'a Lease<Pool<DB>>,
    answering: &'a Answering,
}

impl<DB: IdempotentOps + LeaseOps> Storing<'_, DB> {
    /// Stores the answer in the transaction of the body, if that is still open.
    async fn store_with_work(&self, mut tx: Tx<DB>, text: &[u8]) -> Result<()> {
        if !DB::CHECKED_LAST
            && let Err(err) = self.answering.in_time::<DB, _>(unmark(&mut tx)).await
        {
            tx.undo().await;
            return Err(err);
        }
        self.store(tx, text).await
    }

    /// Stores the answer in this transaction.
    async fn store(&self, mut tx: Tx<DB>, text: &[u8]) -> Result<()> {
        let Self { lease, answering } = *self;
        let stored = async {
            answering.lock(&mut tx).await?;
            answering.store(&mut tx, text).await
        };
        if let Err(err) = answering.in_time::<DB, _>(stored).await {
            tx.undo().await;
            return Err(err);
        }
        lease.share().commit(tx).await
    }

    /// Stores the answer in a transaction of its own, again after a failure that may pass and has stored nothing: for
    /// [`STORE_LIMIT`], while the lease is held. What the body has done outside is not undone, and the next request
    /// would not know of it.
    async fn store_alone(&self, pool: &Pool<DB>, at: &'static Location<'static>, text: &[u8]) -> Result<()> {
        let started = Instant::now();
        let mut failed = 0;
        loop {
            let stored = async {
                let tx = self.answering.in_time::<DB, _>(begin_within(pool, None, None, at)).await?;
                self.store(tx, text).await
            };
            let err = match stored.await {
                Err(err) if err.is_contended() || err.may_pass() => err,
                stored => return stored,
            };
            let pause = half_jitter(PAUSES.ceiling(failed));
            if started.elapsed() + pause >= STORE_LIMIT {
                return Err(err);
            }
            sleep(pause).await;
            self.lease.check_trusted()?;
            failed += 1;
        }
    }
}

async fn undo<DB: IdempotentOps>(tx: Option<Tx<DB>>) {
    if let Some(tx) = tx {
        tx.undo().await;
    }
}

/// The error of the lease, with the key of the request.
fn named(err: Error, key: &Key) -> Error {
    match err {
        Error::Contended { key: _, waited, holder } => Error::Contended { key: key.clone(), waited, holder },
        err => err,
    }
}
