//! The functions that the attribute expands to if it takes locks in a database or begins a transaction.

use std::{future::Future, iter::once_with, marker::PhantomData, panic::Location, pin::Pin, time::Duration};

use sqlx::{Database, Pool};
pub use sqlx::{Encode, FromRow, Type};

#[cfg(feature = "idempotent")]
mod answers;

#[cfg(feature = "idempotent")]
pub use self::answers::*;
#[cfg(feature = "idempotent")]
use super::Mapped;
use super::{Holding, Outcome, Watched};
pub use crate::sql::{
    named::NamedLock,
    row::RowLock,
    session::{Session, SessionLock},
    tx::Tx,
    version::load,
};
use crate::{
    body::{
        scope::{Lock, Realm, Record, Under, is_under},
        task::timed_out,
    },
    lease::{held::Lease, leases::Leases, request::MultiLease, store::LeaseStore},
    retry::{Retry, bounds::Bounded},
    sql::{
        AsConnection, Dialect, FenceGuardOps, Known, LeaseOps, NamedOps, Names, RowOps, SessionOps, Sessions,
        holder::with_holder,
        tx::{PASS_TX, begin_within},
    },
    value::{
        error::{Error, Result},
        holder::LockHolder,
        key::Key,
    },
};
use tokio::time::{Instant, timeout};

/// As [`own_leases`](super::own_leases), for a transaction in the database of the leases.
pub fn leases_with_tx<S: Transacts>(leases: &Leases<S>) -> Leases<Pool<<S::Db as Known>::Itself>> {
    S::with_pool(leases)
}

/// A store in which a transaction can begin.
#[diagnostic::on_unimplemented(
    message = "a lease with `tx` needs leases that are kept in a database, not in `{Self}`",
    label = "`tx` is a transaction in the database that keeps the leases: `&Leases<Pool<_>>`",
    note = "name the database of the transaction, `pool = &self.db`: the fence of the lease guards it there"
)]
pub trait Transacts: LeaseStore {
    /// The database of the store.
    type Db: LeaseOps;

    /// The leases, with the pool as the type of their store.
    fn with_pool(leases: &Leases<Self>) -> Leases<Pool<Self::Db>>;
}

impl<DB: LeaseOps> Transacts for Pool<DB> {
    type Db = DB;

    fn with_pool(leases: &Leases<Self>) -> Leases<Self> {
        leases.clone()
    }
}

/// Returns its argument. A value of another type fails to compile here.
pub fn pool<DB: Database>(pool: &Pool<DB>) -> &Pool<DB> {
    pool
}

/// Clones the handle, so that the body may move the value it came from. For a database that lockkit does not know, the
/// return type does not exist. So rustc reports the mistake here only, and not at every later step.
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

/// A row lock in the database of the pool.
pub fn row_lock<DB: RowOps>(_pool: &Pool<DB>, table: &'static str) -> RowLock<DB> {
    RowLock::table(table)
}

/// A type that can be the value of a column.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the value of a column in `{DB}`",
    label = "sqlx must be able to bind this: `sqlx::Encode` and `sqlx::Type` for `{DB}`, and `Clone`",
    note = "for one of several values write `by_any(column = values)`",
    note = "give the value inside of it, or write `#[derive(Clone, sqlx::Type)] #[sqlx(transparent)]` on a type of \
            yours"
)]
pub trait Value<'v, DB: Database>: Encode<'v, DB> + Type<DB> + Clone {}

#[diagnostic::do_not_recommend]
impl<'v, DB: Database, T: Encode<'v, DB> + Type<DB> + Clone> Value<'v, DB> for T {}

/// [`RowLock::by`]. The value is cloned, so that the body may move it.
pub fn by<'v, DB: RowOps>(lock: RowLock<DB>, column: &str, value: &impl Value<'v, DB>) -> RowLock<DB> {
    lock.by(column, value.clone())
}

/// Values of a column.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the values of a column in `{DB}`",
    label = "this must be an `IntoIterator` of values that sqlx can bind: `sqlx::Encode` and `sqlx::Type` for `{DB}`, \
             and `Ord`",
    note = "the values are cloned, so this must be `Clone`, too"
)]
pub trait Values<'v, DB: Database>: Clone {
    /// [`RowLock::by_any`].
    fn lock_by_any(self, lock: RowLock<DB>, column: &str) -> RowLock<DB>;
}

#[diagnostic::do_not_recommend]
impl<'v, DB: RowOps, I: IntoIterator<Item: Encode<'v, DB> + Type<DB> + Ord> + Clone> Values<'v, DB> for I {
    fn lock_by_any(self, lock: RowLock<DB>, column: &str) -> RowLock<DB> {
        lock.by_any(column, self)
    }
}

/// [`RowLock::by_any`]. The values are cloned, so that the body may move them.
pub fn by_any<'v, DB: RowOps>(lock: RowLock<DB>, column: &str, values: &impl Values<'v, DB>) -> RowLock<DB> {
    values.clone().lock_by_any(lock, column)
}

/// A lock that a commit can depend on.
pub trait Committing<DB: LeaseOps>: Holding {
    /// Commits if the lock is still held, and releases the lock.
    fn commit(self, tx: Tx<DB>) -> impl Future<Output = Result<()>>;
}

