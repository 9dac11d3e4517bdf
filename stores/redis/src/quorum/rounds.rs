//! The operations of a quorum, each as one or two rounds of requests to all servers.
//!
//! Two majorities share one server, which may have the slowest clock. Each server's own fence would rise, and that of
//! the lease could fall. So the greatest fence of the majority is written to a majority before the grant.

use std::{sync::Arc, time::Duration};

use lockkit::store::{Answer, Claim, LeaseRecord, Release, Renewal};
use tokio::time::{Instant, timeout};

use crate::{
    claim::Taken,
    error::Failure,
    look::Seen,
    quorum::{
        members::{GRACE, Member, Members},
        votes::{Votes, agreement, all_are_clear, granted, refusal, released, renewed, together},
    },
};

impl Members {
    /// Takes all of the leases or none, with the fences on which a majority agreed.
    pub(crate) async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Failure> {
        let sent = Instant::now();
        let needed = self.needed();
        let claims: Arc<[Claim]> = claims.into();
        let request = |it: Arc<Member>| {
            let claims = claims.clone();
            async move { it.node.acquire(&claims).await }
        };
        let mut votes = self.query(request, |it| it.is_decided(granted(it), needed)).await;
        if granted(&votes) < needed {
            self.release_granted(&claims, &votes).await;
            self.check(&mut votes)?;
            return Ok(refusal(&votes, needed));
        }
        let given = agreement(&claims, &votes);
        let fences: Arc<[u64]> = given.iter().map(|it| it.fence).collect();
        let raise = |it: Arc<Member>| {
            let (claims, fences) = (claims.clone(), fences.clone());
            async move { it.node.raise(&claims, &fences).await }
        };
        let raised = |votes: &Votes<bool>| votes.number(|it| *it);
        let mut written = self.query(raise, |it| it.is_decided(raised(it), needed)).await;
        if raised(&written) >= needed {
            return Ok(Taken::Granted(given));
        }
        self.release_granted(&claims, &votes).await;
        self.check(&mut written)?;
        // Those that have lost the lease since it was taken: to somebody who stole it, if it has not expired.
        match claims.iter().map(|it| it.ttl).min() {
            Some(ttl) if sent.elapsed() >= ttl => Err(Failure::silent("two rounds for a lease", ttl)),
            _ => Ok(Taken::Held { at: 0, free_in: None }),
        }
    }

    /// Releases what a refused request took. Waits for the servers that answered it. The others receive the release
    /// later.
    async fn release_granted(&self, claims: &[Claim], votes: &Votes<Taken>) {
        let releases: Arc<[Release]> =
            claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
        let ttl = claims.iter().map(|it| it.ttl).max().unwrap_or_default();
        let (mut granted, mut others) = (Vec::new(), Vec::new());
        for (member, answer) in self.0.iter().zip(&votes.answers) {
            let tasks = match answer {
                // It took nothing.
                Some(Taken::Held { .. }) => continue,
                Some(Taken::Granted(_)) => &mut granted,
                None => &mut others,
            };
            let (member, releases) = (member.clone(), releases.clone());
            tasks.push(tokio::spawn(async move {
                drop(member.release(&releases, ttl).await);
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

    pub(crate) async fn release(&self, releases: &[Release]) -> Result<Vec<Answer>, Failure> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let needed = self.needed();
        let releases: Arc<[Release]> = releases.into();
        let request = |it: Arc<Member>| {
            let releases = releases.clone();
            async move { it.release(&releases, it.node.terms.longest_ttl).await }
        };
        let is_done = |it: &Votes<Vec<Answer>>| all_are_clear(it, releases.len(), self.0.len());
        let mut votes = self.query(request, is_done).await;
        self.check(&mut votes)?;
        Ok((0..releases.len()).map(|at| released(&votes, at, needed)).collect())
    }

    pub(crate) async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>, Failure> {
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let needed = self.needed();
        let renewals: Arc<[Renewal]> = renewals.into();
        let request = |it: Arc<Member>| {
            let renewals = renewals.clone();
            async move { it.node.renew(&renewals).await }
        };
        let is_done = |it: &Votes<Vec<Answer>>| all_are_clear(it, renewals.len(), self.0.len());
        let mut votes = self.query(request, is_done).await;
        self.check(&mut votes)?;
        Ok((0..renewals.len()).map(|at| renewed(&votes, at, needed)).collect())
    }

    /// The held leases that the servers see.
    pub(crate) async fn seen<Fut>(&self, request: impl Fn(Arc<Member>) -> Fut) -> Result<Vec<LeaseRecord>, Failure>
    where
        Fut: Future<Output = Result<Vec<Seen>, Failure>> + Send + 'static,
    {
        let needed = self.needed();
        let mut votes = self.survey(request).await;
        self.check(&mut votes)?;
        let silent = votes.silent();
        let mut seen: Vec<Seen> = votes.answers.into_iter().flatten().flatten().collect();
        seen.sort_by(|a, b| (&a.record.info.key, a.record.token).cmp(&(&b.record.info.key, b.record.token)));
        let same = |a: &Seen, b: &Seen| (a.record.token, &a.record.info.key) == (b.record.token, &b.record.info.key);
        // What a majority holds, if the silent servers hold it, too.
        let held = seen.chunk_by(same).filter(|it| it.len() + silent >= needed);
        Ok(held.filter_map(|it| together(it, needed)).collect())
    }
}
