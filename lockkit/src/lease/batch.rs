//! Claims and releases of a process that arrive together, as one statement ([`batch`](crate::body::batch)).
//!
//! Each claim has a token of its own, so a batch without an answer is treated like a single claim without one: each of
//! its claims is released in the background. A claim about which the batch says nothing is sent alone, and released in
//! the background unless it is granted then, because the batch may have taken the lease all the same.

use std::{collections::HashSet, sync::Arc, time::Duration};

use crate::{
    body::batch::{self, Batches, Leaves, Turn, Waiter, fail},
    lease::{
        bounded::{LIMIT, is_refused, limit_for},
        life::{keeper::Keeper, state::Pin},
        store::{Acquired, Answer, Claim, LeaseStore, Release},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// How many calls go alone at a time.
const ALONE: u32 = 4;

/// The most releases in a batch: on PostgreSQL each needs an entry in a table of locks that has 6,400 by default.
const MOST_RELEASES: usize = 64;

const ACQUIRING: &str = "acquiring lease";
const RELEASING: &str = "releasing lease";

/// The calls in flight.
#[derive(Default)]
pub(super) struct Calls {
    claims: Arc<Batches<(), Claim, Claimed>>,
    /// Of leases that nobody has pinned, without `min_hold`.
    releases: Arc<Batches<(), Ending, Answer>>,
}

/// A release, and the time limit of its answer.
struct Ending {
    release: Release,
    limit: Duration,
}

/// The answer of a batch to a claim.
#[derive(Debug)]
enum Claimed {
    Answered(Acquired),
    /// No answer came.
    Silent,
    /// The batch failed, and may have taken the lease.
    Open,
}

/// Calls leave the queue when the batch in flight waits for a server that does not answer on its connection. A server
/// that is only slow needs batches most.
fn when_stuck(ttl: Duration) -> Leaves {
    Leaves::WhenStuck((ttl / 16).min(Duration::from_secs(1)))
}

/// Takes the lease, alone or with others. Returns the answer, `None` if none came, and whether a batch may have taken
/// the lease of which the answer says nothing.
pub(super) async fn acquire<S: LeaseStore>(
    calls: &Calls,
    keeper: &Keeper<S>,
    claim: &Claim,
) -> (Result<Option<Acquired>>, bool) {
    let mut single = None;
    let mut is_open = false;
    if keeper.store().profile().batches && !claim.queue {
        let run = |runner| acquire_together(keeper.clone(), runner);
        let (leaves, doing) = (when_stuck(claim.ttl), (ACQUIRING, &claim.key));
        // A claim that a batch has taken waits for its end: what the batch takes then must have somebody to release it.
        match calls.claims.enter((), claim.clone(), ALONE, leaves, doing, run).await {
            Ok(Turn::Answered(Claimed::Answered(acquired))) => return (Ok(Some(acquired)), false),
            Ok(Turn::Answered(Claimed::Silent)) => return (Ok(None), false),
            Ok(Turn::Answered(Claimed::Open)) => is_open = true,
            Ok(Turn::Alone(alone)) => single = alone,
            Err(err) => return (Err(err), false),
        }
    }
    let acquired = keeper.store().acquire(claim).await;
    drop(single);
    (acquired, is_open)
}

async fn acquire_together<S: LeaseStore>(keeper: Keeper<S>, runner: batch::Runner<(), Claim, Claimed>) {
    while runner.has_waiters() {
        let waiters = one_of_each(runner.next(|claims| claims.count()), |it| &it.key);
        let claims: Vec<_> = waiters.iter().map(|it| it.call.clone()).collect();
        let acquired = match &*claims {
            [] => continue,
            [claim] => keeper.store().acquire(claim).await.map(|it| it.map(|it| vec![Some(it)])),
            claims => keeper.store().acquire_each(claims).await,
        };
        match acquired {
            Ok(Some(acquired)) => {
                let mut answers = acquired.into_iter();
                for waiter in waiters {
                    match answers.next().flatten() {
                        Some(acquired) => waiter.answer(Claimed::Answered(acquired)),
                        None => waiter.goes_alone(),
                    }
                }
            }
            Ok(None) => waiters.into_iter().for_each(|it| it.answer(Claimed::Silent)),
            Err(err) if is_of_all(&err) || waiters.len() == 1 => {
                fail(waiters, ACQUIRING, |it| it.key.clone(), err);
            }
            Err(err) if is_refused(&err) => waiters.into_iter().for_each(Waiter::goes_alone),
            Err(_) => waiters.into_iter().for_each(|it| it.answer(Claimed::Open)),
        }
        // The callers that were answered may come back at once, and join the next batch.
        tokio::task::yield_now().await;
    }
}

/// Whether each claim would get this error: no answer came, or a store with one lock for all leases has refused it.
fn is_of_all(err: &Error) -> bool {
    let fault = |it: Fault| matches!(it, Fault::Unavailable | Fault::Contended);
    matches!(err, Error::PoolStarved { .. }) || matches!(err, Error::Database { fault: it, .. } if fault(*it))
}

/// Releases the lease, alone or with others. A transaction may only have pinned it if `pin` says so.
pub(super) async fn release<S: LeaseStore>(
    calls: &Calls,
    keeper: &Keeper<S>,
    release: &Release,
    pin: Pin,
    ttl: Duration,
) -> Result<Answer> {
    let mut single = None;
    if keeper.store().profile().batches && pin == Pin::No && release.min_hold.is_zero() {
        let run = |runner| release_together(keeper.clone(), runner);
        let (leaves, doing) = (when_stuck(ttl), (RELEASING, &release.key));
        let ending = Ending { release: release.clone(), limit: limit_for(ttl) };
        match calls.releases.enter((), ending, ALONE, leaves, doing, run).await? {
            Turn::Answered(answer) => return Ok(answer),
            Turn::Alone(alone) => single = alone,
        }
    }
    let answer = keeper.store().release_with_pin(release, pin, limit_for(ttl)).await;
    drop(single);
    answer
}

async fn release_together<S: LeaseStore>(keeper: Keeper<S>, runner: batch::Runner<(), Ending, Answer>) {
    while runner.has_waiters() {
        let waiters = one_of_each(runner.next(|releases| releases.take(MOST_RELEASES).count()), |it| &it.release.key);
        let releases: Vec<_> = waiters.iter().map(|it| it.call.release.clone()).collect();
        if releases.is_empty() {
            continue;
        }
        let limit = waiters.iter().map(|it| it.call.limit).min().unwrap_or(LIMIT);
        match keeper.store().release_all_unpinned(&releases, limit).await {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                for waiter in waiters {
                    waiter.answer(answers.next().unwrap_or(Answer::Busy));
                }
            }
            // After any other error, a release that is sent again could find its own work.
            Err(err) if is_refused(&err) => waiters.into_iter().for_each(Waiter::goes_alone),
            Err(err) => fail(waiters, RELEASING, |it| it.release.key.clone(), err),
        }
        tokio::task::yield_now().await;
    }
}

/// The first call for each key, in the order of the keys, so that two batches lock their rows in one order. The others
/// go alone.
fn one_of_each<C, A>(mut waiters: Vec<Waiter<C, A>>, key: impl Fn(&C) -> &Key) -> Vec<Waiter<C, A>> {
    let mut keys = HashSet::new();
    let doubled = waiters.extract_if(.., |it| !keys.insert(key(&it.call).clone())).collect::<Vec<_>>();
    doubled.into_iter().for_each(Waiter::goes_alone);
    waiters.sort_by(|one, other| key(&one.call).cmp(key(&other.call)));
    waiters
}

#[cfg(test)]
mod tests {
    use tokio::{
        task::{JoinSet, yield_now},
        time::{Instant, sleep, timeout},
    };

    use super::*;
    use crate::{
        Key, Leases, Released,
        lease::store::Profile,
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
        value::token::Token,
    };

    const LATENCY: Duration = Duration::from_millis(10);
    const TASKS: u64 = 40;

    fn leases() -> Leases<MemoryStore> {
        Leases::new(MemoryStore::new())
    }

    /// Leases in a store that takes this long.
    fn scripted(batches: bool) -> Leases<Scripted> {
        let leases = Leases::new(Scripted::new(Profile { batches, ..Profile::default() }));
        leases.store().store.faults().slow(LATENCY);
        leases
    }

    /// Claims of `TASKS` keys at once, of which the first ones go alone.
    fn claims<S: LeaseStore>(leases: &Leases<S>) -> JoinSet<(u64, Result<crate::Lease<S>>)> {
        let mut claims = JoinSet::new();
        for number in 0..TASKS {
            let leases = leases.clone();
            claims.spawn(async move { (number, leases.lease(format!("k{number}")).acquire().await) });
        }
        claims
    }

    async fn none_is_held<S: LeaseStore>(leases: &Leases<S>) {
        let begun = Instant::now();
        while !leases.list("").await.unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "they would have expired");
            sleep(LATENCY).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_and_releases_at_once_share_a_call() {
        let leases = leases();
        leases.store().faults().slow(LATENCY);
        let granted = claims(&leases).join_all().await;
        assert_eq!(leases.store().faults().calls(Operation::Acquire), u64::from(ALONE) + 1);
        let mut releases = JoinSet::new();
        for (number, lease) in granted {
            let lease = lease.unwrap();
            assert_eq!(lease.key().as_str(), format!("k{number}"));
            releases.spawn(lease.release());
        }
        for released in releases.join_all().await {
            assert_eq!(released.unwrap(), Released::WhileHeld);
        }
        assert_eq!(leases.store().faults().calls(Operation::Release), u64::from(ALONE) + 1);
        none_is_held(&leases).await;
    }

    #[tokio::test(start_paused = true)]
    async fn each_claim_has_its_own_answer() {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        let held = there.lease("k30").acquire().await.unwrap();
        here.store().faults().slow(LATENCY);
        let mut tries = JoinSet::new();
        for number in 0..TASKS {
            let here = here.clone();
            tries.spawn(async move { (number, here.lease(format!("k{number}")).try_acquire().await.unwrap()) });
        }
        for (number, lease) in tries.join_all().await {
            assert_eq!(lease.is_some(), number != 30, "{number}");
        }
        assert_eq!(held.release().await.unwrap(), Released::WhileHeld);
    }

    #[tokio::test(start_paused = true)]
    async fn of_many_claims_of_one_key_at_once_one_is_granted() {
        let leases = leases();
        leases.store().faults().slow(LATENCY);
        let mut tries = JoinSet::new();
        for _ in 0..TASKS {
            let leases = leases.clone();
            tries.spawn(async move { leases.lease("k").try_acquire().await.unwrap() });
        }
        let granted: Vec<_> = tries.join_all().await.into_iter().flatten().collect();
        assert_eq!(granted.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn two_claims_of_one_key_share_no_batch() {
        let leases = scripted(true);
        let mut claims = JoinSet::new();
        for number in 0..TASKS {
            let inner = leases.0.clone();
            claims.spawn(async move {
                let claim = Claim::new(format!("k{}", number / 2), Token::random(), "holder", LATENCY * 100);
                acquire(&inner.calls, &inner.keeper, &claim).await.0.unwrap().unwrap()
            });
        }
        let answers = claims.join_all().await;
        let granted = answers.iter().filter(|it| matches!(it, Acquired::Granted(_)));
        assert_eq!((granted.count() as u64, leases.store().calls(Call::AcquireEach) > 0), (TASKS / 2, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_without_an_answer_fails_each_of_its_claims_and_leaves_none() {
        // The slow one takes the leases, and answers after its limit.
        let slow = Failure::Slow(Duration::from_secs(8));
        for failure in [Failure::AnswerLost, Failure::Refused, Failure::Silent, slow] {
            let leases = leases();
            leases.store().faults().slow(LATENCY);
            let alone = [Failure::None; ALONE as usize];
            leases.store().faults().script(Operation::Acquire, alone.into_iter().chain([failure]));
            let mut kept = Vec::new();
            for (number, claimed) in claims(&leases).join_all().await {
                match claimed {
                    Ok(lease) => kept.push(lease),
                    // A request that waits asks again after a silence.
                    Err(err) => assert_eq!(err.key().map(Key::as_str), Some(&*format!("k{number}")), "{err}"),
                }
            }
            let asks_again = matches!(failure, Failure::Silent | Failure::Slow(_));
            let expected = if asks_again { TASKS } else { u64::from(ALONE) };
            assert_eq!(kept.len() as u64, expected, "{failure:?}");
            drop(kept);
            none_is_held(&leases).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_without_an_answer_is_not_guessed() {
        let leases = leases();
        let granted = claims(&leases).join_all().await;
        leases.store().faults().slow(LATENCY);
        let alone = [Failure::None; ALONE as usize];
        leases.store().faults().script(Operation::Release, alone.into_iter().chain([Failure::AnswerLost]));
        let mut releases = JoinSet::new();
        for (_, lease) in granted {
            releases.spawn(lease.unwrap().release());
        }
        let (known, unknown): (Vec<_>, Vec<_>) = releases.join_all().await.into_iter().partition(Result::is_ok);
        assert_eq!((known.len() as u64, unknown.len() as u64), (u64::from(ALONE), TASKS - u64::from(ALONE)));
        none_is_held(&leases).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_is_dropped_takes_no_other_with_it_and_keeps_no_lease() {
        for after in [Duration::ZERO, LATENCY / 4, LATENCY * 3 / 4] {
            let leases = leases();
            leases.store().faults().slow(LATENCY);
            let mut running = Vec::new();
            for number in 0..TASKS {
                let claim = leases.lease(format!("k{number}")).acquire();
                let limit = if number % 2 == 0 { after } else { Duration::from_secs(5) };
                running.push(tokio::spawn(timeout(limit, claim)));
            }
            let mut granted = Vec::new();
            for (number, claim) in running.into_iter().enumerate() {
                match claim.await.unwrap() {
                    Ok(lease) => granted.push((number, lease.unwrap())),
                    Err(_) => assert!(number % 2 == 0, "{number} was not answered"),
                }
            }
            assert_eq!(granted.len() as u64, TASKS / 2);
            sleep(LATENCY * 5).await;
            assert_eq!(leases.list("").await.unwrap().len() as u64, TASKS / 2, "after {after:?}");
            drop(granted);
            none_is_held(&leases).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_leave_a_batch_that_is_stuck() {
        for (ttl, most) in [(Duration::from_secs(30), 1100), (Duration::from_secs(2), 200)] {
            let leases = Leases::builder(MemoryStore::new()).ttl(ttl).build().unwrap();
            leases.store().faults().slow(LATENCY);
            let alone = [Failure::None; ALONE as usize];
            leases.store().faults().script(Operation::Acquire, alone.into_iter().chain([Failure::Silent]));
            let claims = claims(&leases);
            sleep(LATENCY / 2).await;
            let begun = Instant::now();
            let late = leases.lease("late").acquire().await.unwrap();
            assert!(begun.elapsed() < Duration::from_millis(most), "{ttl:?}: {:?}", begun.elapsed());
            drop(late);
            claims.join_all().await.into_iter().for_each(|(_, it)| drop(it.unwrap()));
            yield_now().await;
            none_is_held(&leases).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_makes_no_batches_gets_each_call_alone() {
        let leases = scripted(false);
        let granted: Vec<_> = claims(&leases).join_all().await.into_iter().map(|(_, it)| it.unwrap()).collect();
        drop(granted);
        none_is_held(&leases).await;
        let calls = |call| u64::from(leases.store().calls(call));
        assert_eq!((calls(Call::AcquireEach), calls(Call::ReleaseAllUnpinned)), (0, 0));
        assert_eq!((calls(Call::Acquire), calls(Call::ReleaseUnpinned)), (TASKS, TASKS));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_fails_for_one_of_its_claims_fails_no_other() {
        let leases = scripted(true);
        leases.store().fail(Call::AcquireEach, [failed(Fault::Other)]);
        let granted: Vec<_> = claims(&leases).join_all().await.into_iter().map(|(_, it)| it.unwrap()).collect();
        assert_eq!(leases.store().calls(Call::AcquireEach), 1);
        drop(granted);
        none_is_held(&leases).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_failed_batch_has_taken_is_released_when_its_claims_fail_alone() {
        let leases = scripted(true);
        leases.store().fail(Call::AcquireEach, [failed(Fault::Other)]);
        let claims = claims(&leases);
        sleep(LATENCY / 5).await;
        // The claims of the batch, which go alone after its answer.
        leases.store().fail(Call::Acquire, (0..TASKS).map(|_| failed(Fault::Encoding)));
        let (granted, failed): (Vec<_>, Vec<_>) = claims.join_all().await.into_iter().partition(|it| it.1.is_ok());
        assert_eq!((granted.len() as u64, failed.len() as u64), (u64::from(ALONE), TASKS - u64::from(ALONE)));
        sleep(LATENCY * 5).await;
        assert_eq!(leases.list("").await.unwrap().len(), granted.len(), "without waiting for their ttl");
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_was_refused_has_taken_nothing_that_would_have_to_be_released() {
        let leases = scripted(true);
        leases.store().fail(Call::AcquireEach, [failed(Fault::Encoding)]);
        let claims = claims(&leases);
        sleep(LATENCY / 5).await;
        // One of the claims of the batch, which go alone after its answer.
        leases.store().fail(Call::Acquire, [failed(Fault::Encoding)]);
        let (granted, refused): (Vec<_>, Vec<_>) = claims.join_all().await.into_iter().partition(|it| it.1.is_ok());
        assert_eq!((granted.len() as u64, refused.len()), (TASKS - 1, 1));
        sleep(LATENCY * 5).await;
        assert_eq!(leases.store().calls(Call::Release), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn of_releases_that_were_refused_together_each_is_sent_alone() {
        let leases = scripted(true);
        let granted = claims(&leases).join_all().await;
        leases.store().fail(Call::ReleaseAllUnpinned, [failed(Fault::Encoding)]);
        let mut releases = JoinSet::new();
        for (_, lease) in granted {
            releases.spawn(lease.unwrap().release());
        }
        for released in releases.join_all().await {
            assert_eq!(released.unwrap(), Released::WhileHeld);
        }
        assert_eq!(leases.store().calls(Call::ReleaseAllUnpinned), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn leases_that_stay_taken_or_may_be_pinned_are_not_released_in_a_batch() {
        let leases = scripted(true);
        let mut held = Vec::new();
        for number in 0..TASKS {
            let stays = leases.lease(format!("stays{number}")).min_hold(Duration::from_secs(5));
            held.push(stays.acquire().await.unwrap());
            let pinned = leases.lease(format!("pinned{number}")).acquire().await.unwrap();
            pinned.verify_by(async { Ok(true) }).await.unwrap();
            held.push(pinned);
        }
        let releases: JoinSet<_> = held.into_iter().map(crate::Lease::release).collect();
        releases.join_all().await;
        assert_eq!(leases.store().calls(Call::ReleaseAllUnpinned), 0);
        assert_eq!(leases.list("stays").await.unwrap().len() as u64, TASKS);
    }
}