impl<DB: LeaseOps> Committing<DB> for Lease<Pool<DB>> {
    async fn commit(self, tx: Tx<DB>) -> Result<()> {
        Box::pin(self.commit(tx)).await
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

/// Begins a transaction in the database of the leases. This and the following functions are called where the attribute
/// is, which a warning names.
#[track_caller]
pub fn lease_tx<DB: LeaseOps>(leases: &Leases<Pool<DB>>) -> impl Future<Output = Result<Tx<DB>>> {
    begin_within(leases.store(), None, None, Location::caller())
}

/// Commits under the lock, or rolls back and releases the lock.
pub async fn end_held_tx<DB: LeaseOps, H: Committing<DB>, R: Outcome>(held: H, tx: Tx<DB>, result: R) -> R {
    R::from_result(match result.into_result() {
        Ok(value) => held.commit(tx).await.map(|()| value).map_err(R::Error::from),
        Err(err) => {
            tx.undo().await;
            held.end(Err(err)).await
        }
    })
}

/// As [`known_pool`], for transactions that the fence of a lease guards.
pub fn guarded_pool<DB: FenceGuardOps>(pool: &Pool<DB>) -> Pool<<DB as Known>::Itself> {
    pool.clone()
}

/// A lock whose fence guards transactions: a lease, or several.
pub trait Guarding<DB: FenceGuardOps>: Holding {
    /// Refuses the transaction if the lock has had a later holder.
    fn guard(&self, tx: &mut Tx<DB>) -> impl Future<Output = Result<()>>;

    /// Succeeds while the lock is trusted.
    fn check(&self) -> Result<()>;
}

impl<S: LeaseStore, DB: FenceGuardOps> Guarding<DB> for Lease<S> {
    async fn guard(&self, tx: &mut Tx<DB>) -> Result<()> {
        Box::pin(self.guard::<DB>(tx)).await
    }

    fn check(&self) -> Result<()> {
        self.check_trusted()
    }
}

impl<S: LeaseStore, DB: FenceGuardOps> Guarding<DB> for MultiLease<S> {
    async fn guard(&self, tx: &mut Tx<DB>) -> Result<()> {
        Box::pin(self.guard::<DB>(tx)).await
    }

    fn check(&self) -> Result<()> {
        self.leases().iter().try_for_each(Lease::check_trusted)
    }
}

/// Begins a transaction and guards it with the fence of the lock.
#[track_caller]
pub fn guarded_tx<DB: FenceGuardOps, H: Guarding<DB>>(
    pool: &Pool<DB>,
    held: &H,
) -> impl Future<Output = Result<Tx<DB>>> {
    let at = Location::caller();
    async move {
        let mut tx = begin_within(pool, None, None, at).await?;
        match held.guard(&mut tx).await {
            Ok(()) => Ok(tx),
            Err(err) => {
                tx.undo().await;
                Err(err)
            }
        }
    }
}

/// Time limit of a guarded commit, whose lease is renewed meanwhile.
const COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// Commits while the lock is held, or rolls back, and then releases the lock. If the lock is lost during the commit,
/// the guard orders the commit before those of later holders.
pub async fn end_guarded_tx<DB: FenceGuardOps, H: Guarding<DB>, R: Outcome>(held: H, tx: Tx<DB>, result: R) -> R {
    let result = match result.into_result().and_then(|value| held.check().map(|()| value).map_err(R::Error::from)) {
        Ok(value) => {
            let committed = timeout(COMMIT_LIMIT, tx.commit()).await;
            let committed = committed.unwrap_or_else(|_| Err(Error::OutcomeUnknown { source: timed_out().into() }));
            committed.map(|()| value).map_err(R::Error::from)
        }
        Err(err) => {
            tx.undo().await;
            Err(err)
        }
    };
    R::from_result(held.end(result).await)
}

/// Begins a transaction without a lock.
#[track_caller]
pub fn plain_tx<DB: Dialect>(pool: &Pool<DB>, deadline: Option<Instant>) -> impl Future<Output = Result<Tx<DB>>> {
    begin_within(pool, None, deadline, Location::caller())
}

/// Begins a transaction and locks rows in it.
#[track_caller]
pub fn row_tx<DB: RowOps>(
    pool: &Pool<DB>,
    deadline: Option<Instant>,
    lock: RowLock<DB>,
) -> impl Future<Output = Result<Tx<DB>>> {
    let at = Location::caller();
    async move {
        let mut tx = begin_within(pool, lock.bound(), deadline, at).await?;
        match lock.until(deadline).lock(&mut tx).await {
            Ok(_) => Ok(tx),
            Err(err) => Err(Box::pin(refused(pool, tx, err, DB::row_holder)).await),
        }
    }
}

/// The error of a transaction that could not take its lock, with the holder, after a rollback. Callers box it: it is
/// larger than taking the lock, and part of the future of each function.
async fn refused<DB: Dialect>(
    pool: &Pool<DB>,
    tx: Tx<DB>,
    err: Error,
    holder: impl AsyncFnOnce(&mut DB::Connection, &Key) -> sqlx::Result<Option<LockHolder>>,
) -> Error {
    tx.undo().await;
    with_holder(pool, err, holder).await
}

/// The locked rows, as the body gets them.
#[diagnostic::on_unimplemented(
    message = "the locked rows cannot be read as `{Self}`",
    label = "the rows are a `Vec` of a type that is `sqlx::FromRow` for `{DB}`",
    note = "write `#[derive(sqlx::FromRow)]` on the struct, or take a tuple",
    note = "`rows` has a `Vec`, `rows = items: Vec<Item>`; for exactly one row write `row = item: Item`"
)]
pub trait LockedRows<DB: Database>: Sized {
    /// Locks and reads the rows.
    fn fetch(lock: RowLock<DB>, tx: &mut impl AsConnection<DB>) -> impl Future<Output = Result<Self>> + Send;
}

