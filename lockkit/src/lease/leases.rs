//! Where leases come from: requests for them, and the operations of operators.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    builder::LeasesBuilder,
    inner::Inner,
    request::{LeaseRequest, mode::Mode},
};
use crate::{
    lease::{
        bounded::LIMIT,
        life::state::Event,
        queue::wait::FIRST_ANSWER,
        store::{Answer, BUSY_PAUSE, LeaseInfo, LeaseRecord, LeaseStore, Previous, Release},
    },
    value::{
        error::{Error, Result},
        fence::Fence,
        key::Key,
    },
};

/// Maximum number of leases that [`Leases::list`] returns.
const LIST_LIMIT: u32 = 10_000;

/// Gives out leases that live in one store: the table `lockkit_lease` of a database, or a store of your own.
///
/// Make one per service and clone it freely. Clones share their queues and the renewal tasks. Use it when the work
/// outlives a transaction, calls other services, or must run in only one of many processes. For one short transaction,
/// [`RowLock`](crate::RowLock) or [`NamedLock`](crate::NamedLock) is simpler and faster.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// let leases = lockkit::Leases::new(pool.clone());
/// leases.migrate().await?;
///
/// let lease = leases.lease("nightly:invoices").acquire().await?;
/// // … long work, as long as lease.is_trusted() …
///
/// // A write that happens only if the lease is still held at the moment of the commit:
/// let mut tx = lockkit::begin(&pool).await?;
/// # sqlx::query("CREATE TABLE invoices (id INTEGER)").execute(&mut *tx).await?;
/// sqlx::query("INSERT INTO invoices VALUES (1)").execute(&mut *tx).await?;
/// lease.commit(tx).await?;
/// # Ok(()) }
/// ```
pub struct Leases<S: LeaseStore>(pub(super) Arc<Inner<S>>);

impl<S: LeaseStore> Leases<S> {
    /// Leases with the defaults of [`LeasesBuilder`].
    pub fn new(store: S) -> Self {
        Self::builder(store).assemble()
    }

    /// A builder for leases with your own settings.
    pub fn builder(store: S) -> LeasesBuilder<S> {
        LeasesBuilder::new(store)
    }

    /// The store that the leases live in.
    pub fn store(&self) -> &S {
        &self.0.caller_store
    }

    /// A request for the lease of this key. Set the options that differ from the defaults, then call
    /// [`acquire`](LeaseRequest::acquire), [`try_acquire`](LeaseRequest::try_acquire) or [`run`](LeaseRequest::run).
    pub fn lease(&self, key: impl Into<Key>) -> LeaseRequest<S> {
        LeaseRequest::new(self.0.clone(), key.into(), Mode::Exclusive)
    }

    /// The current holder of the lease. `None` if the lease is free or expired. Reads only.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Cancel safe: this only reads.
    pub async fn show(&self, key: impl Into<Key>) -> Result<Option<LeaseInfo>> {
        Ok(self.look(&key.into()).await?.map(|it| self.0.shown(it)))
    }

