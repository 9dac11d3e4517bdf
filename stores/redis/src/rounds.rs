//! The operations of a quorum, each as one or two rounds of questions to all servers.
//!
//! Two majorities share one server, which may have the slowest clock. Each server's own fence would rise, and that of
//! the lease could fall. So the greatest fence of the majority is written to a majority before the grant.

use std::{sync::Arc, time::Duration};

use lockkit::store::{Answer, Claim, LeaseRecord, Release, Renewal, Token};
use tokio::time::timeout;

use crate::{
    ballot::{Ballot, GRACE, Member, Members},
    node::{Seen, Taken},
    tally::{agreement, all_are_clear, refusal, together},
    trouble::Trouble,
};

impl Members {
    /// Takes all of the leases or none, with the fences on which a majority agreed.
    pub(crate) async fn acquire(&self, claims: &[Claim]) -> Result<Taken, Trouble> {
        let needed = self.needed();
        let claims: Arc<[Claim]> = claims.into();
        let ask = |it: Arc<Member>| {
            let claims = claims.clone();
            async move { it.node.acquire(&claims).await }
        };
        let granted = |ballot: &Ballot<Taken>| ballot.number(|it| matches!(it, Taken::Granted(_)));
        let mut ballot = self.ask(ask, |it| it.is_decided(granted(it), needed)).await;
        if granted(&ballot) < needed {
            self.give_back(&claims, &ballot).await;
            self.check(&mut ballot)?;
            return Ok(refusal(&ballot, needed - granted(&ballot)));
        }
        let given = agreement(&claims, &ballot);
        let fences: Arc<[u64]> = given.iter().map(|it| it.fence).collect();
        let raise = |it: Arc<Member>| {
            let (claims, fences) = (claims.clone(), fences.clone());
            async move { it.node.raise(&claims, &fences).await }
        };
        let raised = |ballot: &Ballot<bool>| ballot.number(|it| *it);
        let mut written = self.ask(raise, |it| it.is_decided(raised(it), needed)).await;
        if raised(&written) >= needed {
            return Ok(Taken::Granted(given));
        }
        self.give_back(&claims, &ballot).await;
        self.check(&mut written)?;
        Ok(Taken::Held { at: 0, free_in: None })
    }

    /// Releases what a refused request took. Waits for the servers that answered it. The others hear of it later.
    async fn give_back(&self, claims: &[Claim], ballot: &Ballot<Taken>) {
        let releases: Arc<[Release]> =
            claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
        let ttl = claims.iter().map(|it| it.ttl).max().unwrap_or_default();
        let (mut granted, mut others) = (Vec::new(), Vec::new());
        for (member, answer) in self.0.iter().zip(&ballot.answers) {
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

    pub(crate) async fn release(&self, releases: &[Release]) -> Result<Vec<Answer>, Trouble> {
        if releases.is_empty() {
            return Ok(Vec::new());
        }
        let needed = self.needed();
        let releases: Arc<[Release]> = releases.into();
        // The same on all servers, so that a majority has it.
        let nobody: Arc<[Token]> = releases.iter().map(|_| Token::nobody()).collect();
        let ask = |it: Arc<Member>| {
            let (releases, nobody) = (releases.clone(), nobody.clone());
            async move { it.release(&releases, &nobody, it.node.terms.longest_ttl).await }
        };
        let is_done = |it: &Ballot<Vec<Answer>>| all_are_clear(it, releases.len(), self.0.len());
        let mut ballot = self.ask(ask, is_done).await;
        self.check(&mut ballot)?;
        let count = |at: usize, what| ballot.number(|it| it[at] == what);
        let silent = self.0.len() - ballot.answered();
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

    pub(crate) async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>, Trouble> {
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let needed = self.needed();
        let renewals: Arc<[Renewal]> = renewals.into();
        let ask = |it: Arc<Member>| {
            let renewals = renewals.clone();
            async move { it.node.renew(&renewals).await }
        };
        let is_done = |it: &Ballot<Vec<Answer>>| all_are_clear(it, renewals.len(), self.0.len());
        let mut ballot = self.ask(ask, is_done).await;
        self.check(&mut ballot)?;
        let answer = |at: usize| {
            let count = |what| ballot.number(|it| it[at] == what);
            if count(Answer::Done) >= needed {
                Answer::Done
            } else if count(Answer::Gone) > self.0.len() - needed {
                Answer::Gone
            } else {
                // A majority may still hold it.
                Answer::Busy
            }
        };
        Ok((0..renewals.len()).map(answer).collect())
    }

    /// The held leases that the servers see.
    pub(crate) async fn seen<Fut>(&self, question: impl Fn(Arc<Member>) -> Fut) -> Result<Vec<LeaseRecord>, Trouble>
    where
        Fut: Future<Output = Result<Vec<Seen>, Trouble>> + Send + 'static,
    {
        let needed = self.needed();
        let mut ballot = self.survey(question).await;
        self.check(&mut ballot)?;
        let silent = self.0.len() - ballot.answered();
        let mut seen: Vec<Seen> = ballot.answers.into_iter().flatten().flatten().collect();
        seen.sort_by(|a, b| (&a.record.info.key, a.record.token).cmp(&(&b.record.info.key, b.record.token)));
        let same = |a: &Seen, b: &Seen| (a.record.token, &a.record.info.key) == (b.record.token, &b.record.info.key);
        // What a majority holds, if the silent servers hold it, too.
        let held = seen.chunk_by(same).filter(|it| it.len() + silent >= needed);
        Ok(held.filter_map(|it| together(it, needed)).collect())
    }
}
