//! One attempt at the store: the claims of a request.
//!
//! A claim runs to its end even if the caller is gone (`body/inline`); its lease is then released like any dropped one.
//! This does not require the driver to be cancel-safe. A request for several keys never queues in the store: it would
//! keep a place at one key while it waits for another.
//!
//! What becomes of claims that were sent (a test runs every cell):
//!
//! | answer | one claim | one left open by a batch | one that queues | one that had a place | several claims |
//! |---|---|---|---|---|---|
//! | granted | settled | settled | settled | settled | settled |
//! | held | settled | released | keeps its place | keeps its place | settled |
//! | none | released | released | released | released | released |
//! | an error that refuses the statement | settled | released | settled | released | settled |
//! | an error of the moment | settled | released | settled | released | released |
//! | another error | released | released | released | released | released |
//!
//! `settled`: nothing of them is left in the store, or their lease is in the answer. `keeps its place`: the same token
//! is sent again, which a store with a queue (`profile().queues`) knows. `released`: something may be left, so they are
//! [leftovers](crate::lease::leftovers) that are released in the background, and the next claim has a new token, which
//! that release cannot free.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::{
    runtime,
    time::{Instant, sleep},
};

use crate::{
    body::{
        guard::{Guard, Hold},
        task::is_answered,
    },
    lease::{
        batch,
        bounded::{is_refused, limit_for, retry_pause},
        held::Lease,
        inner::Inner,
        leftovers::while_awaited,
        life::{
            keeper::Unfinished,
            kept::{Kept, Terms},
        },
        store::{Acquired, AcquiredAll, Answer, Claim, LeaseStore, Release},
    },
    mutex::Mutex,
    value::{
        error::{Error, Result},
        key::Key,
        token::Token,
    },
};

/// The result of an attempt.
#[derive(Debug)]
pub(super) enum Attempt<S: LeaseStore> {
    /// All leases, in the order of the claims.
    Granted(Vec<Lease<S>>),
    /// Another holder has the lease of this key. Nothing was taken.
    Held {
        key: Key,
        free_in: Option<Duration>,
        /// The claim to send again, if it has a place in the store's queue.
        place: Option<Guard<OpenClaim<S>>>,
    },
    /// No answer came.
    Silent,
}

/// Sends the claims, which are in the order of their keys. `place` is the only one of them, if it was sent before.
///
/// The answer is received even if the caller is dropped. A lease that the caller does not take is dropped, and so
/// released.
pub(super) async fn attempt<S: LeaseStore>(
    inner: Arc<Inner<S>>,
    claims: Vec<Claim>,
    place: Option<Guard<OpenClaim<S>>>,
    terms: Terms,
) -> Result<Attempt<S>> {
    // Before the check, so that `close` waits for a claim that passes it.
    let unfinished = inner.keeper.unfinished();
    if inner.keeper.is_closed() {
        return Err(Error::Closed { key: joined(claims.iter().map(|it| &it.key)) });
    }
    let sent = Arc::new(Sent { inner, claims, terms, is_answered: Mutex::new(false) });
    let caller = Guard::new(Caller(sent.clone()));
    let sending = async move {
        let _unfinished = unfinished;
        let begun = Instant::now();
        // Some claims may be granted even if no answer arrives.
        let open = Guard::new(Open(sent.clone()));
        let Sent { inner, claims, terms, .. } = &*sent;
        // It is sent again.
        let had_place = place.map(Guard::defuse).is_some();
        let (answer, is_open) = while_awaited(pin!(send(inner, claims)), || sent.note()).await;
        let kind = match &**claims {
            _ if had_place => Kind::HadPlace,
            [claim] if claim.queue => Kind::Queues,
            [_] if is_open => Kind::LeftOpen,
            [_] => Kind::One,
            _ => Kind::Several,
        };
        let fate = kind.fate(&answer);
        sent.answered(fate);
        if let Ok(Some(AcquiredAll::Granted(_))) = &answer {
            for claim in claims {
                inner.leftovers.absent(&claim.key, begun);
            }
        }
        drop(open.defuse());
        let place = match fate {
            Fate::KeepsPlace => claims.first().map(|it| sent.open(it, true)),
            Fate::Released => {
                let is_answered = match &answer {
                    Ok(answer) => answer.is_some(),
                    Err(err) => is_answered(err),
                };
                sent.release(is_answered && !is_open);
                if kind == Kind::Several && answer.as_ref().is_err_and(Error::is_transient) {
                    for claim in claims {
                        inner.leftovers.undone(&claim.key, claim.token);
                    }
                }
                None
            }
            Fate::Settled => None,
        };
        match answer? {
            Some(AcquiredAll::Held { key, free_in }) => Ok(Attempt::Held { key, free_in, place }),
            Some(AcquiredAll::Granted(grants)) => {
                // All leases are built before the first error returns, so that each of them is released.
                let leases: Vec<_> = claims
                    .iter()
                    .cloned()
                    .zip(grants)
                    .map(|(claim, grant)| Lease::granted(inner.clone(), Kept::new(claim, grant, begun, terms.clone())))
                    .collect();
                let leases = leases.into_iter().collect::<Result<Vec<_>>>()?;
                // If the answer took longer than the leases live, they are not granted, and no answer is known.
                Ok(if leases.iter().all(Lease::is_trusted) { Attempt::Granted(leases) } else { Attempt::Silent })
            }
            None => Ok(Attempt::Silent),
        }
    };
    let attempted = caller.0.inner.inline.run("acquiring lease", sending).await;
    drop(caller.defuse());
    attempted
}

