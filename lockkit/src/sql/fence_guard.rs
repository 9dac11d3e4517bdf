//! The fence guard: a row for each key that refuses a transaction with a lower fence than one it has seen.
//!
//! A greater fence raises the row, which stays locked until its transaction ends. So guarded transactions of one key
//! commit in the order of their fences: a greater fence waits for every open transaction with a lower one.
//!
//! Every guard writes its row, for an equal fence too. In REPEATABLE READ on PostgreSQL, a transaction that waited for
//! a row which was only locked goes on with its old snapshot and overwrites its predecessor; if the row was written,
//! the database ends it. And Galera compares what two transactions have *changed*: without a change, the older fence
//! committed last in 23 of 268 pairs.
//!
//! The statement is alone in its message because of Galera, so MySQL's only bound, a variable of the session, is not
//! set: lockkit stops waiting after 12 s and closes the connection.
//!
//! It must be the first statement, because it orders what comes after it: a stale holder may commit between a read and
//! a later guard. In READ COMMITTED each statement after the guard sees every earlier commit. In REPEATABLE READ the
//! first statement fixes the snapshot on PostgreSQL, where a guard that has waited then fails, and the first read on
//! MySQL and MariaDB.

use std::{future::Future, time::Duration};

use sqlx::Database;
use tokio::time::Instant;

use crate::{
    body::task::until,
    lease::{builder::check_fence_domain, held::Lease, life::state::Event, request::MultiLease, store::LeaseStore},
    sql::{
        AsConnection, Dialect,
        conn::{Finish, On},
        depth, failed_on_own_table, note_answer,
    },
    value::{
        error::{Error, Fault, Result},
        fence::Fence,
        key::Key,
    },
};

/// Inside a transaction: refuses it unless `fence` is the greatest fence of this key that a transaction has committed
/// with, or greater. Use it for a lease in another system than this database; `lease.guard(…)` is the same for a
/// [`Lease`].
///
/// `domain` names the source of the fences, such as `"redis:prod"`: 1 to 64 bytes. Fences of one domain must be
/// comparable, so two stores need two domains, and so does a store that was set up anew with lower fences.
///
/// The promise: guarded transactions of one key commit in the order of their fences, the guard of a greater fence
/// returns only after the transactions with lower fences have ended, and once a transaction with a fence has committed,
/// none with a lower fence does. It holds in each database by itself, for what the transaction does after the guard. So
/// call it first, before anything that the lease protects is read: what was read before may be of the time of an
/// earlier holder.
///
/// Transactions of one key run one after the other, those with the same fence too. One round trip; on SQLite two if the
/// fence is refused. The wait is at most [`Wait::DEFAULT`](crate::Wait::DEFAULT), 10 s; on SQLite, in a transaction
/// that did not begin with [`begin`](crate::begin), it is the connection's busy timeout. On MySQL, and on PostgreSQL in
/// a queue of several transactions, it is 12 s, and the statement has not been answered then: drop the transaction,
/// which closes its connection. (A rollback would wait for the answer.)
///
/// In REPEATABLE READ and SERIALIZABLE on PostgreSQL, a guard that has waited for another transaction fails with a
/// transient error, because its snapshot is from before the wait. Between nodes of a Galera cluster the guard does not
/// wait: of two transactions that run concurrently, the commit of one fails with a transient error.
///
/// In a transaction that began inside another one (a savepoint) the guard is refused: the row would be unlocked when
/// the inner transaction is rolled back. Do not roll back to a savepoint of your own from before the guard either.
///
/// # Errors
/// [`Error::Fenced`] for a lower fence; [`Error::Contended`] after the wait; [`Error::InvalidKey`];
/// [`Error::InvalidOption`], also outside a transaction; [`Error::NotMigrated`]; [`Error::Database`], which may be
/// transient. Roll the transaction back after an error.
///
/// # Cancel safety
/// The transaction may or may not have locked the row; roll it back.
///
/// # Example
/// ```
/// use lockkit::{Error, Fence};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// lockkit::migrate(&pool).await?;
/// let mut tx = lockkit::begin(&pool).await?;
/// lockkit::guard(&mut *tx, "redis:prod", "item:7", Fence::from(8)).await?;
/// // … read and write what the lease `item:7` protects …
/// tx.commit().await?;
///
/// // A process that was stopped while its lease expired comes back with its lower fence.
/// let mut tx = lockkit::begin(&pool).await?;
/// let stale = lockkit::guard(&mut *tx, "redis:prod", "item:7", Fence::from(5)).await;
/// assert!(stale.is_err_and(|err| err.is_lost()));
/// # Ok(()) }
/// ```
pub async fn guard<DB: FenceGuardOps>(
    conn: &mut impl AsConnection<DB>,
    domain: impl Into<Key>,
    key: impl Into<Key>,
    fence: Fence,
) -> Result<()> {
    guard_on::<DB>(conn, &domain.into(), &key.into(), fence).await
}