#[diagnostic::do_not_recommend]
impl<DB: RowOps, T: for<'r> FromRow<'r, DB::Row> + Send> LockedRows<DB> for Vec<T> {
    async fn fetch(lock: RowLock<DB>, tx: &mut impl AsConnection<DB>) -> Result<Self> {
        lock.lock_and_fetch(tx).await
    }
}

/// The one locked row, as the body gets it.
#[derive(Debug)]
pub struct One<T>(pub T);

#[diagnostic::do_not_recommend]
impl<DB: RowOps, T: for<'r> FromRow<'r, DB::Row> + Send> LockedRows<DB> for One<T> {
    async fn fetch(lock: RowLock<DB>, tx: &mut impl AsConnection<DB>) -> Result<Self> {
        let rows = lock.lock_and_fetch(tx).await?;
        <[T; 1]>::try_from(rows).map(|[row]| Self(row)).map_err(|rows| Error::InvalidOption {
            option: "row",
            reason: format!(
                "is for one row, and {} match; use `rows`, or name the columns of a unique index",
                rows.len()
            ),
        })
    }
}

/// Begins a transaction, locks rows in it and returns them. The type of the rows is inferred last, when the database is
/// known. Otherwise rustc would report an error twice: for any database, and for this one.
#[track_caller]
pub fn row_tx_with_rows<R: LockedRows<DB>, DB: RowOps>(
    pool: &Pool<DB>,
    deadline: Option<Instant>,
    lock: RowLock<DB>,
    _rows: PhantomData<R>,
) -> impl Future<Output = Result<(Tx<DB>, R)>> {
    let at = Location::caller();
    async move {
        let mut tx = begin_within(pool, lock.bound(), deadline, at).await?;
        match R::fetch(lock.until(deadline), &mut tx).await {
            Ok(rows) => Ok((tx, rows)),
            Err(err) => Err(Box::pin(refused(pool, tx, err, DB::row_holder)).await),
        }
    }
}

/// Begins a transaction and takes a named lock in it.
#[track_caller]
pub fn named_tx<DB: NamedOps>(
    pool: &Pool<DB>,
    deadline: Option<Instant>,
    lock: NamedLock,
) -> impl Future<Output = Result<Tx<DB>>> {
    let at = Location::caller();
    async move {
        let realm = Realm::named(pool);
        if is_under(|it| it.realm == realm && it.key == *lock.key()) {
            return Err(Error::Reentrant { lock: "named lock", key: lock.key().clone(), hint: PASS_TX });
        }
        let mut tx = begin_within(pool, lock.bound(), deadline, at).await?;
        match lock.until(deadline).lock(&mut tx).await {
            Ok(()) => Ok(tx),
            Err(err) => {
                let holder =
                    async |conn: &mut DB::Connection, key: &Key| DB::named_holder(conn, Names::Locks, key).await;
                Err(Box::pin(refused(pool, tx, err, holder)).await)
            }
        }
    }
}

/// As [`until`](super::until), with the row locks of the attempt's transaction registered.
pub fn under_rows_until<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    retry: &Retry,
    body: Pin<&mut F>,
) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(Some(rows(pool, key)), retry.deadline(), body).within(retry.attempts())
}

/// As [`until`](super::until), with the named lock of the attempt's transaction registered.
pub fn under_name_until<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    retry: &Retry,
    body: Pin<&mut F>,
) -> impl Future<Output = Option<F::Output>> {
    Bounded::new(Some(name(pool, key)), retry.deadline(), body).within(retry.attempts())
}

/// Runs the body with the row locks of its transaction registered.
pub fn under_rows<DB: Dialect, F: Future>(
    pool: &Pool<DB>,
    key: &Key,
    body: Pin<&mut F>,
) -> impl Future<Output = F::Output> {
    Under::new(rows(pool, key), body)
}

/// Runs the body with the named lock of its transaction registered.
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

/// Ends an attempt as [`end_tx`] does. Rolls back an attempt that reached the deadline.
pub async fn end_attempt<DB: Dialect, R: Outcome>(tx: Tx<DB>, ended: Option<R>) -> Option<R> {
    match ended {
        Some(result) => Some(end_tx(tx, result).await),
        // The rollback runs in the background, because no time is left.
        None => None,
    }
}
