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

    /// How many servers have not answered. The others may have failed.
    pub(crate) fn silent(&self) -> usize {
        self.answers.len() - self.answered()
    }

    /// Whether a majority agrees, or no majority can agree any more and a majority has answered.
    pub(crate) fn is_decided(&self, agreeing: usize, needed: usize) -> bool {
        let open = self.silent() - self.failed;
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

/// The answer to the release at this place of the request. `Done` if a majority held the lease, or did so if the silent
/// servers held it, too. Whatever they answer, no majority holds it any more.
pub(crate) fn released(votes: &Votes<Vec<Answer>>, at: usize, needed: usize) -> Answer {
    let done = votes.number(|it| it[at] == Answer::Done);
    if done > 0 && done + votes.silent() >= needed { Answer::Done } else { Answer::Gone }
}

/// The answer to the renewal at this place of the request.
pub(crate) fn renewed(votes: &Votes<Vec<Answer>>, at: usize, needed: usize) -> Answer {
    let count = |what| votes.number(|it| it[at] == what);
    if count(Answer::Done) >= needed {
        Answer::Done
    } else if count(Answer::Gone) > votes.answers.len() - needed {
        Answer::Gone
    } else {
        // A majority may still hold it.
        Answer::Busy
    }
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

/// How many servers have granted the request.
pub(crate) fn granted(votes: &Votes<Taken>) -> usize {
    votes.number(|it| matches!(it, Taken::Granted(_)))
}

/// The answer to a refused request, for which this many grants are needed.
pub(crate) fn refusal(votes: &Votes<Taken>, needed: usize) -> Taken {
    let lacking = needed - granted(votes);
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use lockkit::{
        Fence,
        store::{LeaseInfo, Previous, Token},
    };

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Votes of servers: an answer, or `None` for one that has not answered. `failed` of these have failed.
    fn votes<T>(answers: Vec<Option<T>>, failed: usize) -> Votes<T> {
        Votes { answers, failed, failure: None }
    }

    #[test]
    fn a_round_is_decided_when_no_answer_can_change_it_and_a_majority_has_answered() {
        let answers = |answered: usize, failed| votes((0..5).map(|it| (it < answered).then_some(())).collect(), failed);
        let decided = |answered, agreeing, failed| answers(answered, failed).is_decided(agreeing, 3);
        assert!(decided(3, 3, 0) && decided(5, 4, 0), "a majority agrees");
        assert!(!decided(2, 2, 0) && !decided(3, 2, 0) && !decided(4, 2, 0), "another one may agree");
        assert!(decided(3, 0, 0) && decided(4, 1, 0) && decided(4, 2, 1), "no majority can agree any more");
        assert!(!decided(2, 0, 0) && !decided(2, 0, 3), "less than a majority has answered");
        assert!(!decided(3, 1, 0) && decided(3, 1, 1), "a server that failed will not agree");
    }

    #[test]
    fn a_silent_server_is_the_failure_that_counts() {
        let refused = || Failure::Foreign("?".to_owned());
        let mut votes = Votes::<()>::none(5);
        votes.count(0, Err(refused()));
        assert!(matches!(votes.failure, Some(Failure::Foreign(_))), "there is no other");
        votes.count(1, Err(Failure::silent("answering", SECOND)));
        votes.count(2, Err(refused()));
        votes.count(3, Ok(()));
        assert!(matches!(votes.failure, Some(Failure::Silent(_))));
        assert_eq!((votes.failed, votes.answered(), votes.silent()), (3, 1, 4));
    }

    #[test]
    fn releases_and_renewals_are_done_gone_or_unclear() {
        use Answer::{Done, Gone};
        // The answers of five servers, whether they are clear, and what they mean to a release and to a renewal.
        let cases = [
            ([Some(Done), Some(Done), Some(Done), None, None], true, Done, Done),
            ([Some(Gone), Some(Gone), Some(Gone), None, None], true, Gone, Gone),
            ([Some(Done), Some(Gone), Some(Gone), Some(Gone), None], true, Gone, Gone),
            ([Some(Done), Some(Gone), Some(Gone), None, None], false, Done, Answer::Busy),
            ([Some(Done), Some(Done), Some(Gone), Some(Gone), None], false, Done, Answer::Busy),
            ([Some(Gone), Some(Gone), None, None, None], false, Gone, Answer::Busy),
        ];
        for (answers, is_clear, release, renewal) in cases {
            // Beside a request that is clear at all times.
            let lists = |it: Answer| vec![if it == Done { Done } else { Gone }, it];
            let both = votes(answers.map(|it| it.map(lists)).to_vec(), 0);
            let alone = votes(answers.map(|it| it.map(|it| vec![it])).to_vec(), 0);
            assert_eq!(all_are_clear(&alone, 1, 5), is_clear, "{answers:?}");
            assert_eq!(all_are_clear(&both, 2, 5), is_clear, "{answers:?}");
            assert_eq!(released(&alone, 0, 3), release, "{answers:?}");
            assert_eq!(renewed(&alone, 0, 3), renewal, "{answers:?}");
        }
    }

    /// The answers of some servers. One more is silent.
    fn answered(answers: Vec<Taken>) -> Votes<Taken> {
        votes(answers.into_iter().map(Some).chain([None]).collect(), 0)
    }

    fn granted_with(fence: u64, is_agreed: bool, before: Option<u64>) -> Taken {
        let previous = before.map(|it| Previous::new("test", Fence::from(it), SECOND));
        Taken::Granted(vec![Given { fence, is_agreed, previous }])
    }

    fn held(seconds: Option<u32>, at: usize) -> Taken {
        Taken::Held { at, free_in: seconds.map(|it| SECOND * it) }
    }

    #[test]
    fn a_refusal_says_when_as_many_locks_as_are_needed_may_be_free() {
        let refused = |answers: Vec<Taken>| match refusal(&answered(answers), 3) {
            Taken::Held { at, free_in } => (at, free_in.map(|it| it.as_secs())),
            Taken::Granted(_) => panic!("it is refused"),
        };
        let ends = || vec![held(None, 4), held(Some(9), 3), held(Some(5), 2), held(Some(7), 1)];
        assert_eq!(refused(ends()), (3, Some(9)), "three are needed");
        let mut ends_with_grant = ends();
        ends_with_grant.push(granted_with(1, false, None));
        assert_eq!(refused(ends_with_grant), (1, Some(7)), "two are needed");
        assert_eq!(refused(vec![held(None, 4), held(Some(9), 3)]), (4, None), "one has not answered");
        assert_eq!(refused(Vec::new()), (0, None));
    }

    #[test]
    fn the_greatest_fence_is_agreed_on_unless_one_was_before() {
        let claims = [Claim::new("k", Token::random(), "test", SECOND)];
        let agreed = |answers| {
            let given = agreement(&claims, &answered(answers)).remove(0);
            (given.fence, given.previous.map(|it| it.fence.get()))
        };
        let new = vec![granted_with(7, false, Some(2)), granted_with(9, false, Some(3)), held(None, 0)];
        assert_eq!(agreed(new), (9, Some(3)));
        assert_eq!(agreed(vec![granted_with(7, true, None), granted_with(9, false, None)]), (7, None));
    }

    #[test]
    fn a_lease_is_held_until_less_than_a_majority_hold_it() {
        let seen = |fence, is_agreed, left: u32, renewals| {
            let mut info = LeaseInfo::new("k".into(), "test".to_owned(), Fence::from(fence), SystemTime::now());
            (info.expires_in, info.renewals) = (SECOND * left, renewals);
            Seen { record: LeaseRecord::new(Token::nobody(), info), is_agreed }
        };
        let lease = [seen(7, true, 5, 1), seen(9, false, 9, 3), seen(6, true, 7, 2)];
        let info = together(&lease, 2).expect("it is seen").info;
        assert_eq!((info.fence.get(), info.expires_in, info.renewals), (7, SECOND * 7, 3));
        assert!(together(&[], 2).is_none());
    }
}
