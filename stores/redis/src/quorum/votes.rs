//! The votes of the servers of a quorum: their answers, counted, and what they mean together. Pure: no I/O.

use std::time::Duration;

use lockkit::store::{Answer, Claim, LeaseRecord};

use crate::{
    claim::{Given, Taken},
    error::Failure,
    look::Seen,
};

/// The answers so far: one place for each server. `None` without an answer.
#[derive(Debug)]
pub(crate) struct Votes<T> {
    pub(crate) answers: Vec<Option<T>>,
    /// How many servers failed.
    failed: usize,
    /// The error of one of them.
    pub(crate) failure: Option<Failure>,
}

impl<T> Votes<T> {
    /// No answer yet from so many servers.
    pub(crate) fn none(servers: usize) -> Self {
        Self { answers: (0..servers).map(|_| None).collect(), failed: 0, failure: None }
    }

    pub(crate) fn answered(&self) -> usize {
        self.answers.iter().flatten().count()
    }

    /// Whether a majority agrees, or no majority can agree any more and a majority has answered.
    pub(crate) fn is_decided(&self, agreeing: usize, needed: usize) -> bool {
        let open = self.answers.len() - self.answered() - self.failed;
        agreeing >= needed || agreeing + open < needed && self.answered() >= needed
    }

    pub(crate) fn number(&self, is: impl Fn(&T) -> bool) -> usize {
        self.answers.iter().flatten().filter(|it| is(it)).count()
    }

    pub(crate) fn count(&mut self, at: usize, answer: Result<T, Failure>) {
        match answer {
            Ok(answer) => self.answers[at] = Some(answer),
            Err(failure) => {
                self.failed += 1;
                // A silent server may answer later. That is what waiting requests need to know.
                if self.failure.is_none() || matches!(failure, Failure::Silent(_)) {
                    self.failure = Some(failure);
                }
            }
        }
    }
}

/// One lease, as several servers see it.
pub(crate) fn together(seen: &[Seen], needed: usize) -> Option<LeaseRecord> {
    let known = seen.iter().max_by_key(|it| (it.is_agreed, it.record.info.fence))?;
    let mut record = known.record.clone();
    let mut left: Vec<_> = seen.iter().map(|it| it.record.info.expires_in).collect();
    left.sort_unstable();
    // It is held until less than a majority hold it.
    record.info.expires_in = left[left.len().saturating_sub(needed)];
    record.info.renewals = seen.iter().map(|it| it.record.info.renewals).max()?;
    Some(record)
}

/// Whether further answers change nothing: each request is done by a majority, or by so few that no majority is left.
pub(crate) fn all_are_clear(votes: &Votes<Vec<Answer>>, requests: usize, nodes: usize) -> bool {
    let needed = nodes / 2 + 1;
    (0..requests).all(|at| {
        let count = |what| votes.number(|it| it[at] == what);
        count(Answer::Done) >= needed || count(Answer::Gone) > nodes - needed
    })
}

/// The fences of a majority's grants, and who held the leases before.
pub(crate) fn agreement(claims: &[Claim], votes: &Votes<Taken>) -> Vec<Given> {
    let grants =
        || votes.answers.iter().flatten().filter_map(|it| if let Taken::Granted(it) = it { Some(it) } else { None });
    let of_claim = |at: usize| {
        let given = || grants().map(move |it| &it[at]);
        // A repeated claim has a fence that was agreed on before.
        let agreed = given().filter(|it| it.is_agreed).map(|it| it.fence).max();
        let fence = agreed.or_else(|| given().map(|it| it.fence).max()).unwrap_or(0);
        let previous = given().filter_map(|it| it.previous.clone()).max_by_key(|it| it.fence);
        Given { fence, is_agreed: true, previous }
    };
    (0..claims.len()).map(of_claim).collect()
}

/// The answer to a refused request that lacks this many grants.
pub(crate) fn refusal(votes: &Votes<Taken>, lacking: usize) -> Taken {
    let mut held: Vec<(Option<Duration>, usize)> = Vec::new();
    for answer in votes.answers.iter().flatten() {
        if let Taken::Held { at, free_in } = answer {
            held.push((*free_in, *at));
        }
    }
    // Those without a known end last.
    held.sort_unstable_by_key(|(free_in, _)| free_in.unwrap_or(Duration::MAX));
    let (free_in, at) = held.get(lacking.saturating_sub(1)).or(held.last()).copied().unwrap_or((None, 0));
    Taken::Held { at, free_in }
}
