//! The end of a wait without success: whether another holder has the lease, or what else was the case.
//!
//! `Contended` decides whether a job is skipped, so it needs an answer of the store, perhaps to a caller before this
//! one in the same process, or a trusted holder in this process. It may not stand for a store that did not answer: a
//! job would be skipped that nobody runs. No such answer are a leftover of this process
//! ([`leftovers`](crate::lease::leftovers)), and the error of a claim that did not get SQLite's one lock for writers,
//! which may be the caller's own. A row that another transaction has locked is one, and so is a statement of the
//! waiting loop that another transaction undid, unless a leftover may be that transaction: then only a visible holder
//! is an answer.

use std::{error::Error as StdError, iter::successors, time::Duration};

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{
    LeaseRequest,
    mode::{MAX_PERMITS, Mode},
    pending::Pending,
    shared::number,
};
use crate::{
    lease::{
        bounded::{is_silence, limit_for},
        leftovers::{GONE_LASTS, Keys, Left},
        queue::wait::{FIRST_ANSWER, Outcome, Refused},
        store::{BUSY_PAUSE, LeaseRecord, LeaseStore},
    },
    value::{
        error::{Error, Fault, Result},
        holder::Holder,
        token::Token,
    },
};

/// The reason where a lease is refused and no other holder is visible.
#[derive(Debug, thiserror::Error)]
#[error(
    "nobody else is seen to hold it: an earlier call of this process, which got no answer or whose caller has gone, \
     may have the lease, or its row locked"
)]
struct MayBeOurs;

/// What lockkit does in a request.
const ACQUIRING: &str = "acquiring lease";

/// Time limit of the query for the holder after the wait has ended, and of a wait for what is left before the next
/// question.
const QUICK: Duration = BUSY_PAUSE.saturating_mul(5);

/// A request asks again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Again {
    /// Until this time at the latest.
    until: Instant,
    /// What was left when it began to: that may be in its way, and be gone when it is refused.
    left: Left,
}

/// The result of the last query for the holder.
enum Look {
    /// By another one than this process, as far as it knows.
    Held(LeaseRecord),
    Free,
    /// Another transaction undid the query.
    Undone,
    Failed(Error),
    Silent,
}

