//! Leases in a majority of independent Redis servers.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use tokio::time::timeout;

use lockkit::{
    Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};

use crate::{
    ballot::{Ballot, GRACE, Member, Members},
    builder::{ConnectError, RedisStoreBuilder},
    node::{Seen, Taken},
    server::Server,
    store::{RedisStore, all, profile},
    tally::{agreement, all_are_clear, refusal, together},
    trouble::Trouble,
};

/// How many leases a server lists at most.
const LIST_LIMIT: u32 = 10_000;

/// Leases in a majority of several Redis servers that know nothing of each other: three, five or seven masters without
/// replicas. Less than half of them may fail, and the leases go on.
///
/// It is the Redlock algorithm with two additions. The fence is the greatest that the majority would give, and it is
/// written back to a majority before the lease is granted, so fences rise whatever the clocks of the servers say. And each
/// server that may have forgotten leases [sits out](crate#when-the-server-forgets) for the longest ttl.
///
/// A grant takes two round trips, one after the other, and every other operation takes one. A renewal without a clear
/// majority is [`Answer::Busy`]: it is asked again, and the trust in the lease is not extended. Without a majority of
/// servers, operations fail with [`lockkit::Error::Database`].
///
/// [`semaphore`](lockkit::Leases::semaphore), [`rw`](lockkit::Leases::rw) and [`fair`](lockkit::LeaseRequest::fair) are
/// refused: they compare leases of several keys, and the servers have no common clock or list.
///
/// **Limit.** If a majority forgets at once and the clocks differ, a fence can be lower than an earlier one, by the
/// difference of the clocks.
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
    pub async fn connect(servers: impl IntoIterator<Item = impl Into<Server>>) -> Result<Self, ConnectError> {
        Self::with(servers.into_iter().map(RedisStore::builder)).await
    }

    /// Connects to servers with your own settings, the same for each of them but for the server.
    ///
    /// # Errors
    /// [`ConnectError::InvalidOption`] for less than three servers, an even number, or settings that differ;
    /// [`ConnectError::Unreachable`] if less than a majority can be reached; [`ConnectError::Unfit`] if one of the
    /// reachable servers cannot keep leases.
    ///
    /// # Cancel safety
    /// A drop closes the connections.
    pub async fn with(builders: impl IntoIterator<Item = RedisStoreBuilder>) -> Result<Self, ConnectError> {
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
            .ask(
                |it| async move {
                    match it.node.open().await {
                        Ok(()) => Ok(None),
                        Err(Trouble::Unfit(unfit)) => Ok(Some(unfit)),
                        Err(trouble) => Err(trouble),
                    }
                },
                |_| false,
            )
            .await;
        if let Some(unfit) = opened.answers.iter_mut().flatten().find_map(Option::take) {
            return Err(unfit.into());
        }
        members.check(&mut opened)?;
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

    /// Takes all of the leases or none, with the fences on which a majority agreed.
    async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Trouble> {
        let (members, needed) = (&*self.0, self.0.needed());
        let claims: Arc<[Claim]> = claims.into();
        let ask = |it: Arc<Member>| {
            let claims = claims.clone();
            async move { it.node.acquire(&claims).await }
        };
        let granted = |ballot: &Ballot<Taken>| ballot.number(|it| matches!(it, Taken::Granted(_)));
        let mut ballot = members.ask(ask, |it| it.is_decided(granted(it), needed)).await;
        if granted(&ballot) < needed {
            self.give_back(&claims, &ballot).await;
            members.check(&mut ballot)?;
            return Ok(refusal(&ballot, needed - granted(&ballot)));
        }
        let given = agreement(&claims, &ballot);
        let fences: Arc<[u64]> = given.iter().map(|it| it.fence).collect();
        let raise = |it: Arc<Member>| {
            let (claims, fences) = (claims.clone(), fences.clone());
            async move { it.node.raise(&claims, &fences).await }
        };
        let raised = |ballot: &Ballot<bool>| ballot.number(|it| *it);
        let mut written = members.ask(raise, |it| it.is_decided(raised(it), needed)).await;
        if raised(&written) >= needed {
            return Ok(Taken::Granted(given));
        }
        self.give_back(&claims, &ballot).await;
        members.check(&mut written)?;
        Ok(Taken::Held { at: 0, free_in: None })
    }

    /// Releases what a refused request took. Waits for the servers that answered it. The others hear of it later.
    async fn give_back(&self, claims: &[Claim], ballot: &Ballot<Taken>) {
        let releases: Arc<[Release]> =
            claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
        let ttl = claims.iter().map(|it| it.ttl).max().unwrap_or_default();
        let (mut granted, mut others) = (Vec::new(), Vec::new());
        for (member, answer) in self.0.0.iter().zip(&ballot.answers) {
            let tasks = match answer {
                // It took nothing.
                Some(Taken::Held { .. }) => continue,
                Some(Taken::Granted(_)) => &mut granted,
                None => &mut others,
            };
            let (member, releases) = (member.clone(), releases.clone());
            tasks.push(tokio::spawn(async move {
                let nobody: Vec<_> = releases.iter().map(|it| it.token).collect();
                drop(member.release(&releases, &nobody, ttl).await);
            }));
        }
        // Tasks fail only with their runtime.
        for task in granted {
            let _ = task.await;
        }
        let others = async {
            for task in others {
                let _ = task.await;
            }
        };
        let _ = timeout(GRACE, others).await;
    }

    async fn release(&self, releases: &[Release]) -> Result<Vec<Answer>, Trouble> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let (members, needed) = (&*self.0, self.0.needed());
        let releases: Arc<[Release]> = releases.into();
        // The same on all servers, so that a majority has it.
        let nobody: Arc<[Token]> = releases.iter().map(|_| Token::nobody()).collect();
        let ask = |it: Arc<Member>| {
            let (releases, nobody) = (releases.clone(), nobody.clone());
            async move { it.release(&releases, &nobody, it.node.terms.longest_ttl).await }
        };
        let is_done = |it: &Ballot<Vec<Answer>>| all_are_clear(it, releases.len(), members.0.len());
        let mut ballot = members.ask(ask, is_done).await;
        members.check(&mut ballot)?;
        let count = |at: usize, what| ballot.number(|it| it[at] == what);
        let silent = members.0.len() - ballot.answered();
        // Whatever the silent servers say, no majority holds the lease any more.
        let answer = |at| {
            if count(at, Answer::Done) + silent >= needed && count(at, Answer::Done) > 0 {
                Answer::Done
            } else {
                Answer::Gone
            }
        };
        Ok((0..releases.len()).map(answer).collect())
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>, Trouble> {
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let (members, needed) = (&*self.0, self.0.needed());
        let renewals: Arc<[Renewal]> = renewals.into();
        let ask = |it: Arc<Member>| {
            let renewals = renewals.clone();
            async move { it.node.renew(&renewals).await }
        };
        let is_done = |it: &Ballot<Vec<Answer>>| all_are_clear(it, renewals.len(), members.0.len());
        let mut ballot = members.ask(ask, is_done).await;
        members.check(&mut ballot)?;
        let answer = |at: usize| {
            let count = |what| ballot.number(|it| it[at] == what);
            if count(Answer::Done) >= needed {
                Answer::Done
            } else if count(Answer::Gone) > members.0.len() - needed {
                Answer::Gone
            } else {
                // A majority may still hold it.
                Answer::Busy
            }
        };
        Ok((0..renewals.len()).map(answer).collect())
    }

    /// The held leases that the servers see.
    async fn seen<Fut>(&self, question: impl Fn(Arc<Member>) -> Fut) -> Result<Vec<LeaseRecord>, Trouble>
    where
        Fut: Future<Output = Result<Vec<Seen>, Trouble>> + Send + 'static,
    {
        let (members, needed) = (&*self.0, self.0.needed());
        let mut ballot = members.survey(question).await;
        members.check(&mut ballot)?;
        let silent = members.0.len() - ballot.answered();
        let mut seen: Vec<Seen> = ballot.answers.into_iter().flatten().flatten().collect();
        seen.sort_by(|a, b| (&a.record.info.key, a.record.token).cmp(&(&b.record.info.key, b.record.token)));
        let same = |a: &Seen, b: &Seen| (a.record.token, &a.record.info.key) == (b.record.token, &b.record.info.key);
        // What a majority holds, if the silent servers hold it, too.
        let held = seen.chunk_by(same).filter(|it| it.len() + silent >= needed);
        Ok(held.filter_map(|it| together(it, needed)).collect())
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
        let taken = self.acquire(claims).await.map_err(|it| it.while_doing("acquiring lease", first))?;
        Ok(all(taken, claims, self.0.0[0].node.terms.longest_ttl))
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        let question = |it: Arc<Member>| {
            let key = key.clone();
            async move { Ok(it.node.look(&key).await?.into_iter().collect()) }
        };
        let seen = self.seen(question).await.map_err(|it| it.while_doing("looking at lease", key))?;
        Ok(seen.into_iter().max_by_key(|it| it.info.fence))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let first = renewals.first().map(|it| &it.key);
        self.renew(renewals).await.map_err(|it| it.while_doing("renewing leases", first))
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answers = self.lease_release_all(&[Release::new(key, token, min_hold)]).await?;
        Ok(answers.first().copied().expect("BUG: one answer to one release"))
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let first = releases.first().map(|it| &it.key);
        self.release(releases).await.map_err(|it| it.while_doing("releasing lease", first))
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let question = |it: Arc<Member>| {
            let prefix = prefix.to_owned();
            async move { it.node.list(&prefix, LIST_LIMIT).await }
        };
        let mut seen = self.seen(question).await.map_err(|it| it.while_doing("listing leases", None))?;
        seen.truncate(limit as usize);
        Ok(seen)
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        let ballot = self.0.survey(move |it| async move { it.node.sweep(retention, limit).await }).await;
        Ok(ballot.answers.into_iter().flatten().max().unwrap_or(0))
    }

    /// Completes when a majority of the servers has told of a release.
    async fn lease_freed(&self, key: &Key) {
        let mut told = self
            .0
            .0
            .iter()
            .map(|it| {
                let node = &it.node;
                Some(Box::pin(node.releases.freed(node.terms.layout.channel(key))))
            })
            .collect::<Vec<_>>();
        let needed = self.0.needed();
        poll_fn(|context| {
            for place in &mut told {
                if place.as_mut().is_some_and(|it| it.as_mut().poll(context).is_ready()) {
                    *place = None;
                }
            }
            if told.iter().filter(|it| it.is_none()).count() >= needed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn profile(&self) -> Profile {
        let mut profile = profile(self.0.0[0].node.terms.longest_ttl);
        profile.side_leases = false;
        profile
    }
}