/// Deletes what the guard knows of a domain, and returns of how many keys. For operators, when a store was set up anew
/// and its fences are lower than before: its leases are refused until then.
///
/// Call it when no holder of an older lease can still write. From then on the guard accepts any fence of the domain. It
/// waits for open transactions that are guarded in this domain.
///
/// # Errors
/// [`Error::InvalidOption`]; [`Error::NotMigrated`]; [`Error::PoolStarved`]; [`Error::Database`].
///
/// # Cancel safety
/// The rows may or may not be deleted. Repeat the call if in doubt.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// let keys = lockkit::forget_fences(&pool, "redis:prod").await?;
/// # assert_eq!(keys, 0);
/// # Ok(()) }
/// ```
pub async fn forget_fences<DB: FenceGuardOps>(on: impl On<DB>, domain: impl Into<Key>) -> Result<u64> {
    let doing = "forgetting the fences of domain";
    let domain = domain.into();
    check_fence_domain(&domain)?;
    let mut conn = on.reach(doing).await?;
    let forgotten = DB::fences_forget(&mut conn, &domain).await;
    conn.finish();
    forgotten.map_err(|err| failed_on_own_table::<DB>(doing, Some(&domain), err))
}

impl<S: LeaseStore> Lease<S> {
    /// Inside a transaction of any database: refuses it if a later holder of this lease has written there. See
    /// [`guard`](crate::guard) for the promise. Works with leases of every store.
    ///
    /// Call it before reading what the lease protects, and commit the transaction before the lease is released. The
    /// domain is that of the [`Leases`](crate::lease::LeasesBuilder::fence_domain).
    ///
    /// It orders the transactions of one [key](Self::key). Each permit, each reader and the writers have keys of their
    /// own, so the guard does not order a writer after the readers before it, nor two permits.
    ///
    /// # Errors
    /// [`Error::Fenced`] when a later holder was here; the lease is then lost. [`Error::Lost`] when the loss is known
    /// already. Otherwise as [`guard`](crate::guard).
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the row; roll it back.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # lockkit::migrate(&pool).await?;
    /// # let store = lockkit::testing::MemoryStore::new();
    /// let leases = lockkit::Leases::builder(store).fence_domain("redis:prod").build()?;
    /// let lease = leases.lease("item:7").acquire().await?;
    /// let mut tx = lockkit::begin(&pool).await?;
    /// lease.guard(&mut *tx).await?;
    /// // … read and write what the lease protects …
    /// tx.commit().await?;
    /// lease.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn guard<DB: FenceGuardOps>(&self, conn: &mut impl AsConnection<DB>) -> Result<()> {
        self.visit();
        self.check_trusted()?;
        let guarded = guard_on::<DB>(conn, self.fence_domain(), self.key(), self.fence()).await;
        if let Err(Error::Fenced { .. }) = guarded {
            self.kept().on(Event::Stolen);
        }
        guarded
    }

    /// [`guard`](Self::guard) as a statement for a client that is not sqlx (psql, `SeaORM`, Diesel). It fails if a
    /// later holder of this lease has written. Send it first in a transaction, and roll back when it fails.
    ///
    /// The error says "stale fence" on PostgreSQL. On MySQL and MariaDB it is 1690 (value out of range), on SQLite a
    /// NOT NULL constraint. Set a bound for the wait yourself (`lock_timeout`, `innodb_lock_wait_timeout`).
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::InvalidOption`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let leases = lockkit::Leases::new(lockkit::testing::MemoryStore::new());
    /// # let lease = leases.lease("item:7").acquire().await?;
    /// let sql: String = lease.guard_sql::<sqlx::Sqlite>()?;
    /// assert!(sql.starts_with("INSERT INTO lockkit_fence"));
    /// # Ok(()) }
    /// ```
    pub fn guard_sql<DB: FenceGuardOps>(&self) -> Result<String> {
        self.check_trusted()?;
        check_fence_domain(self.fence_domain())?;
        Ok(DB::guard_text(self.fence_domain(), self.key(), self.fence()))
    }
}

