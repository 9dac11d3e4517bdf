//! Several leases at once: all of them or none.
//!
//! They are taken in the order of their keys. None is kept while another one is waited for, so two callers cannot wait
//! for each other. Requests for one key set share a queue, separate from the single keys' queues; a release of any of
//! the keys wakes it.

use std::{
    fmt,
    future::{Future, poll_fn},
    marker::PhantomData,
    task::Poll,
};

use super::{
    LeaseRequest,
    claim::joined,
    mode::Mode,
    yields::{Yields, sealed::Sealed},
};
use crate::lease::{ending::Released, held::Lease, leases::Leases};
use crate::{
    body::{scope::Record, watch::Watch},
    lease::{life::kept::release_failed, store::LeaseStore},
    observe::{Strategy, holding},
    policy::OnLost,
    value::{error::Result, key::Key},
};

impl<S: LeaseStore> Leases<S> {
    /// A request for the leases of all of these keys: either all are taken or none.
    ///
    /// A repeated key is requested once. The leases are taken in the order of their keys, whatever the order here. No
    /// lease is kept while the request waits for another one, so two requests with common keys never deadlock.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let both = leases.all(["account:7", "account:3"]).acquire().await?;
    /// assert!(leases.lease("account:3").try_acquire().await?.is_none());
    /// both.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn all(&self, keys: impl IntoIterator<Item = impl Into<Key>>) -> LeaseRequest<S, MultiLease<S>> {
        let mut keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        keys.sort_unstable();
        keys.dedup();
        LeaseRequest::new(self.0.clone(), joined(&keys), Mode::All(keys))
    }
}

impl<S: LeaseStore> LeaseRequest<S> {
    /// A request for this many permits of a [semaphore](crate::Leases::semaphore) together: either all are taken or
    /// none.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let three = leases.semaphore("report", 5).take(3).acquire().await?;
    /// assert_eq!(three.leases().len(), 3);
    /// assert!(leases.semaphore("report", 5).take(3).try_acquire().await?.is_none());
    /// three.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn take(self, permits: u32) -> LeaseRequest<S, MultiLease<S>> {
        let mode = match self.mode {
            Mode::Permit(of) => Mode::Permits { of, take: permits },
            _ => Mode::NoPermits,
        };
        let Self { inner, key, mode: _, ttl, wait, min_hold, on_lost, fair, yields: _ } = self;
        LeaseRequest { inner, key, mode, ttl, wait, min_hold, on_lost, fair, yields: PhantomData }
    }
}

/// Several leases that this process holds together, in the order of their keys: the leases of [`Leases::all`], or
/// several permits ([`LeaseRequest::take`](crate::LeaseRequest::take)). Dropping it releases all of them in the
/// background.
#[must_use = "the leases are released as soon as they are dropped: bind them, `let leases = …` (`let _ = …` drops \
              them at once)"]
pub struct MultiLease<S: LeaseStore> {
    leases: Vec<Lease<S>>,
    on_lost: OnLost,
}

impl<S: LeaseStore> MultiLease<S> {
    fn new(mut leases: Vec<Lease<S>>, on_lost: OnLost) -> Self {
        leases.sort_unstable_by(|one, other| one.key().cmp(other.key()));
        Self { leases, on_lost }
    }

    /// The leases, in the order of their keys.
    pub fn leases(&self) -> &[Lease<S>] {
        &self.leases
    }

    /// The lease of this key.
    pub fn get(&self, key: impl AsRef<str>) -> Option<&Lease<S>> {
        self.leases.iter().find(|it| it.key().as_str() == key.as_ref())
    }

    /// Whether this process may still act as the holder of all of the leases. Local, no I/O.
    pub fn is_trusted(&self) -> bool {
        self.leases.iter().all(Lease::is_trusted)
    }

    /// Completes with the key when one of the leases is lost, and never otherwise.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) -> Key {
        let mut losses: Vec<_> = self.leases.iter().map(|it| (Box::pin(it.lost()), it.key())).collect();
        poll_fn(|context| {
            let lost = losses.iter_mut().find_map(|(lost, key)| lost.as_mut().poll(context).is_ready().then_some(*key));
            lost.map_or(Poll::Pending, |key| Poll::Ready(key.clone()))
        })
        .await
    }

    /// Releases all of the leases. Returns [`Released::AlreadyLost`] if one of them was already lost.
    ///
    /// # Errors
    /// [`Error::Database`](crate::Error::Database) when the store cannot be reached. The ttl frees the leases that were
    /// not released.
    ///
    /// # Cancel safety
    /// The release continues in the background if this future is dropped.
    pub async fn release(self) -> Result<Released> {
        let mut released = Released::WhileHeld;
        for lease in self.leases {
            if lease.release().await? == Released::AlreadyLost {
                released = Released::AlreadyLost;
            }
        }
        Ok(released)
    }

    /// The watch that runs a body under these leases.
    fn watch(&self) -> Watch<'_> {
        let check = || self.leases.iter().try_for_each(Lease::check_body);
        let lost = move || async move {
            let key = self.lost().await;
            let lost = self.get(&key).and_then(|it| it.check_trusted().err());
            lost.expect("BUG: a lease that was lost stays lost")
        };
        let span = holding(Strategy::Lease, &joined(self.leases.iter().map(Lease::key)));
        Watch::new(self.on_lost, check, lost).in_span(span)
    }
}

impl<S: LeaseStore> Sealed for MultiLease<S> {}

impl<S: LeaseStore> Yields for MultiLease<S> {
    type Store = S;

    fn of(leases: Vec<Lease<S>>, on_lost: OnLost) -> Self {
        Self::new(leases, on_lost)
    }

    fn borrowed(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::borrowed).collect(), on_lost: self.on_lost }
    }

    fn lent(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::lent).collect(), on_lost: self.on_lost }
    }

    fn watched(&self) -> (Watch<'_>, Record) {
        (self.watch(), Record::new(self.leases.iter().map(Lease::lock)))
    }

    async fn end_after_body(self) {
        release_failed(self.release().await);
    }
}

impl<S: LeaseStore> fmt::Debug for MultiLease<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.leases).finish()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Duration, Instant, sleep};

    use super::*;
    use crate::testing::MemoryStore;

    #[tokio::test(start_paused = true)]
    async fn several_leases_are_held_together_until_one_of_them_is_lost() {
        let store = MemoryStore::new();
        let leases = Leases::new(store.client());
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        assert!(both.is_trusted());
        assert_eq!(both.release().await.unwrap(), Released::WhileHeld);
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        store.steal("a");
        assert_eq!(both.lost().await, "a");
        assert!(!both.is_trusted());
        assert_eq!(both.release().await.unwrap(), Released::AlreadyLost);
        assert_eq!(leases.list("").await.unwrap(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn the_release_of_several_leases_wakes_the_callers_that_wait_for_one_of_them() {
        let leases = Leases::new(MemoryStore::new());
        let both = leases.all(["a", "b"]).acquire().await.unwrap();
        let waiting = ["a", "b"].map(|key| tokio::spawn(leases.lease(key).acquire()));
        sleep(Duration::from_secs(5)).await;
        let released = Instant::now();
        both.release().await.unwrap();
        for waiting in waiting {
            drop(waiting.await.unwrap().unwrap());
        }
        assert_eq!(released.elapsed(), Duration::ZERO, "they do not poll");
    }
}