/// The result of an attempt. An error after which another attempt may help is no answer. If another transaction undid a
/// statement of the attempt, this is a refusal: others ask for the lease at this moment.
pub(super) fn understood<S: LeaseStore, T>(pending: &Pending<S>, outcome: Result<Outcome<T>>) -> Result<Outcome<T>> {
    let answer = match outcome {
        Err(err) if is_silence(&err) => {
            pending.set_silence_reason(Some(err));
            return Ok(Outcome::Silent);
        }
        Ok(Outcome::Silent) => return Ok(Outcome::Silent),
        Err(err) if err.is_transient() => Ok(Outcome::Held { free_in: None }),
        answer => answer,
    };
    pending.set_silence_reason(None);
    answer
}

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Releases what a request took that waited without success, and returns the reason. [`Error::Contended`] only if
    /// an answer of the store said that another holder has the lease, and the store has not been away since, or a
    /// trusted holder of this process has it.
    ///
    /// `Ok`: ask again, because nobody is seen to hold it. A caller before this one has just sent its first claim, or
    /// has got what others may have, too; or what was left of this process was in the way, and is gone. A request that
    /// asks `again` does so until this time at the latest, and where something else was left meanwhile.
    pub(super) async fn refusal(
        &self,
        pending: &Pending<S>,
        started: Instant,
        refused: Refused,
        again: Option<Again>,
    ) -> Result<Again> {
        // What a caller before this one was told may have been asked before this one came.
        let since = match refused {
            Refused::NotFirst { .. } => started.checked_sub(GONE_LASTS).unwrap_or(started),
            Refused::Held | Refused::NoAnswer => started,
        };
        let left = self.left(since, again);
        // What the request itself took is in nobody's way but that of others.
        let own = pending.release().await;
        let left_until_now = || left.max(self.left_but(&own, since));
        let waited = started.elapsed();
        let in_the_way = pending.in_the_way();
        let answered = match refused {
            Refused::Held => true,
            Refused::NotFirst { answered } => answered,
            Refused::NoAnswer => in_the_way.is_some(),
        };
        // The last query for the holder. A caller that never asked the store gives it the time of a first answer.
        let asked = Instant::now();
        let is_known = answered && left == Left::Nothing;
        let limit = match refused {
            Refused::NotFirst { .. } => FIRST_ANSWER,
            Refused::Held if !is_known => FIRST_ANSWER,
            Refused::Held | Refused::NoAnswer => QUICK,
        };
        let look = match timeout(limit, self.current_holder(pending, refused, &left_until_now)).await {
            Ok(Ok(Some(held))) => Look::Held(held),
            Ok(Ok(None)) => Look::Free,
            Ok(Err(err)) if err.is_transient() => Look::Undone,
            Ok(Err(err)) => Look::Failed(err),
            Err(_) => Look::Silent,
        };
        // What was on its way may have become late meanwhile, and what was known to be absent may have arrived.
        let left = left_until_now();
        let was_answered = matches!(look, Look::Held(_) | Look::Free | Look::Undone);
        // Who held it before an outage may be long gone.
        let is_away = self.inner.store().unreachable_for().is_some_and(|it| it >= FIRST_ANSWER);
        let answered = answered && (was_answered || !is_away);
        let is_known = is_known && answered;
        let may_be_ours = left > if again.is_some() && was_answered { Left::Absent } else { Left::Nothing };
        let until = again.map_or_else(|| Instant::now() + FIRST_ANSWER, |it| it.until);
        let (key, holder) = match look {
            Look::Held(held) => {
                self.inner.leftovers.absent(&held.info.key, asked);
                (Some(held.info.key.clone()), Some(self.inner.shown(held).into()))
            }
            Look::Failed(err) if !is_known => return Err(err),
            Look::Free | Look::Undone if again.is_none() && refused == (Refused::NotFirst { answered: false }) => {
                if may_be_ours {
                    self.are_gone_by(until).await;
                }
                return Ok(Again { until, left: self.left_now() });
            }
            _ if may_be_ours && answered && refused != Refused::NoAnswer => {
                if (again.is_none() || was_answered) && self.are_gone_by(until).await {
                    return Ok(Again { until, left: self.left_now() });
                }
                return Err(Error::database(ACQUIRING, self.keys().first(), Fault::Unavailable, MayBeOurs));
            }
            _ if may_be_ours || !answered => return Err(self.silence(pending).await),
            Look::Failed(err) => (in_the_way, Some(Holder::Unknown(reason(&err)))),
            Look::Free | Look::Undone | Look::Silent => (in_the_way, None),
        };
        let is_of_several = matches!(self.mode, Mode::All(_) | Mode::Any(_));
        let key = key.filter(|_| is_of_several).unwrap_or_else(|| self.key.clone());
        Err(Error::Contended { key, waited, holder: holder.map(Box::new) })
    }

    /// Whether what this process had left is gone by this time, or may be though nothing will tell: the holder of a
    /// lease that is lost may keep it.
    async fn are_gone_by(&self, until: Instant) -> bool {
        let now = Instant::now();
        let are_gone = self.inner.leftovers.until(|| self.left_now() != Left::Perhaps);
        if now >= until || timeout_at(until.min(now + QUICK), are_gone).await.is_err() && Instant::now() >= until {
            return false;
        }
        if self.left_now() == Left::Unseen {
            sleep(BUSY_PAUSE).await;
        }
        true
    }

    /// What this process may have left of what the request needs, also what is gone since this time, and what was left
    /// when it began to ask again.
    pub(super) fn left(&self, since: Instant, again: Option<Again>) -> Left {
        self.left_but(&[], since).max(again.map_or(Left::Nothing, |it| it.left))
    }

    fn left_now(&self) -> Left {
        self.left_but(&[], Instant::now())
    }

    fn left_but(&self, own: &[Token], since: Instant) -> Left {
        let of = |keys| self.inner.leftovers.of(keys, since, own);
        match &self.mode {
            Mode::Exclusive | Mode::All(_) | Mode::Any(_) => of(Keys::These(self.keys())),
            Mode::Permit(_) | Mode::Permits { .. } => of(Keys::Below(&self.permits())),
            Mode::Read => of(Keys::These(&[self.writer()])),
            Mode::Write => of(Keys::These(&[self.writer()])).max(of(Keys::Below(&self.readers()))),
            Mode::NoPermits => Left::Nothing,
        }
    }

    /// The reason why no answer came.
    pub(super) async fn silence(&self, pending: &Pending<S>) -> Error {
        if let Some(err) = pending.take_silence_reason() {
            return err;
        }
        let key = self.keys().first().unwrap_or(&self.key);
        self.inner.store().silence(ACQUIRING, Some(key)).await
    }

    /// The error of the request. An error of the store that names no lease, such as that of a list, names the
    /// request's.
    pub(super) fn named(&self, err: Error) -> Error {
        match err {
            Error::Database { key: None, fault, source, doing: _ } => {
                Error::Database { doing: ACQUIRING, key: Some(self.key.clone()), fault, source }
            }
            err => err,
        }
    }

    /// The current holder of the requested lease, who is no leftover of this process. Where something is `left` when it
    /// is seen, no request of this process that waits counts either. Where the store has not refused the request, or
    /// something is left, only holders count who leave too few permits.
    async fn current_holder(
        &self,
        pending: &Pending<S>,
        refused: Refused,
        left: &(dyn Fn() -> Left + Sync),
    ) -> Result<Option<LeaseRecord>> {
        let (store, limit) = (self.inner.store(), limit_for(self.ttl));
        let is_other = |it: &LeaseRecord| {
            let is_leftover = self.inner.leftovers.recognises(&it.info.key, it.token);
            let waits = || self.inner.keeper.kept(it.token).is_some_and(|it| !it.is_delivered());
            // Few are, and what is left is looked for among all keys.
            !(is_leftover || waits() && left() > Left::Nothing)
        };
        // The last one of so many holders, so that nobody is named if there are fewer.
        let of_permits = async |of: u32, least: u32| {
            let prefix = self.permits();
            let mut others = self.list(&prefix, MAX_PERMITS).await?;
            others.retain(|it| number(&it.info.key, &prefix, of).is_some() && is_other(it));
            let least = if refused == Refused::Held && left() == Left::Nothing { 1 } else { least };
            Ok::<_, Error>(others.into_iter().nth(usize::try_from(least - 1).unwrap_or(usize::MAX)))
        };
        Ok(match &self.mode {
            Mode::Exclusive => store.look(&self.key, limit).await?.filter(is_other),
            Mode::All(keys) => {
                for key in pending.in_the_way().iter().chain(keys) {
                    if let Some(held) = store.look(key, limit).await?.filter(is_other) {
                        return Ok(Some(held));
                    }
                }
                None
            }
            Mode::Any(keys) => {
                let (free, held) = self.first_free(keys, keys).await?;
                // One that is free, or may be, is in nobody's way.
                let are_held = free.is_none() && held.iter().all(is_other);
                held.into_iter().filter(|_| are_held).min_by_key(|it| it.info.expires_in)
            }
            Mode::Permit(of) => of_permits(*of, *of).await?,
            Mode::Permits { of, take } => of_permits(*of, of.saturating_sub(*take) + 1).await?,
            Mode::NoPermits => None,
            Mode::Read => store.look(&self.writer(), limit).await?.filter(is_other),
            Mode::Write => match self.list(&self.readers(), MAX_PERMITS).await?.into_iter().find(is_other) {
                Some(reader) => Some(reader),
                None => store.look(&self.writer(), limit).await?.filter(is_other),
            },
        })
    }

    /// The held leases whose key starts with `prefix`, in the time of an answer about the requested lease.
    pub(super) async fn list(&self, prefix: &str, most: u32) -> Result<Vec<LeaseRecord>> {
        self.inner.store().list(prefix, most, limit_for(self.ttl)).await
    }
}

