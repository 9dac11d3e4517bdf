//! Leases in a majority of independent Redis servers.

use std::{collections::HashSet, future::poll_fn, sync::Arc, task::Poll, time::Duration};

use lockkit::{
    Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};

use crate::{
    builder::RedisStoreBuilder,
    claim::all,
    error::{ConnectError, Failure},
    quorum::members::{Member, Members},
    server::Server,
    store::{RedisStore, profile},
};

mod members;
mod rounds;
mod unreleased;
mod votes;

/// How many leases a server lists at most.
const LIST_LIMIT: u32 = 10_000;

/// Leases in a majority of several Redis servers that know nothing of each other: three, five or seven masters without
/// replicas. Less than half of them may fail, and the leases go on.
///
/// It is the Redlock algorithm with two additions. The fence is the greatest that the majority would give, and it is
/// written back to a majority before the lease is granted, so fences rise whatever the clocks of the servers say. And
/// each server that may have forgotten leases [sits out](crate#when-the-server-forgets) for the longest ttl.
///
/// A grant takes two round trips, one after the other, and every other operation takes one. A renewal without a clear
/// majority is [`Answer::Busy`]: it is tried again, and the trust in the lease is not extended. Without a majority of
/// servers, operations fail with [`lockkit::Error::Database`].
///
/// [`semaphore`](lockkit::Leases::semaphore), [`rw`](lockkit::Leases::rw) and [`fair`](lockkit::LeaseRequest::fair) are
/// refused: they compare leases of several keys, and the servers have no common clock or list.
///
/// All processes must name the same servers: majorities of different servers need not have one in common, and a lease
/// would have two holders. To change the servers, stop all processes for the longest ttl.
///
/// **Clocks.** Each server counts the ttl by its own clock. A server whose clock is set forward forgets a lease early.
/// A lease has one holder as long as these servers and the servers without the lease are not a majority together. So
/// one clock is enough for two holders if only a bare majority has the lease, and a majority of clocks if all have it.
///
/// **No repair.** A server that forgot a lease does not get it back by a renewal. If one of three servers forgets a
/// lease, the loss of a second one ends it, though the first one is back. Leases that are acquired after the first
/// server's quarantine are on all three again.
///
/// **Limit.** Fences rise as long as each majority has a server that remembers the last one. A server that did not
/// answer its grant never knew it, and one that forgot it, however long ago, does not learn it until the next grant.
/// Once such servers are a majority, a fence can be lower than an earlier one, by the difference of the clocks. If one
/// of three servers was down for a grant, it is enough that a second one restarts without its data.
///
/// # Example
/// ```no_run
/// use lockkit::Leases;
/// use lockkit_redis::{Quorum, redis::Client};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let servers = ["redis://a/", "redis://b/", "redis://c/"].map(Client::open);
/// let quorum = Quorum::connect(servers.into_iter().collect::<Result<Vec<_>, _>>()?).await?;
/// let lease = Leases::new(quorum).lease("nightly").acquire().await?;
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Quorum(Arc<Members>);

impl Quorum {
    /// Connects to the servers with the defaults of [`RedisStoreBuilder`].
    ///
    /// # Errors
    /// As [`with`](Self::with).
    ///
    /// # Cancel safety
    /// As [`with`](Self::with).
    pub async fn connect(servers: impl IntoIterator<Item = impl Into<Server>>) -> Result<Self, ConnectError> {
        Self::with(servers.into_iter().map(RedisStore::builder)).await
    }