/// Returns the answer, and whether a batch may have taken a lease of which the answer says nothing.
async fn send<S: LeaseStore>(inner: &Inner<S>, claims: &[Claim]) -> (Result<Option<AcquiredAll>>, bool) {
    let [claim] = claims else {
        return (inner.store().acquire_all(claims).await, false);
    };
    let (acquired, is_open) = batch::acquire(&inner.calls, &inner.keeper, claim).await;
    let all = |acquired| match acquired {
        Acquired::Granted(grant) => AcquiredAll::Granted(vec![grant]),
        Acquired::Held { free_in } => AcquiredAll::Held { key: claim.key.clone(), free_in },
    };
    (acquired.map(|it| it.map(all)), is_open)
}

/// Claims on their way. They are leftovers from the moment on that nobody may wait for them.
struct Sent<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    claims: Vec<Claim>,
    terms: Terms,
    is_answered: Mutex<bool>,
}

impl<S: LeaseStore> Sent<S> {
    fn note(&self) {
        let is_answered = self.is_answered.lock();
        if !*is_answered {
            self.claims.iter().for_each(|it| self.inner.leftovers.note(&it.key, it.token));
        }
    }

    fn answered(&self, fate: Fate) {
        *self.is_answered.lock() = true;
        if fate != Fate::Released {
            self.claims.iter().for_each(|it| self.inner.leftovers.never_were(&it.key, it.token));
        }
    }

    fn open(&self, claim: &Claim, is_answered: bool) -> Guard<OpenClaim<S>> {
        let inner = self.inner.clone();
        let (unfinished, queue_key) = (inner.keeper.unfinished(), self.terms.waiters.queue_key(&claim.key).clone());
        Guard::new(OpenClaim { inner, claim: claim.clone(), queue_key, unfinished, tried: Vec::new(), is_answered })
    }

    fn release(&self, is_answered: bool) {
        self.claims.iter().for_each(|it| drop(self.open(it, is_answered)));
    }
}

/// Claims that end without an answer.
struct Open<S: LeaseStore>(Arc<Sent<S>>);

impl<S: LeaseStore> Hold for Open<S> {
    fn abandon(self) {
        self.0.release(false);
    }
}

/// The caller of claims on their way.
struct Caller<S: LeaseStore>(Arc<Sent<S>>);

