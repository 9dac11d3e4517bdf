//! How a lease is asked for: once, with waiting, or around a body of work.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

use super::{BUSY_PAUSE, Inner, check_ttl, held::Lease};
use crate::{
    error::{Error, HolderInfo, Result},
    keeper::Kept,
    key::Key,
    policy::check_wait,
    section::{finished, no_answer},
    store::{Acquired, Claim, Held, LeaseStore, Token},
    trust::Trust,
    wait::{Turn, Waited},
};

/// A request for one lease, made by [`Leases::lease`](crate::Leases::lease).
#[derive(Debug)]
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run` is awaited"]
pub struct LeaseRequest<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    key: Key,
    ttl: Duration,
    wait: Duration,
}

impl<S: LeaseStore> LeaseRequest<S> {
    pub(super) fn new(inner: Arc<Inner<S>>, key: Key) -> Self {
        Self { key, ttl: inner.ttl, wait: inner.wait, inner }
    }

    /// How long the lease lives without a renewal. At least 50 ms.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) try before they give up; zero tries once.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// The lease, as soon as it is free.
    ///
    /// Callers of one process queue in order, and only the first of them asks the store, without holding a connection
    /// between two questions. The lease is renewed in the background from now on.
    ///
    /// A second `acquire` of the same key in the same task waits like any other: leases are not re-entrant, because a
    /// lease that one task holds twice would be freed by the first of two releases.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, with the holder; [`Error::Database`] when the store did not answer in that time; [`Error::InvalidKey`], [`Error::InvalidOption`],
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropping this future loses the place in the line. A question that is already on its way is answered all the
    /// same, and what it was granted is given back at once.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn acquire(self) -> Result<Lease<S>> {
        self.check()?;
        let started = Instant::now();
        let deadline = started + self.wait;
        let taken = {
            let ask = |likely_free: bool| {
                let (inner, claim) = (self.inner.clone(), self.claim());
                async move {
                    if !likely_free && let Some(held) = inner.store().lease_look(&claim.key).await? {
                        return Ok(Turn::Held { free_in: Some(held.info.expires_in) });
                    }
                    Ok(match ask(inner, claim).await? {
                        Answer::Granted(lease) => Turn::Done(lease),
                        Answer::Held { free_in, .. } => Turn::Held { free_in },
                    })
                }
            };
            self.inner.lines.wait(&self.key, deadline, ask).await?
        };
        let answered = match taken {
            Waited::Done(lease) => return Ok(lease),
            Waited::Held => true,
            Waited::NoAnswer => false,
        };
        // Who holds it is worth one more question, if the answer is quick.
        let waited = started.elapsed();
        let holder = match timeout(BUSY_PAUSE * 5, self.inner.store().lease_look(&self.key)).await {
            Ok(Ok(Some(Held { info, .. }))) => Some(HolderInfo::new(info.holder, info.fence, info.expires_in)),
            Ok(Err(err)) if !answered => return Err(err),
            Err(_) if !answered => return Err(no_answer("acquiring lease", Some(&self.key))),
            _ => None,
        };
        Err(Error::Contended { key: self.key, waited, holder })
    }

    /// The lease if it is free now; `None` when somebody else holds it. Asks once and does not queue.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn try_acquire(self) -> Result<Option<Lease<S>>> {
        self.check()?;
        match ask(self.inner.clone(), self.claim()).await? {
            Answer::Granted(lease) => Ok(Some(lease)),
            Answer::Held { .. } => Ok(None),
        }
    }

    /// Acquires the lease, runs `body`, and releases it.
    ///
    /// The body is dropped at its next await point when the lease is lost, and the result is [`Error::Lost`] then.
    /// It gets a [`Lease`] of its own, to verify or commit with; dropping that one releases nothing.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), [`Error::Lost`], and whatever the body returns.
    ///
    /// # Cancel safety
    /// Dropping this future drops the body and releases the lease in the background.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
    /// let fence = leases
    ///     .lease("nightly")
    ///     .run(|lease| async move { Ok::<_, lockkit::Error>(lease.fence()) })
    ///     .await?;
    /// assert_eq!(leases.show("nightly").await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease<S>) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        let body = body(lease.borrowed());
        lease.end_with(body).await
    }

    fn check(&self) -> Result<()> {
        self.key.check()?;
        check_ttl(self.ttl)?;
        check_wait("wait", self.wait)
    }

    fn claim(&self) -> Claim {
        Claim { key: self.key.clone(), token: Token::random(), holder: self.inner.holder.clone(), ttl: self.ttl }
    }
}

enum Answer<S: LeaseStore> {
    Granted(Lease<S>),
    Held { free_in: Option<Duration> },
}

/// Asks the store once.
///
/// In a task of its own: the claim is answered for even if the caller is dropped meanwhile. A lease that nobody takes
/// from the task is dropped with its result, and so released.
async fn ask<S: LeaseStore>(inner: Arc<Inner<S>>, claim: Claim) -> Result<Answer<S>> {
    let asking = tokio::spawn(async move {
        let sent = Instant::now();
        let answer = inner.store().lease_acquire(&claim).await;
        let fence = match answer {
            Ok(Acquired::Granted(fence)) => fence,
            Ok(Acquired::Held { free_in, .. }) => return Ok(Answer::Held { free_in }),
            Err(err) => {
                // It may have been granted all the same.
                Lease::give_back_in_background(inner, claim.key, claim.token);
                return Err(err);
            }
        };
        let Claim { key, token, ttl, .. } = claim;
        let kept = Kept::new(key, token, fence, Trust::new(sent, ttl), ttl, inner.renew_every);
        let lease = Lease::granted(inner, kept);
        // An answer that took longer than the lease lives is no lease.
        Ok(if lease.is_trusted() { Answer::Granted(lease) } else { Answer::Held { free_in: None } })
    });
    finished("acquiring lease", asking).await
}