    async fn look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        key.check()?;
        self.0.store().look(key, LIMIT).await
    }

    /// The currently held leases whose key starts with `prefix`, in the order of their keys, at most 10,000. Reads
    /// only.
    ///
    /// # Errors
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Cancel safe: this only reads.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LeaseInfo>> {
        let held = self.0.store().list(prefix, LIST_LIMIT, LIMIT).await?;
        Ok(held.into_iter().map(|it| self.0.shown(it)).collect())
    }

    /// The leases whose key starts with `prefix` that have expired without a release, and that nobody has taken since,
    /// in the order of their keys, at most 10,000. Their holders died, hung or were cut off. Reads only.
    ///
    /// A database keeps them for a week. Other stores forget a lease when it expires, so on these the list is empty.
    ///
    /// # Errors
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Cancel safe: this only reads.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let leases = lockkit::Leases::new(lockkit::testing::MemoryStore::new());
    /// let lease = leases.lease("nightly").acquire().await?;
    /// leases.store().expire("nightly"); // as if its process had died
    /// for (key, died) in leases.expired("").await? {
    ///     println!("{key} has been free for {:?}, since {} died", died.expired_for, died.holder);
    /// }
    /// # assert_eq!(leases.expired("night").await?[0].1.fence, lease.fence());
    /// # Ok(()) }
    /// ```
    pub async fn expired(&self, prefix: &str) -> Result<Vec<(Key, Previous)>> {
        self.0.store().expired(prefix, LIST_LIMIT, LIMIT).await
    }

    /// Takes the lease from its holder and leaves it free, for operators. Returns the lease that was taken, or `None`
    /// if it was not held.
    ///
    /// The old holder learns of the loss at its next renewal, or at once if it is of the same [`Leases`]. Its commits
    /// are refused from now on. The next holder gets a greater fence. If an operator decides after a look at the
    /// holder, another process may hold the lease by then: use [`steal_if`](Self::steal_if) in that case.
    ///
    /// # Errors
    /// [`Error::Contended`] when a transaction that pins the lease does not end within the default wait;
    /// [`Error::InvalidKey`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// After a drop the lease may or may not be free. Repeat the call if in doubt.
    pub async fn steal(&self, key: impl Into<Key>) -> Result<Option<LeaseInfo>> {
        let key = key.into();
        match self.look(&key).await? {
            Some(held) => Box::pin(self.take_from(key, held)).await,
            None => Ok(None),
        }
    }

    /// As [`steal`](Self::steal), but only from the holder with this fence, as returned by [`show`](Self::show).
    /// Returns `None` if that holder no longer has the lease. In that case the current holder, if any, keeps it. Seen
    /// from another process, all holders to whom a lease was handed over in its process are one, with the fence of the
    /// first.
    ///
    /// # Errors
    /// As [`steal`](Self::steal).
    ///
    /// # Cancel safety
    /// As [`steal`](Self::steal).
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// # let hung = leases.lease("nightly").acquire().await?;
    /// if let Some(held) = leases.show("nightly").await? {
    ///     // … "Take it from {held.holder}?" … "yes" …
    ///     match leases.steal_if("nightly", held.fence).await? {
    ///         Some(taken) => println!("taken from {}", taken.holder),
    ///         None => println!("{} does not hold it any more", held.holder),
    ///     }
    /// }
    /// # assert_eq!(leases.show("nightly").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn steal_if(&self, key: impl Into<Key>, fence: Fence) -> Result<Option<LeaseInfo>> {
        let key = key.into();
        match self.look(&key).await? {
            Some(held) => {
                // A lease that this process is releasing or committing is not renewed any more.
                let here = self.0.keeper.leave_to_store_if(held.token, fence);
                let here = here.or_else(|| Some(self.0.queues.fence_of(&key, held.token)? == fence));
                if !here.unwrap_or(held.info.fence == fence) {
                    return Ok(None);
                }
                Box::pin(self.take_from(key, held)).await
            }
            None => Ok(None),
        }
    }

    /// Releases the lease by the token of `held`, whoever of its process holds it by now.
    async fn take_from(&self, key: Key, held: LeaseRecord) -> Result<Option<LeaseInfo>> {
        let (started, shown) = (Instant::now(), self.0.shown(held.clone()));
        let release = Release { key: key.clone(), token: held.token, min_hold: Duration::ZERO };
        let wait = self.0.wait.max(FIRST_ANSWER);
        while started.elapsed() < wait {
            match self.0.store().release(&release, LIMIT.min(wait)).await? {
                Answer::Done => {
                    // A holder of this process learns it at once.
                    if let Some(kept) = self.0.keeper.stolen(held.token) {
                        kept.on(Event::Stolen);
                        self.0.queues.freed(kept.queue_key());
                    }
                    self.0.queues.freed(&key);
                    return Ok(Some(shown));
                }
                Answer::Gone => return Ok(None),
                Answer::Busy => sleep(BUSY_PAUSE).await,
            }
        }
        Err(Error::Contended { key, waited: started.elapsed(), holder: Some(Box::new(shown.into())) })
    }
}

impl<S: LeaseStore> Clone for Leases<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: LeaseStore> fmt::Debug for Leases<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;
    use crate::testing::{Failure, MemoryStore, Operation};

    #[tokio::test(start_paused = true)]
    async fn the_leases_that_nobody_has_renewed_are_listed() {
        let leases = Leases::new(MemoryStore::new());
        let [expired, _held] = [leases.lease("a").acquire().await.unwrap(), leases.lease("b").acquire().await.unwrap()];
        leases.store().expire("a").unwrap();
        let listed = leases.expired("").await.unwrap();
        assert!(matches!(&*listed, [(key, died)] if key == "a" && died.fence == expired.fence()), "{listed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_being_released_here_is_taken_from_the_holder_with_this_fence_only() {
        let leases = Leases::new(MemoryStore::new());
        let lease = leases.lease("k").acquire().await.unwrap();
        let (fence, other) = (lease.fence(), Fence::from(lease.fence().get() + 1));
        leases.store().faults().script(Operation::Release, [Failure::Slow(Duration::from_secs(2))]);
        let releasing = tokio::spawn(lease.release());
        yield_now().await;
        assert_eq!(leases.steal_if("k", other).await.unwrap(), None);
        assert!(leases.steal_if("k", fence).await.unwrap().is_some());
        releasing.await.unwrap().unwrap();
    }
}