impl<S: LeaseStore> MultiLease<S> {
    /// As [`Lease::guard`](crate::Lease::guard), for all leases, in the order of their keys.
    ///
    /// # Errors
    /// As [`Lease::guard`](crate::Lease::guard).
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the rows; roll it back.
    pub async fn guard<DB: FenceGuardOps>(&self, conn: &mut impl AsConnection<DB>) -> Result<()> {
        for lease in self.leases() {
            lease.guard::<DB>(conn).await?;
        }
        Ok(())
    }
}

async fn guard_on<DB: FenceGuardOps>(
    conn: &mut impl AsConnection<DB>,
    domain: &Key,
    key: &Key,
    fence: Fence,
) -> Result<()> {
    let guarded = guard_key::<DB>(conn.for_query(), domain, key, fence).await;
    // Without an answer it is contended too.
    if guarded.as_ref().is_err_and(Error::is_contended) { guarded } else { note_answer(conn, guarded) }
}

async fn guard_key<DB: FenceGuardOps>(conn: &mut DB::Connection, domain: &Key, key: &Key, fence: Fence) -> Result<()> {
    key.check()?;
    check_fence_domain(domain)?;
    let unfit = match depth::<DB>(conn).await? {
        _ if fence.get() >= FENCES => Some("has a fence of 2^62 or more, which no lease has".to_owned()),
        0 => Some("needs a transaction: outside of one it would protect nothing".to_owned()),
        1 => None,
        depth => Some(format!(
            "needs the outermost transaction and got one at depth {depth}: a rollback to its savepoint would end the \
             guard"
        )),
    };
    if let Some(reason) = unfit {
        return Err(Error::InvalidOption { option: "guard", reason });
    }
    let started = Instant::now();
    let contended = || Error::Contended { key: key.clone(), waited: started.elapsed(), holder: None };
    // PostgreSQL's bound is for each transaction that it waits for.
    let backstop = started + Duration::from_secs(GUARD_SECONDS) + BACKSTOP;
    match until(Some(backstop), DB::guard(conn, domain, key, fence)).await {
        Some(Ok(seen)) if seen <= fence => Ok(()),
        // The caller's lease is not lost by it.
        Some(Ok(seen)) if seen.get() >= FENCES => {
            let found = format!(
                "the row of `{key}` in `lockkit_fence` has the fence {seen}, which no lease has, so lockkit did not \
                 write it; delete the row, or the domain's by `lockkit::forget_fences`"
            );
            Err(Error::database("guarding with the fence of lease", key, Fault::Other, found))
        }
        Some(Ok(seen)) => Err(Error::Fenced { key: key.clone(), fence, seen }),
        Some(Err(err)) if DB::fault(&err) != Fault::Contended => {
            Err(failed_on_own_table::<DB>("guarding with the fence of lease", Some(key), err))
        }
        Some(Err(_)) | None => Err(contended()),
    }
}

/// Every fence is lower.
const FENCES: u64 = 1 << 62;

/// Time beyond the bound before the connection counts as broken.
const BACKSTOP: Duration = Duration::from_secs(2);

/// The bound of the wait for the row, in seconds: that of [`Wait::DEFAULT`](crate::Wait::DEFAULT).
pub(crate) const GUARD_SECONDS: u64 = 10;

/// The fence guard.
#[diagnostic::on_unimplemented(
    message = "lockkit has no fence guard in the database `{Self}`",
    label = "the fence guard needs sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::FenceGuardOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::FenceGuardOps`"
)]
pub trait FenceGuardOps: Dialect + FenceGuardStatements {}

/// The statements of the fence guard. Hidden from the docs: users call [`guard`].
pub trait FenceGuardStatements: Database {
    /// Locks the row of the key until the transaction ends, and raises it to `fence`. Returns the greatest fence that
    /// it has seen: a greater one than `fence` is a refusal.
    fn guard(
        conn: &mut Self::Connection,
        domain: &Key,
        key: &Key,
        fence: Fence,
    ) -> impl Future<Output = sqlx::Result<Fence>> + Send;

    /// The same as one statement with literals, which fails where the fence is refused.
    fn guard_text(domain: &Key, key: &Key, fence: Fence) -> String;

    /// Deletes the rows of a domain.
    fn fences_forget(conn: &mut Self::Connection, domain: &Key) -> impl Future<Output = sqlx::Result<u64>> + Send;
}