impl<S: LeaseStore> Hold for Caller<S> {
    fn abandon(self) {
        self.0.note();
    }
}

/// The combined name of several keys.
pub(super) fn joined<'k>(keys: impl IntoIterator<Item = &'k Key>) -> Key {
    keys.into_iter().map(Key::as_str).collect::<Vec<_>>().join(" + ").into()
}

/// A claim of which something may be in the store: it has no answer, or a place in the store's own queue. On drop it is
/// released in the background, on another runtime if the first one ends.
pub(super) struct OpenClaim<S: LeaseStore> {
    inner: Arc<Inner<S>>,
    claim: Claim,
    /// The key of the queue that its release wakes.
    queue_key: Key,
    unfinished: Unfinished,
    tried: Vec<runtime::Id>,
    /// It is not on its way any more.
    is_answered: bool,
}

/// The claims of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    /// It was in a batch that did not answer it.
    LeftOpen,
    Queues,
    /// It queues, and had a place before.
    HadPlace,
    Several,
}

/// What becomes of claims that were sent. See the table of [this module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Settled,
    KeepsPlace,
    Released,
}

impl Kind {
    fn fate(self, answer: &Result<Option<AcquiredAll>>) -> Fate {
        // Another transaction has what the statement needs. With several claims, some of them may be granted.
        let is_of_the_moment = |err: &Error| matches!(err, Error::Database { fault, .. } if fault.is_of_the_moment());
        match (self, answer) {
            (Self::Queues | Self::HadPlace, Ok(Some(AcquiredAll::Held { .. }))) => Fate::KeepsPlace,
            (Self::LeftOpen, Ok(Some(AcquiredAll::Held { .. })) | Err(_))
            | (_, Ok(None))
            | (Self::HadPlace, Err(_)) => Fate::Released,
            (_, Ok(Some(_))) => Fate::Settled,
            (_, Err(err)) if is_refused(err) || self != Self::Several && is_of_the_moment(err) => Fate::Settled,
            (_, Err(_)) => Fate::Released,
        }
    }
}

impl<S: LeaseStore> OpenClaim<S> {
    pub(super) fn token(&self) -> Token {
        self.claim.token
    }
}

