//! Closing the leases of a process, and their health until then.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};

use super::{inner::Inner, leases::Leases};
use crate::{
    body::task::finished,
    lease::{
        life::{
            keeper::BATCH,
            state::{Effect, Event},
        },
        store::{Answer, BUSY_PAUSE, LeaseStore},
    },
    value::error::{Error, Fault, Result},
};

/// Time limit of [`Leases::close`].
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The state of the leases of a process, for a readiness probe. Made by [`Leases::health`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// The number of leases that this process holds and renews.
    pub held: usize,
    /// Time since the store stopped answering. `None` if it answered its last call, or if there was no call.
    pub unreachable_for: Option<Duration>,
    /// Whether [`Leases::close`] was called.
    pub closed: bool,
}

impl Health {
    /// Whether leases can be acquired, as far as this process knows. Does not ask the store.
    pub fn is_ready(&self) -> bool {
        !self.closed && self.unreachable_for.is_none()
    }
}

impl<S: LeaseStore> Leases<S> {
    /// The state of the leases of this process. Local, no I/O.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let lease = leases.lease("nightly").acquire().await?;
    /// assert!(leases.health().is_ready());
    /// assert_eq!(leases.health().held, 1);
    /// # drop(lease); Ok(()) }
    /// ```
    pub fn health(&self) -> Health {
        let keeper = &self.0.keeper;
        Health { held: keeper.held(), unreachable_for: self.0.store().unreachable_for(), closed: keeper.is_closed() }
    }

    /// Releases all leases of this process, for an orderly shutdown. Closes all clones.
    ///
    /// New requests fail with [`Error::Closed`](crate::Error::Closed). Bodies under a lease end with
    /// [`Error::Lost`](crate::Error::Lost), unless their commit is in flight. Leases are released in batches. This call
    /// also waits for claims, commits and releases in flight, including releases of leases that were dropped before. It
    /// takes at most 5 s.
    ///
    /// Call it last, after the work is drained. If a lease is dropped as `main` returns, the runtime ends before the
    /// release is sent, so the lease stays taken until its ttl ends.
    ///
    /// # Errors
    /// [`Error::Database`](crate::Error::Database) when the store does not answer in time. The ttl frees the leases
    /// that were not released.
    ///
    /// # Cancel safety
    /// The close continues in the background if this future is dropped.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool.clone()); leases.migrate().await?;
    /// let lease = leases.lease("nightly").acquire().await?;
    /// // … SIGTERM …
    /// leases.close().await?;
    /// assert!(!lease.is_trusted());
    /// assert!(leases.lease("nightly").acquire().await.is_err());
    /// # let others = lockkit::Leases::new(pool);
    /// # assert!(others.lease("nightly").try_acquire().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub async fn close(&self) -> Result<()> {
        let closing = tokio::spawn(close(self.0.clone()));
        finished("closing leases", closing).await
    }
}

async fn close<S: LeaseStore>(inner: Arc<Inner<S>>) -> Result<()> {
    // A second call to `close` waits for the releases of this one.
    let releasing = inner.keeper.unfinished();
    let mut held = inner.keeper.close();
    // A commit in flight ends its lease itself.
    held.retain(|it| it.on(Event::Closed) != Effect::Nothing);
    let closing = async {
        let releasing = releasing;
        for batch in held.chunks(BATCH) {
            let mut releases: Vec<_> = batch.iter().map(|it| it.release()).collect();
            loop {
                match inner.store().release_all(&releases).await {
                    Ok(answers) => {
                        let mut answers = answers.into_iter();
                        releases.retain(|_| answers.next() == Some(Answer::Busy));
                    }
                    // The next connection may work although this one broke.
                    Err(Error::Database { fault: Fault::Unavailable, .. } | Error::PoolStarved { .. }) => {}
                    Err(err) => return Err(err),
                }
                if releases.is_empty() {
                    break;
                }
                // The remaining leases are pinned by transactions, which end with their bodies.
                sleep(BUSY_PAUSE).await;
            }
            for kept in batch {
                inner.queues.freed(kept.queue_key());
            }
        }
        drop(releasing);
        inner.keeper.finished().await;
        Ok(())
    };
    match timeout(CLOSE_LIMIT, closing).await {
        Ok(closed) => closed,
        Err(_) => Err(inner.store().silence("closing leases", None).await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::MemoryStore;

    #[tokio::test(start_paused = true)]
    async fn a_process_is_ready_while_the_store_answers_and_until_its_leases_are_closed() {
        let leases = Leases::new(MemoryStore::new());
        let is_ready = || leases.health().is_ready();
        assert!(is_ready());
        leases.store().faults().partition();
        leases.lease("k").try_acquire().await.unwrap_err();
        assert!(!is_ready());
        leases.store().faults().heal();
        drop(leases.lease("k").acquire().await.unwrap());
        assert!(is_ready());
        leases.close().await.unwrap();
        assert!(!is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_waits_for_another_process_ends_soon_after_its_leases_are_closed() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let lease = there.lease("k").acquire().await.unwrap();
        // A request for several takes no ticket, so it only reads until the lease is free.
        let waiting = tokio::spawn(here.all(["k", "l"]).acquire());
        let second = Duration::from_secs(1);
        sleep(second).await;
        here.close().await.unwrap();
        let ended = timeout(second, waiting).await.expect("before its wait is over").unwrap();
        assert!(matches!(ended, Err(Error::Closed { .. })), "{ended:?}");
        drop(lease);
    }
}