/// Why a store did not say who holds a lease: the sources of its error.
fn reason(err: &Error) -> String {
    let sources: Vec<_> = successors(err.source(), |it| (**it).source()).map(ToString::to_string).collect();
    if sources.is_empty() { err.to_string() } else { sources.join(": ") }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use tokio::time::Instant;

    use super::{FIRST_ANSWER, QUICK};
    use crate::{
        Error, Fault, Key, LeaseRequest, LeaseStore, Leases,
        lease::{
            queue::wait::Outcome,
            request::{pending::Pending, refused::understood},
            store::{Acquired, Claim, LeaseRecord, Profile, pass_on},
        },
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
        value::token::Token,
    };

    const SECOND: Duration = Duration::from_secs(1);

    fn leases() -> Leases<MemoryStore> {
        Leases::new(MemoryStore::new())
    }

    #[track_caller]
    fn assert_unanswered<T: std::fmt::Debug>(acquired: Result<T, Error>) {
        let err = acquired.unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
        assert!(err.key().is_some_and(|it| it.starts_with('k')), "{err:?}");
    }

    #[tokio::test]
    async fn an_answer_ends_the_reason_of_a_silence() {
        let pending = Pending::<MemoryStore>::default();
        let silent = || {
            understood::<_, ()>(&pending, Err(failed(Fault::Contended))).unwrap();
            understood::<_, ()>(&pending, Ok(Outcome::Silent)).unwrap();
        };
        silent();
        assert!(pending.take_silence_reason().is_some());
        let answers = [Ok(Outcome::Held { free_in: None }), Ok(Outcome::Done(())), Err(failed(Fault::Serialization))];
        for answer in answers {
            silent();
            understood(&pending, answer).unwrap();
            assert!(pending.take_silence_reason().is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_no_claim_is_answered_nobody_is_said_to_hold_the_lease() {
        for wait in [Duration::ZERO, SECOND / 3, 2 * SECOND, 20 * SECOND] {
            let leases = leases();
            leases.store().faults().script(Operation::Acquire, [Failure::Silent; 1000]);
            assert_unanswered(leases.lease("k").wait(wait).acquire().await);
            assert_unanswered(leases.lease("k").fair().wait(wait).acquire().await);
            assert_unanswered(leases.all(["k", "k2"]).wait(wait).acquire().await);
            assert_unanswered(leases.semaphore("k", 2).wait(wait).acquire().await);
            assert_unanswered(leases.semaphore("k", 2).take(2).wait(wait).acquire().await);
            assert_unanswered(leases.rw("k").read().wait(wait).acquire().await);
            assert_unanswered(leases.rw("k").write().wait(wait).acquire().await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_no_claim_is_answered_the_callers_behind_are_told_the_same() {
        let leases = leases();
        leases.store().faults().script(Operation::Acquire, [Failure::Silent; 1000]);
        let first = leases.lease("k").wait(20 * SECOND).acquire();
        let second = async {
            tokio::task::yield_now().await;
            leases.lease("k").wait(SECOND).acquire().await
        };
        let (first, second) = tokio::join!(first, second);
        assert_unanswered(first);
        assert_unanswered(second);
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_that_came_too_late_is_no_sign_of_another_holder() {
        let ttl = SECOND * 3 / 10;
        for wait in [Duration::ZERO, 2 * SECOND] {
            let leases = Leases::builder(MemoryStore::new()).ttl(ttl).build().unwrap();
            leases.store().faults().script(Operation::Acquire, [Failure::Slow(ttl + ttl / 3); 1000]);
            assert_unanswered(leases.lease("k").wait(wait).acquire().await);
            assert_unanswered(leases.all(["k", "k2"]).wait(wait).acquire().await);
            assert_unanswered(leases.rw("k").write().wait(wait).acquire().await);
            assert_unanswered(leases.lease("k").try_acquire().await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_unanswered_claim_may_have_locked_is_no_sign_of_another_holder() {
        let here = Leases::new(Scripted::new(Profile::default()));
        let there = Leases::new(here.store().clone());
        // As a row that a claim in COMMIT has locked.
        let locked = || here.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
        let free = || here.store().free(Call::Acquire);
        locked();
        assert!(here.lease("k").wait(SECOND).acquire().await.unwrap_err().is_contended(), "each claim was answered");
        free();
        here.store().store.faults().script(Operation::Acquire, [Failure::Refused]);
        assert_unanswered(here.lease("k").try_acquire().await);
        locked();
        assert_unanswered(here.lease("k").try_acquire().await);
        for wait in [Duration::ZERO, SECOND] {
            let (first, second) = (here.lease("k").wait(wait).acquire(), here.lease("k").wait(wait).acquire());
            let (first, second) = tokio::join!(first, second);
            assert_unanswered(first);
            assert_unanswered(second);
        }
        // Another holder is seen, so that claim is not in the store any more.
        free();
        tokio::time::sleep(Duration::from_millis(1)).await;
        let lease = there.lease("k").acquire().await.unwrap();
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        lease.release().await.unwrap();
        locked();
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        // Its release has found it.
        free();
        here.store().fail(Call::Acquire, [failed(Fault::Unavailable)]);
        assert_unanswered(here.lease("k").try_acquire().await);
        tokio::time::sleep(SECOND).await;
        locked();
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_arrives_after_a_later_one_was_granted_is_no_other_holder() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        let faults = leases.store().store.faults();
        faults.script(Operation::Acquire, [Failure::Refused]);
        assert_unanswered(leases.lease("k").try_acquire().await);
        let late = leases.store().claims().remove(0);
        drop(leases.lease("k").acquire().await.unwrap());
        tokio::time::sleep(SECOND).await;
        assert_eq!(faults.calls(Operation::Release), 2);
        assert!(matches!(leases.store().store.lease_acquire(&late).await.unwrap(), Acquired::Granted(_)));
        assert_unanswered(leases.lease("k").try_acquire().await);
        assert_unanswered(leases.lease("k").wait(SECOND).acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_has_no_answer_yet_is_no_sign_of_another_holder() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().store.faults().script(Operation::Acquire, [Failure::Slow(3 * SECOND)]);
        assert_unanswered(leases.lease("k").wait(Duration::ZERO).acquire().await);
        leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
        assert_unanswered(leases.lease("k").try_acquire().await);
        leases.store().free(Call::Acquire);
        // It was granted, and given back a while ago.
        tokio::time::sleep(6 * SECOND).await;
        leases.store().fail(Call::Acquire, [failed(Fault::Serialization)]);
        assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_becomes_late_at_the_end_of_a_wait_is_no_other_holder() {
        for fair in [false, true] {
            let leases = leases();
            let (millis, faults) = (Duration::from_millis, leases.store().faults());
            // Granted after 400 ms, and answered after 800 ms.
            faults.script(Operation::Acquire, [Failure::Slow(millis(800))]);
            let first = tokio::spawn(leases.all(["k", "k2"]).acquire());
            tokio::time::sleep(millis(475)).await;
            faults.script(Operation::Look, [Failure::Silent]);
            // It becomes late during the last look, or before, while the request gives back its ticket.
            faults.script(Operation::Release, [Failure::Slow(QUICK)]);
            let request = if fair { leases.lease("k").fair() } else { leases.lease("k") };
            let err = request.wait(Duration::ZERO).acquire().await.unwrap_err();
            assert!(matches!(err, Error::Contended { holder: Some(_), .. }), "it asks until somebody has it: {err:?}");
            drop(first.await.unwrap().unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_takes_longer_than_that_is_an_answer() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store));
        let _lease = there.lease("k").acquire().await.unwrap();
        here.store().faults().slow(FIRST_ANSWER + QUICK);
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        let err = here.lease("k").wait(2 * SECOND).acquire().await.unwrap_err();
        assert!(err.is_contended(), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_goes_while_a_request_asks_again_is_no_other_holder() {
        for never_was in [false, true] {
            let leases = Leases::new(Scripted::new(Profile::default()));
            let (key, token, leftovers) = (Key::from("k"), Token::random(), &leases.0.leftovers);
            leftovers.note(&key, token);
            leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
            let goes = async {
                // Its second claim is on its way.
                tokio::time::sleep(QUICK + Duration::from_millis(7)).await;
                assert_eq!(leases.store().calls(Call::Acquire), 2);
                if never_was {
                    leftovers.never_were(&key, token);
                } else {
                    leftovers.released(&key, token, true);
                }
                leases.store().free(Call::Acquire);
            };
            let (acquired, ()) = tokio::join!(leases.lease("k").try_acquire(), goes);
            assert!(acquired.unwrap().is_some());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_gone_is_no_other_holder_to_a_caller_behind_who_came_later() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        let millis = Duration::from_millis;
        leases.store().store.faults().script(Operation::Acquire, [Failure::AnswerLost]);
        leases.store().store.faults().script(Operation::Release, [Failure::Slow(millis(2))]);
        assert_unanswered(leases.lease("k").try_acquire().await);
        // As a row that this claim has locked. The refusal takes 5 ms.
        leases.store().fail(Call::Acquire, [failed(Fault::Serialization)]);
        let first = tokio::spawn(leases.lease("k").acquire());
        tokio::time::sleep(millis(3)).await;
        assert_eq!(leases.show("k").await.unwrap(), None, "it is gone");
        leases.store().store.faults().script(Operation::Acquire, [Failure::Slow(millis(400))]);
        let second = tokio::spawn(leases.lease("k").wait(millis(100)).acquire());
        let _lease = first.await.unwrap().unwrap();
        let err = second.await.unwrap().unwrap_err();
        assert!(matches!(err, Error::Contended { holder: Some(_), .. }), "it asks until somebody has it: {err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_from_before_an_outage_is_no_answer() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store));
        let _lease = there.lease("k").acquire().await.unwrap();
        let _permit = there.semaphore("k", 1).acquire().await.unwrap();
        let faults = here.store().faults();
        let mut asking = Vec::new();
        for _ in 0..2 {
            for request in [here.lease("k").fair(), here.semaphore("k", 1)] {
                asking.push(tokio::spawn(request.wait(20 * SECOND).acquire()));
            }
        }
        tokio::time::sleep(SECOND).await;
        faults.pause();
        for asked in asking {
            assert_unanswered(asked.await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_slow_or_fails_once_after_its_answer_is_not_away() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store));
        let _lease = there.lease("k").acquire().await.unwrap();
        here.store().faults().script(Operation::List, [Failure::None, Failure::Refused]);
        let _permit = there.semaphore("k", 1).acquire().await.unwrap();
        let err = here.semaphore("k", 1).wait(SECOND / 1000).acquire().await.unwrap_err();
        let Error::Contended { holder: Some(holder), .. } = err else { panic!("{err:?}") };
        assert!(holder.as_lease().is_none(), "unknown: {holder}");
        // The deadline cuts off an attempt of several calls, and the last look has no time.
        here.store().faults().slow(SECOND / 5);
        let err = here.lease("k").wait(SECOND).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Contended { .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn where_the_leases_were_closed_meanwhile_no_holder_is_named() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store));
        let _lease = there.lease("k").acquire().await.unwrap();
        here.store().faults().script(Operation::Acquire, [Failure::Silent]);
        let first = tokio::spawn(here.lease("k").acquire());
        tokio::task::yield_now().await;
        let second = tokio::spawn(here.lease("k").wait(SECOND).acquire());
        tokio::task::yield_now().await;
        _ = here.close().await;
        for closed in [second, first] {
            assert!(matches!(closed.await.unwrap(), Err(Error::Closed { .. })));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_claim_of_an_earlier_request_is_no_other_holder() {
        let leases = leases();
        leases.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
        leases.store().faults().script(Operation::Release, [Failure::Refused; 1000]);
        assert_unanswered(leases.lease("k").try_acquire().await);
        assert_unanswered(leases.lease("k").try_acquire().await);
        assert_unanswered(leases.lease("k").wait(SECOND).acquire().await);
        // It expires.
        drop(leases.lease("k").wait(60 * SECOND).acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_claim_of_a_permit_a_reader_or_a_writer_is_no_other_holder() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        here.store().faults().script(Operation::Release, [Failure::Refused; 1000]);
        let lost = || here.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
        lost();
        assert_unanswered(here.semaphore("k", 3).try_acquire().await);
        let _others = there.semaphore("k", 3).take(2).acquire().await.unwrap();
        assert_unanswered(here.semaphore("k", 3).wait(SECOND).acquire().await);
        assert!(here.semaphore("k", 3).take(2).try_acquire().await.unwrap().is_none(), "others have two of three");

        lost();
        assert_unanswered(here.rw("k1").read().try_acquire().await);
        assert_unanswered(here.rw("k1").write().try_acquire().await);
        assert_unanswered(here.rw("k1").write().wait(SECOND).acquire().await);
        let _reader = there.rw("k2").read().acquire().await.unwrap();
        lost();
        assert_unanswered(here.rw("k2").read().try_acquire().await);
        let err = here.rw("k2").write().wait(SECOND).acquire().await.unwrap_err();
        assert!(err.is_contended(), "{err:?}");

        lost();
        assert_unanswered(here.rw("k3").write().try_acquire().await);
        assert_unanswered(here.rw("k3").read().try_acquire().await);
        assert_unanswered(here.rw("k3").read().wait(SECOND).acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn where_one_of_several_is_held_by_another_it_is_refused_and_where_any_may_be_free_it_is_not() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        here.store().faults().script(Operation::Release, [Failure::Refused; 1000]);
        here.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
        assert_unanswered(here.lease("k1").try_acquire().await);
        let other = there.lease("k2").acquire().await.unwrap();
        assert!(here.all(["k1", "k2"]).try_acquire().await.unwrap().is_none());
        assert_unanswered(here.any(["k1", "k2"]).try_acquire().await);
        other.release().await.unwrap();
        assert_unanswered(here.all(["k1", "k2"]).try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn where_the_lease_is_held_the_callers_behind_are_told_by_whom() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let lease = here.lease("k").acquire().await.unwrap();
        let first = there.lease("k").wait(20 * SECOND).acquire();
        let second = there.lease("k").wait(SECOND).acquire();
        let (first, second) = tokio::join!(first, second);
        for err in [first.unwrap_err(), second.unwrap_err()] {
            let Error::Contended { holder: Some(holder), .. } = err else { panic!("{err:?}") };
            assert_eq!(holder.as_lease().map(|it| it.fence), Some(lease.fence()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_all_permits_are_held_or_others_read_a_caller_is_told_by_whom() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let permit = here.semaphore("k", 1).acquire().await.unwrap();
        let reader = here.rw("k").read().acquire().await.unwrap();
        let (permits, writing) = (there.semaphore("k", 1).wait(SECOND), there.rw("k").write().wait(SECOND));
        for (request, holds) in [(permits, permit), (writing, reader)] {
            let err = request.acquire().await.unwrap_err();
            let Error::Contended { holder: Some(holder), .. } = err else { panic!("{err:?}") };
            assert_eq!(holder.as_lease().map(|it| it.fence), Some(holds.fence()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_of_a_request_names_its_key_whatever_it_was_doing() {
        let leases = leases();
        leases.store().faults().script(Operation::List, [Failure::Refused; 10]);
        for err in [
            leases.lease("k").fair().acquire().await.unwrap_err(),
            leases.rw("k").write().acquire().await.unwrap_err(),
            leases.semaphore("k", 2).take(2).acquire().await.unwrap_err(),
            leases.lease("k").fair().try_acquire().await.unwrap_err(),
        ] {
            assert_eq!(err.to_string(), "database error while acquiring lease `k`");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_error_of_the_last_look_is_the_reason_where_nothing_else_was_answered_and_only_there() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        // A caller that never asked, behind one without an answer.
        leases.store().store.faults().script(Operation::Acquire, [Failure::Silent]);
        let first = tokio::spawn(leases.lease("k").wait(20 * SECOND).acquire());
        tokio::task::yield_now().await;
        leases.store().fail(Call::Look, [failed(Fault::Other)]);
        let err = leases.lease("k").wait(SECOND).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Other, .. }), "{err:?}");
        let lease = first.await.unwrap().unwrap();
        // The claim was answered: another holder has the lease.
        let there = Leases::new(leases.store().clone());
        leases.store().fail(Call::Look, [failed(Fault::Other)]);
        let err = there.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
        let Error::Contended { holder: Some(holder), .. } = err else { panic!("{err:?}") };
        assert_eq!(holder.to_string(), "as scripted");
        drop(lease);
        // It was answered, and what is left of this process may have the lease.
        there.store().fail(Call::Acquire, [failed(Fault::Unavailable), failed(Fault::Serialization)]);
        assert_unanswered(there.lease("k").try_acquire().await);
        there.store().fail(Call::Look, [failed(Fault::Other)]);
        let err = there.lease("k").try_acquire().await.unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Other, .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_asks_again_while_something_new_of_this_process_is_in_its_way_each_time_but_not_for_ever() {
        let (leases, key, millis) = (leases(), Key::from("k"), Duration::from_millis);
        let (store, leftovers) = (leases.store().client(), &leases.lease("k").inner.leftovers);
        leases.store().faults().slow(millis(5));
        let asked = async |most: u32| {
            let leaving = async {
                for _ in 0..most {
                    let token = Token::random();
                    leftovers.note(&key, token);
                    let claim =
                        Claim { key: key.clone(), token, holder: "another task".into(), ttl: SECOND, queue: false };
                    store.lease_acquire(&claim).await.unwrap();
                    tokio::time::sleep(millis(13)).await;
                    store.lease_release(&key, token, Duration::ZERO).await.unwrap();
                    leftovers.released(&key, token, true);
                    tokio::time::sleep(millis(1)).await;
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                biased;
                () = leaving => unreachable!(),
                asked = leases.lease("k").try_acquire() => asked,
            }
        };
        let calls = || leases.store().faults().calls(Operation::Acquire);
        assert!(asked(2).await.unwrap().is_some());
        assert_eq!(calls(), 3);
        let started = Instant::now();
        assert_unanswered(asked(1000).await);
        assert!(started.elapsed() < 2 * FIRST_ANSWER && (20..60).contains(&calls()), "{}", calls());
    }

    #[tokio::test(start_paused = true)]
    async fn claims_of_a_request_that_others_undid_are_not_in_its_own_way() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
        assert!(leases.all(["a", "b"]).try_acquire().await.unwrap().is_none());
        let err = leases.all(["a", "b"]).wait(Duration::ZERO).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Contended { .. }), "{err:?}");
        assert_eq!(leases.store().calls(Call::Acquire), 4, "each asked again once");
    }

    #[tokio::test(start_paused = true)]
    async fn nor_in_the_way_of_those_behind_it() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
        let _first = tokio::spawn(leases.all(["a", "b"]).wait(20 * SECOND).acquire());
        for wait in [Duration::ZERO, SECOND / 10, SECOND] {
            let err = leases.all(["a", "b"]).wait(wait).acquire().await.unwrap_err();
            assert!(matches!(err, Error::Contended { .. }), "{err:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_may_have_undone_an_attempt_that_is_made_again() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, [(); 2].map(|()| failed(Fault::Serialization)));
        let (key, leftovers) = (Key::from("k"), &leases.lease("k").inner.leftovers);
        let leaving = async {
            loop {
                let token = Token::random();
                leftovers.note(&key, token);
                tokio::time::sleep(Duration::from_millis(7)).await;
                leftovers.released(&key, token, true);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            biased;
            () = leaving => unreachable!(),
            asked = leases.lease("k").try_acquire() => assert!(asked.unwrap().is_some()),
        }
        assert_eq!(leases.store().calls(Call::Acquire), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_in_the_way_before_is_no_answer_to_who_asks_again_and_gets_none() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().store.faults().script(Operation::Acquire, [Failure::AnswerLost]);
        leases.store().store.faults().script(Operation::Release, [Failure::Slow(SECOND / 50)]);
        assert_unanswered(leases.lease("k").try_acquire().await);
        let asked = tokio::spawn(leases.lease("k").wait(Duration::ZERO).acquire());
        tokio::time::sleep(SECOND / 100).await;
        assert_eq!(leases.store().calls(Call::Look), 1, "it was refused");
        leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Contended)));
        let err = asked.await.unwrap().unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Contended, .. }), "{err:?}");
    }

    /// A caller whose wait is over while the first claim of the one before it takes 400 ms, and what comes meanwhile.
    async fn behind_the_first(leases: &Leases<Scripted>, comes: impl AsyncFnOnce()) -> Error {
        leases.store().store.faults().script(Operation::Acquire, [Failure::Slow(2 * SECOND / 5)]);
        let first = tokio::spawn(leases.lease("k").wait(20 * SECOND).acquire());
        tokio::task::yield_now().await;
        let behind = tokio::spawn(leases.lease("k").wait(Duration::ZERO).acquire());
        tokio::time::sleep(SECOND / 10).await;
        comes().await;
        let err = behind.await.unwrap().unwrap_err();
        first.abort();
        err
    }

    #[tokio::test(start_paused = true)]
    async fn a_leftover_that_arrives_while_a_caller_asks_again_is_no_other_holder() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().store.faults().script(Operation::Acquire, [Failure::Refused]);
        assert_unanswered(leases.lease("k").try_acquire().await);
        let late = leases.store().claims().remove(0);
        tokio::time::sleep(SECOND).await;
        drop(leases.lease("k").acquire().await.unwrap());
        tokio::time::sleep(SECOND).await;
        let arrives = async || {
            let arrived = leases.store().store.lease_acquire(&late).await.unwrap();
            assert!(matches!(arrived, Acquired::Granted(_)));
        };
        assert_unanswered::<()>(Err(behind_the_first(&leases, arrives).await));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_behind_whose_look_another_transaction_undid_asks_again() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Look, [failed(Fault::Serialization)]);
        let err = behind_the_first(&leases, async || ()).await;
        assert!(matches!(err, Error::Contended { holder: Some(_), .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_callers_behind_one_that_finds_the_database_locked_are_not_told_that_it_is_held() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Contended)));
        let first = tokio::spawn(leases.lease("k").wait(2 * SECOND).acquire());
        tokio::task::yield_now().await;
        for behind in [leases.lease("k").wait(SECOND).acquire().await, first.await.unwrap()] {
            let err = behind.unwrap_err();
            assert!(matches!(err, Error::Database { .. }), "{err:?}");
        }
    }

    /// A caller whose short wait ends behind one that is granted after 300 ms, and one that gets its answer after that.
    async fn behind_two(request: impl Fn(&Leases<MemoryStore>) -> LeaseRequest<MemoryStore>) -> (Duration, Error) {
        let leases = Leases::builder(MemoryStore::new()).hand_over(0).build().unwrap();
        let (answers, faults) = ([300, 2000].map(Duration::from_millis), leases.store().faults());
        faults.script(Operation::Acquire, answers.map(Failure::Slow));
        let mut before = Vec::new();
        for _ in answers {
            before.push(tokio::spawn(request(&leases).wait(20 * SECOND).acquire()));
            tokio::task::yield_now().await;
        }
        let started = Instant::now();
        let err = request(&leases).wait(Duration::ZERO).acquire().await.unwrap_err();
        (started.elapsed(), err)
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_wait_ends_as_soon_as_another_caller_has_what_nobody_else_may_have() {
        let (took, err) = behind_two(|leases| leases.lease("k")).await;
        assert!(err.is_contended() && took < FIRST_ANSWER, "{took:?} {err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_wait_for_what_others_may_have_too_ends_for_want_of_time() {
        let (took, err) = behind_two(|leases| leases.semaphore("k", 2)).await;
        assert!(err.is_contended() && took >= FIRST_ANSWER, "{took:?} {err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_look_is_short_where_the_answer_is_known_and_only_there() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let faults = here.store().faults();
        let other = there.lease("k").acquire().await.unwrap();
        faults.script(Operation::Look, [Failure::Silent]);
        let started = Instant::now();
        let err = here.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Contended { holder: None, .. }), "{err:?}");
        assert!(started.elapsed() < FIRST_ANSWER);
        other.release().await.unwrap();
        // Only the look says that it is another holder.
        faults.script(Operation::Release, [Failure::Refused; 1000]);
        faults.script(Operation::Acquire, [Failure::Refused]);
        assert_unanswered(here.lease("k").try_acquire().await);
        let _other = there.lease("k").acquire().await.unwrap();
        faults.script(Operation::Look, [Failure::Slow(FIRST_ANSWER / 2)]);
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_last_look_that_another_transaction_undid_names_no_holder() {
        let here = Leases::new(Scripted::new(Profile::default()));
        let there = Leases::new(here.store().store.client());
        let _lease = there.lease("k").acquire().await.unwrap();
        here.store().fail(Call::Look, [failed(Fault::Serialization)]);
        let err = here.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Contended { holder: None, .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_is_told_of_a_writer_of_its_process_that_waits() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let _reader = there.rw("k").read().acquire().await.unwrap();
        let writing = tokio::spawn(here.rw("k").write().wait(60 * SECOND).acquire());
        tokio::time::sleep(SECOND).await;
        let err = here.rw("k").read().wait(SECOND).acquire().await.unwrap_err();
        assert!(matches!(err, Error::Contended { holder: Some(_), .. }), "{err:?}");
        writing.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn where_a_permit_became_free_after_the_wait_the_holder_of_another_is_named() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let one = async || there.semaphore("k", 2).acquire().await.unwrap();
        let (first, second) = (one().await, one().await);
        here.store().faults().script(Operation::List, [Failure::None, Failure::Slow(QUICK / 2)]);
        let asking = tokio::spawn(here.semaphore("k", 2).wait(Duration::ZERO).acquire());
        tokio::time::sleep(QUICK / 10).await;
        first.release().await.unwrap();
        let err = asking.await.unwrap().unwrap_err();
        let Error::Contended { holder: Some(holder), .. } = err else { panic!("{err:?}") };
        assert_eq!(holder.as_lease().map(|it| it.fence), Some(second.fence()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_try_asks_nobody_who_holds_the_lease_where_nothing_is_left() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let _lease = there.lease("k").acquire().await.unwrap();
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        assert_eq!(here.store().faults().calls(Operation::Look), 0);
    }

    /// A store in which other transactions undo every third read.
    #[derive(Clone, Default)]
    struct Undone {
        store: MemoryStore,
        reads: Arc<AtomicU32>,
    }

    impl Undone {
        fn read(&self, key: Option<&Key>) -> Result<(), Error> {
            match self.reads.fetch_add(1, Ordering::Relaxed) % 3 {
                0 => Err(Error::database("reading", key, Fault::Serialization, "could not serialize access")),
                _ => Ok(()),
            }
        }
    }

    impl LeaseStore for Undone {
        pass_on!(lease_acquire, lease_renew, lease_release, lease_sweep);

        async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>, Error> {
            self.read(Some(key))?;
            self.store.lease_look(key).await
        }

        async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>, Error> {
            self.read(None)?;
            self.store.lease_list(prefix, limit).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_another_transaction_undid_is_a_refusal() {
        let store = Undone::default();
        let (here, there) = (Leases::new(store.clone()), Leases::new(store));
        let (lease, writer) = (here.lease("k").acquire().await.unwrap(), here.rw("k").write().acquire().await.unwrap());
        for fair in [false, true] {
            let request = || if fair { there.lease("k").fair() } else { there.lease("k") };
            let waits = (request().wait(SECOND).acquire(), request().wait(SECOND / 2).acquire());
            let (first, second) = tokio::join!(waits.0, waits.1);
            assert!(first.unwrap_err().is_contended() && second.unwrap_err().is_contended());
            assert!(request().try_acquire().await.unwrap().is_none());
        }
        assert!(there.rw("k").read().wait(SECOND).acquire().await.unwrap_err().is_contended());
        let reading = tokio::spawn(there.rw("k").read().acquire());
        let waiting = tokio::spawn(there.lease("k").acquire());
        tokio::time::sleep(SECOND).await;
        drop((lease, writer));
        assert!(waiting.await.unwrap().unwrap().is_trusted() && reading.await.unwrap().unwrap().is_trusted());
    }
}
