//! The end of a process that holds leases, and how it fares until then.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};

use super::{Inner, Leases};
use crate::{
    error::{Error, Fault, LossReason, Result},
    lease::{
        keeper::BATCH,
        store::{Answer, BUSY_PAUSE, LeaseStore},
    },
    task::finished,
};

/// How long [`Leases::close`] takes at most.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How the leases of a process fare, for a readiness probe. Made by [`Leases::health`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// How many leases this process holds and renews.
    pub held: usize,
    /// How long the store has failed to answer, since its last answer. `None` when its last call was answered, or none was made.
    pub unreachable_for: Option<Duration>,
    /// [`Leases::close`] was called.
    pub closed: bool,
}

impl Health {
    /// Whether leases can be taken, as far as this process knows without asking.
    pub fn is_ready(&self) -> bool {
        !self.closed && self.unreachable_for.is_none()
    }
}

impl<S: LeaseStore> Leases<S> {
    /// How the leases of this process fare. Local, no I/O.
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

    /// Gives everything back that this process holds, for its orderly end. All clones are closed.
    ///
    /// New requests fail with [`Error::Closed`](crate::Error::Closed). Bodies that run under a lease end with
    /// [`Error::Lost`](crate::Error::Lost), unless their commit is on its way. Leases are given back many in one statement, and
    /// claims, commits and releases on their way are waited for, also those of leases that were dropped before. Takes 5 s at
    /// most.
    ///
    /// Call it last, after the work was drained: a lease that is dropped as `main` returns stays taken until its ttl is over,
    /// because the runtime ends before the release is sent.
    ///
    /// # Errors
    /// [`Error::Database`](crate::Error::Database) when the store does not answer in time. What is not given back is freed by
    /// its ttl.
    ///
    /// # Cancel safety
    /// It goes on in the background if this future is dropped.
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
    // Another call that comes meanwhile waits for what this one gives back.
    let releasing = inner.keeper.unfinished();
    let held = inner.keeper.close();
    for kept in &held {
        kept.lose(LossReason::Closed);
    }
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
                    // A connection that broke says nothing of the next one.
                    Err(Error::Database { fault: Fault::Unavailable, .. }) => {}
                    Err(err) => return Err(err),
                }
                if releases.is_empty() {
                    break;
                }
                // Others are pinned by a transaction, which ends when its body does.
                sleep(BUSY_PAUSE).await;
            }
            for kept in batch {
                inner.lines.freed(kept.line());
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