impl<S: LeaseStore> Hold for OpenClaim<S> {
    fn abandon(self) {
        let Self { inner, claim, queue_key, unfinished, mut tried, is_answered } = self;
        inner.leftovers.note(&claim.key, claim.token);
        let Some(runtime) = inner.keeper.runtime(&tried) else { return };
        tried.push(runtime.id());
        let (again, queue) = (inner.clone(), queue_key.clone());
        let open = Self { inner: again, claim: claim.clone(), queue_key: queue, unfinished, tried, is_answered };
        let open = Guard::new(open);
        runtime.spawn(async move {
            let Claim { key, token, ttl, .. } = claim;
            let expired = Instant::now() + ttl;
            let release = Release { key, token, min_hold: Duration::ZERO };
            let wakes = loop {
                let released = inner.store().release(&release, limit_for(ttl)).await;
                if let Ok(Answer::Done | Answer::Gone) = released {
                    let is_gone = matches!(released, Ok(Answer::Done)) || is_answered;
                    inner.leftovers.released(&release.key, release.token, is_gone);
                }
                match released {
                    Ok(Answer::Gone) => break false,
                    Ok(Answer::Done) => break true,
                    _ if Instant::now() >= expired => break true,
                    _ => sleep(retry_pause(ttl)).await,
                }
            };
            // A waiter that is woken for nothing would ask again at once.
            if wakes {
                inner.queues.freed(&queue_key);
            }
            drop(open.defuse());
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::{
        Fault, Leases,
        lease::{
            leftovers::{Keys, Left},
            store::Profile,
        },
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
    };

    const SECOND: Duration = Duration::from_secs(1);
    const TTL: Duration = Duration::from_secs(10);

    /// A store in which another process has the lease `k`.
    async fn held(queues: bool) -> (Leases<Scripted>, Lease<MemoryStore>) {
        let here = Leases::new(Scripted::new(Profile { queues, ..Profile::default() }));
        let there = Leases::new(here.store().store.client());
        let lease = there.lease("k").acquire().await.unwrap();
        (here, lease)
    }

    #[test]
    fn claims_become_what_the_table_says() {
        let held = || Ok(Some(AcquiredAll::Held { key: Key::from("k"), free_in: None }));
        let database = |fault| Err(Error::database("acquiring lease", None, fault, "?"));
        let invalid = || Err(Error::InvalidKey { key: "k".into(), reason: "?" });
        let answers = [
            ("granted", vec![Ok(Some(AcquiredAll::Granted(Vec::new())))]),
            ("held", vec![held()]),
            ("none", vec![Ok(None)]),
            ("an error that refuses the statement", vec![invalid(), database(Fault::Encoding)]),
            ("an error of the moment", vec![database(Fault::Contended), database(Fault::Deadlock)]),
            ("another error", vec![database(Fault::Unavailable), database(Fault::Other)]),
        ];
        let table = include_str!("claim.rs").lines().filter_map(|it| it.strip_prefix("//! | "));
        let rows: Vec<Vec<_>> = table.map(|it| it.trim_end_matches(" |").split(" | ").collect()).collect();
        for (answer, row) in answers.iter().zip(&rows[1..]) {
            assert_eq!(answer.0, row[0]);
            for answer in &answer.1 {
                let kinds = [Kind::One, Kind::LeftOpen, Kind::Queues, Kind::HadPlace, Kind::Several];
                let fates = kinds.map(|kind| match kind.fate(answer) {
                    Fate::Settled => "settled",
                    Fate::KeepsPlace => "keeps its place",
                    Fate::Released => "released",
                });
                assert_eq!(fates, row[1..], "{answer:?}");
            }
        }
        assert_eq!(rows.len(), 1 + answers.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_waits_keeps_its_token_in_a_store_that_queues_and_only_there() {
        for queues in [true, false] {
            let (here, lease) = held(queues).await;
            let waiting = tokio::spawn(here.lease("k").wait(60 * SECOND).acquire());
            sleep(SECOND).await;
            lease.release().await.unwrap();
            drop(waiting.await.unwrap().unwrap());
            let claims: Vec<_> = here.store().claims().into_iter().filter(|it| it.key == "k").collect();
            let [first, .., last] = &*claims else { panic!("{claims:?}") };
            assert_eq!((first.queue, last.queue), (queues, queues));
            assert_eq!(first.token == last.token, queues);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_wait_has_no_place_in_the_queue_of_the_store() {
        let (here, _lease) = held(true).await;
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        here.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
        let permit = here.semaphore("k", 1).acquire().await.unwrap();
        // It takes a ticket, whose number may be taken.
        here.semaphore("k", 1).wait(SECOND).acquire().await.unwrap_err();
        let claims = here.store().claims();
        assert!(claims.iter().any(|it| it.key.contains("/queue/")) && claims.iter().all(|it| !it.queue));
        drop(permit);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_gives_up_leaves_the_queue_of_the_store() {
        let (here, _lease) = held(true).await;
        here.lease("k").wait(SECOND).acquire().await.unwrap_err();
        sleep(SECOND).await;
        assert_eq!(here.store().calls(Call::Release), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_place_that_a_request_gives_up_is_not_in_its_own_way() {
        let (here, lease) = held(true).await;
        let faults = here.store().store.faults();
        faults.slow(SECOND / 25);
        faults.script(Operation::Release, [Failure::Slow(SECOND / 5)]);
        let asked = tokio::spawn(here.lease("k").wait(SECOND).acquire());
        // Before the last look arrives.
        sleep(SECOND + SECOND / 100).await;
        lease.release().await.unwrap();
        let err = asked.await.unwrap().unwrap_err();
        assert!(err.is_contended(), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_in_the_queue_of_the_store_is_given_up_after_an_error() {
        let (here, lease) = held(true).await;
        let waiting = tokio::spawn(here.lease("k").wait(60 * SECOND).acquire());
        sleep(SECOND).await;
        here.store().fail(Call::Acquire, [failed(Fault::Contended)]);
        lease.release().await.unwrap();
        drop(waiting.await.unwrap().unwrap());
        let tokens: Vec<_> = here.store().claims().into_iter().map(|it| it.token).collect();
        let [first, second, third] = &*tokens else { panic!("{tokens:?}") };
        assert!(first == second && second != third, "{tokens:?}");
        assert_eq!(here.store().calls(Call::Release), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_another_transaction_undid_has_nothing_to_release() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, [failed(Fault::Contended)]);
        leases.lease("k").try_acquire().await.unwrap_err();
        sleep(TTL).await;
        assert_eq!(leases.store().calls(Call::Release), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn only_an_error_that_others_caused_proves_that_nothing_is_left_of_several_claims() {
        for (fault, left) in [(Fault::Deadlock, Left::Absent), (Fault::Other, Left::Perhaps)] {
            let leases = Leases::new(Scripted::new(Profile::default()));
            leases.store().fail(Call::Acquire, [failed(fault)]);
            leases.store().fail(Call::Release, (0..1000).map(|_| failed(Fault::Unavailable)));
            let asked = Instant::now();
            let request = leases.all(["a", "b"]);
            timeout(SECOND / 100, request.try_acquire()).await.ok();
            assert_eq!(leases.0.leftovers.of(Keys::These(&["a".into()]), asked, &[]), left, "{fault:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_release_of_an_unanswered_claim_is_repeated_until_it_is_answered() {
        // The claim arrived, or it did not.
        for claim in [Failure::AnswerLost, Failure::Refused] {
            let store = MemoryStore::new();
            let leases = Leases::builder(store.client()).ttl(TTL).build().unwrap();
            leases.store().faults().script(Operation::Acquire, [claim]);
            leases.store().faults().script(Operation::Release, [Failure::Refused; 3]);
            leases.lease("k").acquire().await.unwrap_err();
            sleep(TTL / 2).await;
            assert!(store.lease_look(&"k".into()).await.unwrap().is_none(), "{claim:?}");
            sleep(2 * TTL).await;
            assert_eq!(leases.store().faults().calls(Operation::Release), 4, "{claim:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_release_of_an_unanswered_claim_is_given_up_after_its_ttl() {
        let leases = Leases::builder(MemoryStore::new()).ttl(TTL).build().unwrap();
        leases.store().faults().partition();
        leases.lease("k").acquire().await.unwrap_err();
        sleep(TTL + SECOND).await;
        let calls = leases.store().faults().calls(Operation::Release);
        sleep(TTL).await;
        assert_eq!(leases.store().faults().calls(Operation::Release), calls);
        leases.close().await.unwrap();
    }

    #[tokio::test]
    async fn a_claim_that_ends_with_its_runtime_is_released_on_another() {
        let store = MemoryStore::new();
        let leases = Leases::builder(store.client()).ttl(360 * TTL).build().unwrap();
        let _lives = leases.lease("here").acquire().await.unwrap();
        leases.store().faults().script(Operation::Acquire, [Failure::Slow(SECOND / 2)]);
        let (asking, key) = (leases.lease("k").acquire(), Key::from("k"));
        let ends = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let seen = store.clone();
        let granted = async move {
            drop(tokio::spawn(asking));
            while seen.lease_look(&"k".into()).await.unwrap().is_none() {
                sleep(SECOND / 1000).await;
            }
        };
        tokio::task::spawn_blocking(move || ends.block_on(granted)).await.unwrap();
        let released = async {
            while store.lease_look(&key).await.unwrap().is_some() {
                sleep(SECOND / 1000).await;
            }
        };
        timeout(60 * SECOND, released).await.expect("it is released long before its ttl");
    }
}