    /// Connects to servers with your own settings, the same for each of them but for the server.
    ///
    /// # Errors
    /// [`ConnectError::InvalidOption`] for less than three servers, an even number, settings that differ, or a
    /// reachable server that is named twice, also as two of its databases; [`ConnectError::Unreachable`] if less than a
    /// majority can be reached; [`ConnectError::Unfit`] if one of the reachable servers cannot keep leases.
    ///
    /// # Cancel safety
    /// A drop closes the connections.
    pub async fn with(builders: impl IntoIterator<Item = RedisStoreBuilder>) -> Result<Self, ConnectError> {
        let builders: Vec<_> = builders.into_iter().collect();
        let servers = builders.iter().map(RedisStoreBuilder::address).collect::<Vec<_>>().join(", ");
        let members = builders.into_iter().map(|it| Ok(Arc::new(Member::new(it.node()?))));
        let members = Members(members.collect::<Result<Vec<_>, ConnectError>>()?);
        let invalid = |reason| Err(ConnectError::InvalidOption { option: "servers", reason });
        let number = members.0.len();
        if number < 3 || number.is_multiple_of(2) {
            return invalid(format!("are {number}; use an odd number, 3 or more"));
        }
        let mut terms = members.0.iter().map(|it| it.node.terms);
        let first = terms.next();
        if terms.any(|it| Some(it) != first) {
            return invalid("have different settings; give all of them the same".to_owned());
        }
        let mut opened = members
            .query_all(|it| async move {
                match it.node.open().await {
                    Ok(run) => Ok(Ok(run)),
                    Err(Failure::Unfit(unfit)) => Ok(Err(unfit)),
                    Err(failure) => Err(failure),
                }
            })
            .await;
        let mut runs = HashSet::new();
        for run in opened.answers.iter().flatten() {
            let run = run.as_ref().map_err(Clone::clone)?;
            if !run.is_empty() && !runs.insert(run) {
                return invalid(format!("name the server with the run_id {run} twice; name each server once"));
            }
        }
        members.check(&mut opened).map_err(|err| ConnectError::new(err, servers))?;
        Ok(Self(Arc::new(members)))
    }

    /// Declares each of the servers new, as [`RedisStore::declare_new`] does for one.
    ///
    /// # Errors
    /// [`lockkit::Error::Database`] if one of them does not answer. Repeat the call.
    ///
    /// # Cancel safety
    /// After a drop some servers may be declared new. Repeat the call.
    pub async fn declare_new(&self) -> Result<()> {
        for member in &self.0.0 {
            let declared = member.node.quarantine(true).await;
            declared.map_err(|it| it.while_doing("declaring a server new", None))?;
        }
        Ok(())
    }
}

impl LeaseStore for Quorum {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        Ok(match self.lease_acquire_all(std::slice::from_ref(claim)).await? {
            AcquiredAll::Granted(mut grants) => Acquired::Granted(grants.pop().expect("BUG: one grant for one claim")),
            AcquiredAll::Held { free_in, .. } => Acquired::Held { free_in },
        })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let first = claims.first().map(|it| &it.key);
        let taken = self.0.acquire(claims).await.map_err(|it| it.while_doing("acquiring lease", first))?;
        Ok(all(taken, claims, self.0.0[0].node.terms.longest_ttl))
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        let request = |it: Arc<Member>| {
            let key = key.clone();
            async move { Ok(it.node.look(&key, false).await?.into_iter().collect()) }
        };
        let seen = self.0.seen(request).await.map_err(|it| it.while_doing("looking at lease", key))?;
        Ok(seen.into_iter().max_by_key(|it| it.info.fence))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let first = renewals.first().map(|it| &it.key);
        self.0.renew(renewals).await.map_err(|it| it.while_doing("renewing leases", first))
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answers = self.lease_release_all(&[Release::new(key, token, min_hold)]).await?;
        Ok(answers.first().copied().expect("BUG: one answer to one release"))
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let first = releases.first().map(|it| &it.key);
        self.0.release(releases).await.map_err(|it| it.while_doing("releasing lease", first))
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let request = |it: Arc<Member>| {
            let prefix = prefix.to_owned();
            async move { it.node.list(&prefix, LIST_LIMIT, false).await }
        };
        let mut seen = self.0.seen(request).await.map_err(|it| it.while_doing("listing leases", None))?;
        seen.truncate(limit as usize);
        Ok(seen)
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        let votes = self.0.survey(move |it| async move { it.node.sweep(retention, limit).await }).await;
        Ok(votes.answers.into_iter().flatten().max().unwrap_or(0))
    }

    /// Completes when a majority of the servers has reported a release.
    async fn lease_freed(&self, key: &Key) {
        let mut waiting = self
            .0
            .0
            .iter()
            .map(|answer| {
                let node = &answer.node;
                Some(Box::pin(node.subscriptions.freed(node.terms.layout.channel(key))))
            })
            .collect::<Vec<_>>();
        let needed = self.0.needed();
        poll_fn(|context| {
            for place in &mut waiting {
                if place.as_mut().is_some_and(|it| it.as_mut().poll(context).is_ready()) {
                    *place = None;
                }
            }
            if waiting.iter().filter(|it| it.is_none()).count() >= needed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn profile(&self) -> Profile {
        let mut profile = profile(self.0.0[0].node.terms.longest_ttl);
        profile.side_leases = false;
        profile.fence_domain = "redis-quorum";
        profile
    }
}
