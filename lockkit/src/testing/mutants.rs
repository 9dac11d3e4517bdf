//! Stores with deliberate bugs, which the conformance suite and the oracle must catch.
//!
//! Each of them must fail the check it is listed with, and each check must fail for one of them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{task::yield_now, time::Instant};

use super::conformance;
use crate::{
    lease::store::{Acquired, AcquiredAll, Answer, Claim, Grant, LeaseRecord, LeaseStore, Previous, Renewal},
    mutex::Mutex,
    testing::MemoryStore,
    value::{error::Result, fence::Fence, key::Key, token::Token},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    GrantsTwice,
    ChecksThenActs,
    FenceRepeats,
    FenceIsACounterThatASweepForgets,
    FenceIsLostOnRelease,
    ReleasesByName,
    ReleasesWhatExpired,
    ReleaseSaysDoneTwice,
    ReleaseDoesNothing,
    RenewsByName,
    RenewalBringsBack,
    RenewalShortens,
    RenewalDoesNothing,
    RenewalsAreNotCounted,
    RenewalsAreAnsweredInOrderOfKeys,
    RenewalsOfTheGoneAreLeftOut,
    OneGoneRenewalIsAllGone,
    SameTokenIsRefused,
    SameTokenGetsANewFence,
    SameTokenKeepsItsExpiry,
    SameTokenIsShortened,
    LeastHoldingTimeIsIgnored,
    LeastHoldingTimeKeepsTheToken,
    LeastHoldingTimeIsCountedFromTheRelease,
    SaysThatItWasSentLater,
    PreviousIsNeverNamed,
    PreviousIsNamedAfterARelease,
    TakesSome,
    TakesInAnotherOrder,
    BlamesTheFirst,
    EachTakesTheHeld,
    EachIsAnsweredInAnotherOrder,
    EachSaysNothingOfWhatItTook,
    EachNamesNoPrevious,
    EachTakesForLess,
    EachGrantsAgainForNothing,
    LooksAtWhatWas,
    ListsByPattern,
    ListsInReverse,
    ListsWithoutLimit,
    ListsEverything,
    SweepsTheHeld,
    SweepsWithoutLimit,
    SweepsNothing,
    IgnoresCase,
    TrimsBlanks,
    CutsKeys,
    WaitsForTheHolder,
}

/// A [`MemoryStore`] with one bug.
#[derive(Debug, Clone)]
pub(super) struct Mutant {
    bug: Bug,
    store: MemoryStore,
    memory: Arc<Mutex<Memory>>,
}

#[derive(Debug, Default)]
struct Memory {
    counters: HashMap<Key, u64>,
    held: HashMap<Key, LeaseRecord>,
    expiries: HashMap<Key, Duration>,
}

impl Mutant {
    pub(super) fn new(bug: Bug) -> Self {
        Self { bug, store: MemoryStore::new(), memory: Arc::default() }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == bug
    }

    fn key(&self, key: &Key) -> Key {
        match self.bug {
            Bug::IgnoresCase => key.to_lowercase().into(),
            Bug::TrimsBlanks => key.trim_end().into(),
            Bug::CutsKeys => key.chars().take(128).collect::<String>().into(),
            _ => key.clone(),
        }
    }

    async fn current(&self, key: &Key) -> Option<LeaseRecord> {
        self.store.lease_look(key).await.expect("no faults were scripted")
    }

    fn counted(&self, key: &Key) -> Fence {
        let mut memory = self.memory.lock();
        let counter = memory.counters.entry(key.clone()).or_default();
        *counter += 1;
        Fence::from(*counter)
    }

    fn changed(&self, claim: &Claim, mut grant: Grant) -> Grant {
        match self.bug {
            Bug::FenceRepeats => grant.fence = Fence::from(1),
            Bug::FenceIsACounterThatASweepForgets | Bug::FenceIsLostOnRelease => grant.fence = self.counted(&claim.key),
            Bug::SaysThatItWasSentLater => grant = grant.sent(Instant::now() + claim.ttl),
            Bug::PreviousIsNeverNamed => grant.previous = None,
            Bug::PreviousIsNamedAfterARelease => {
                let expired_for = Duration::from_secs(1);
                grant.previous = Some(Previous::new("x".to_owned(), Fence::from(1), expired_for));
            }
            _ => {}
        }
        grant
    }
}

impl LeaseStore for Mutant {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let claim = &Claim { key: self.key(&claim.key), ..claim.clone() };
        let before = self.current(&claim.key).await;
        let is_own = before.as_ref().is_some_and(|it| it.token == claim.token);
        match (self.bug, before) {
            (Bug::GrantsTwice, Some(_)) if !is_own => drop(self.store.steal(claim.key.clone())),
            (Bug::ChecksThenActs, None) => {
                yield_now().await;
                while let Acquired::Held { .. } = self.store.lease_acquire(claim).await? {
                    self.store.steal(claim.key.clone());
                }
            }
            (Bug::SameTokenIsRefused, Some(_)) if is_own => return Ok(Acquired::Held { free_in: None }),
            (Bug::SameTokenGetsANewFence, Some(_)) if is_own => drop(self.store.steal(claim.key.clone())),
            (Bug::SameTokenKeepsItsExpiry, Some(held)) if is_own => {
                return Ok(Acquired::Granted(held.info.fence.into()));
            }
            (Bug::SameTokenIsShortened, Some(_)) if is_own => {
                self.memory.lock().expiries.insert(claim.key.clone(), claim.ttl);
            }
            (Bug::WaitsForTheHolder, Some(_)) if !is_own => return std::future::pending().await,
            _ => {}
        }
        Ok(match self.store.lease_acquire(claim).await? {
            Acquired::Granted(grant) => {
                let grant = self.changed(claim, grant);
                if let Some(held) = self.current(&claim.key).await {
                    self.memory.lock().held.insert(claim.key.clone(), held);
                }
                Acquired::Granted(grant)
            }
            held @ Acquired::Held { .. } => held,
        })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        match self.bug {
            Bug::TakesSome => {
                let mut grants = Vec::new();
                for claim in claims {
                    match self.store.lease_acquire(claim).await? {
                        Acquired::Granted(grant) => grants.push(grant),
                        Acquired::Held { free_in } => {
                            return Ok(AcquiredAll::Held { key: claim.key.clone(), free_in });
                        }
                    }
                }
                Ok(AcquiredAll::Granted(grants))
            }
            Bug::TakesInAnotherOrder => Ok(match self.store.lease_acquire_all(claims).await? {
                AcquiredAll::Granted(mut grants) => {
                    grants
                        .iter_mut()
                        .enumerate()
                        .for_each(|(at, it)| it.fence = Fence::from(it.fence.get() + at as u64));
                    AcquiredAll::Granted(grants)
                }
                held @ AcquiredAll::Held { .. } => held,
            }),
            Bug::BlamesTheFirst => Ok(match self.store.lease_acquire_all(claims).await? {
                AcquiredAll::Held { free_in, .. } => AcquiredAll::Held { key: claims[0].key.clone(), free_in },
                granted @ AcquiredAll::Granted(_) => granted,
            }),
            _ => self.store.lease_acquire_all(claims).await,
        }
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        if self.has(Bug::EachTakesTheHeld) {
            for claim in claims {
                self.store.steal(claim.key.clone());
            }
        }
        let mut sent = claims.to_vec();
        for claim in &mut sent {
            let holds = self.current(&claim.key).await.is_some_and(|it| it.token == claim.token);
            if self.has(Bug::EachTakesForLess) || self.has(Bug::EachGrantsAgainForNothing) && holds {
                claim.ttl /= 4;
            }
        }
        let mut answers = self.store.lease_acquire_each(&sent).await?;
        match self.bug {
            Bug::EachIsAnsweredInAnotherOrder => answers.rotate_left(1),
            Bug::EachSaysNothingOfWhatItTook => answers.fill(None),
            Bug::EachNamesNoPrevious => answers.iter_mut().flatten().for_each(|it| {
                if let Acquired::Granted(grant) = it {
                    grant.previous = None;
                }
            }),
            _ => {}
        }
        Ok(answers)
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        let key = &self.key(key);
        if self.has(Bug::LooksAtWhatWas) {
            return Ok(self.memory.lock().held.get(key).cloned());
        }
        let mut held = self.store.lease_look(key).await?;
        if let Some(held) = &mut held {
            match self.bug {
                Bug::RenewalsAreNotCounted => held.info.renewals = 0,
                Bug::FenceIsACounterThatASweepForgets | Bug::FenceIsLostOnRelease => {
                    held.info.fence = Fence::from(self.memory.lock().counters.get(key).copied().unwrap_or(0));
                }
                Bug::RenewalShortens | Bug::SameTokenIsShortened => {
                    let expiries = &self.memory.lock().expiries;
                    held.info.expires_in = expiries.get(key).copied().unwrap_or(held.info.expires_in);
                }
                _ => {}
            }
        }
        Ok(held)
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        match self.bug {
            Bug::RenewsByName => {
                let mut named = renewals.to_vec();
                for renewal in &mut named {
                    if let Some(held) = self.current(&renewal.key).await {
                        renewal.token = held.token;
                    }
                }
                return self.store.lease_renew(&named).await;
            }
            Bug::RenewalBringsBack => {
                for Renewal { key, token, ttl } in renewals {
                    let claim = Claim::new(key.clone(), *token, "x", *ttl);
                    self.store.lease_acquire(&claim).await?;
                }
                return Ok(vec![Answer::Done; renewals.len()]);
            }
            Bug::RenewalDoesNothing => return Ok(vec![Answer::Done; renewals.len()]),
            Bug::RenewalShortens => {
                let mut memory = self.memory.lock();
                memory.expiries.extend(renewals.iter().map(|it| (it.key.clone(), it.ttl)));
            }
            _ => {}
        }
        let mut answers = self.store.lease_renew(renewals).await?;
        match self.bug {
            Bug::RenewalsAreAnsweredInOrderOfKeys => {
                let mut of_keys: Vec<_> = renewals.iter().map(|it| &it.key).zip(answers).collect();
                of_keys.sort_by_key(|it| it.0.clone());
                answers = of_keys.into_iter().map(|it| it.1).collect();
            }
            Bug::RenewalsOfTheGoneAreLeftOut => answers.retain(|it| *it != Answer::Gone),
            Bug::OneGoneRenewalIsAllGone if answers.contains(&Answer::Gone) => answers.fill(Answer::Gone),
            _ => {}
        }
        Ok(answers)
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let key = &self.key(key);
        match self.bug {
            Bug::ReleaseDoesNothing => return Ok(Answer::Done),
            Bug::ReleasesByName => {
                self.store.steal(key.clone());
                return Ok(Answer::Done);
            }
            Bug::FenceIsLostOnRelease => drop(self.memory.lock().counters.remove(key)),
            Bug::LeastHoldingTimeIsIgnored => return self.store.lease_release(key, token, Duration::ZERO).await,
            Bug::LeastHoldingTimeKeepsTheToken if !min_hold.is_zero() => {
                let renewal = Renewal::new(key.clone(), token, min_hold);
                return Ok(self.store.lease_renew(&[renewal]).await?[0]);
            }
            Bug::LeastHoldingTimeIsCountedFromTheRelease if !min_hold.is_zero() => {
                let held_for = self.current(key).await.map(|it| it.info.held_for).unwrap_or_default();
                return self.store.lease_release(key, token, min_hold + held_for).await;
            }
            _ => {}
        }
        let answer = self.store.lease_release(key, token, min_hold).await?;
        let expired = self.current(key).await.is_none();
        Ok(match self.bug {
            Bug::ReleaseSaysDoneTwice => Answer::Done,
            Bug::ReleasesWhatExpired if expired => Answer::Done,
            _ => answer,
        })
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let limit = if self.has(Bug::ListsWithoutLimit) { u32::MAX } else { limit };
        match self.bug {
            Bug::ListsEverything => self.store.lease_list("", limit).await,
            Bug::ListsInReverse => {
                let mut held = self.store.lease_list(prefix, limit).await?;
                held.reverse();
                Ok(held)
            }
            Bug::ListsByPattern => {
                let plain: String = prefix.chars().take_while(|it| !"_%".contains(*it)).collect();
                self.store.lease_list(&plain, limit).await
            }
            _ => self.store.lease_list(prefix, limit).await,
        }
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        match self.bug {
            Bug::SweepsTheHeld => {
                for LeaseRecord { token, info } in self.store.lease_list("", limit).await? {
                    self.store.lease_release(&info.key, token, Duration::ZERO).await?;
                }
            }
            Bug::SweepsNothing => return Ok(0),
            Bug::SweepsWithoutLimit => return self.store.lease_sweep(retention, u32::MAX).await,
            Bug::FenceIsACounterThatASweepForgets => self.memory.lock().counters.clear(),
            _ => {}
        }
        self.store.lease_sweep(retention, limit).await
    }
}

/// Each bug, with a promise that it breaks.
const CAUGHT: [(Bug, &str); 48] = [
    (Bug::GrantsTwice, "a_held_lease_is_refused_and_stays_as_it_was"),
    (Bug::ChecksThenActs, "of_many_simultaneous_claims_one_is_granted"),
    (Bug::FenceRepeats, "fences_rise_across_release"),
    (Bug::FenceIsACounterThatASweepForgets, "fences_rise_across_a_sweep"),
    (Bug::FenceIsLostOnRelease, "fences_rise_across_release"),
    (Bug::ReleasesByName, "a_stale_token_changes_nothing"),
    (Bug::ReleasesWhatExpired, "a_stale_token_changes_nothing"),
    (Bug::ReleaseSaysDoneTwice, "a_lease_that_was_released_is_free"),
    (Bug::ReleaseDoesNothing, "a_lease_that_was_released_is_free"),
    (Bug::RenewsByName, "a_stale_token_changes_nothing"),
    (Bug::RenewalBringsBack, "a_lease_that_expired_is_not_renewed"),
    (Bug::RenewalShortens, "a_renewal_never_shortens_a_lease"),
    (Bug::RenewalDoesNothing, "a_renewal_makes_a_lease_live_longer_and_is_counted"),
    (Bug::RenewalsAreNotCounted, "a_renewal_makes_a_lease_live_longer_and_is_counted"),
    (Bug::RenewalsAreAnsweredInOrderOfKeys, "renewals_are_answered_each_in_its_place"),
    (Bug::RenewalsOfTheGoneAreLeftOut, "renewals_are_answered_each_in_its_place"),
    (Bug::OneGoneRenewalIsAllGone, "renewals_are_answered_each_in_its_place"),
    (Bug::SameTokenIsRefused, "the_token_that_holds_is_granted_again_with_the_same_fence"),
    (Bug::SameTokenGetsANewFence, "the_token_that_holds_is_granted_again_with_the_same_fence"),
    (Bug::SameTokenIsShortened, "the_token_that_holds_is_granted_again_with_the_same_fence"),
    (Bug::SameTokenKeepsItsExpiry, "the_token_that_holds_is_granted_again_with_the_same_fence"),
    (Bug::LeastHoldingTimeIsIgnored, "a_lease_stays_taken_by_nobody_for_its_least_holding_time"),
    (Bug::LeastHoldingTimeKeepsTheToken, "a_lease_stays_taken_by_nobody_for_its_least_holding_time"),
    (Bug::LeastHoldingTimeIsCountedFromTheRelease, "a_least_holding_time_that_is_over_holds_nothing"),
    (Bug::SaysThatItWasSentLater, "a_free_lease_is_granted_and_shown"),
    (Bug::PreviousIsNeverNamed, "fences_rise_across_expiry_and_the_new_holder_hears_of_the_old"),
    (Bug::PreviousIsNamedAfterARelease, "fences_rise_across_release"),
    (Bug::TakesSome, "several_leases_are_granted_all_or_none"),
    (Bug::TakesInAnotherOrder, "several_leases_are_granted_in_the_order_of_the_claims"),
    (Bug::BlamesTheFirst, "several_leases_are_granted_all_or_none"),
    (Bug::EachTakesTheHeld, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::EachIsAnsweredInAnotherOrder, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::EachSaysNothingOfWhatItTook, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::EachNamesNoPrevious, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::EachTakesForLess, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::EachGrantsAgainForNothing, "claims_sent_together_are_answered_each_in_its_place"),
    (Bug::LooksAtWhatWas, "a_lease_that_was_released_is_free"),
    (Bug::ListsByPattern, "a_prefix_is_text_and_not_a_pattern"),
    (Bug::ListsInReverse, "a_list_has_the_held_leases_of_a_prefix_in_order"),
    (Bug::ListsWithoutLimit, "a_list_has_the_held_leases_of_a_prefix_in_order"),
    (Bug::ListsEverything, "a_list_has_the_held_leases_of_a_prefix_in_order"),
    (Bug::SweepsTheHeld, "a_sweep_forgets_no_lease_that_is_held"),
    (Bug::SweepsWithoutLimit, "a_sweep_forgets_no_more_than_its_limit"),
    (Bug::SweepsNothing, "a_sweep_forgets_no_more_than_its_limit"),
    (Bug::IgnoresCase, "keys_that_differ_in_any_byte_are_different_leases"),
    (Bug::TrimsBlanks, "keys_that_differ_in_any_byte_are_different_leases"),
    (Bug::CutsKeys, "keys_that_differ_in_any_byte_are_different_leases"),
    (Bug::WaitsForTheHolder, "a_held_lease_is_refused_and_stays_as_it_was"),
];

#[tokio::test(start_paused = true)]
async fn the_store_in_memory_keeps_every_promise() {
    assert_eq!(conformance::run(async || MemoryStore::new()).await, conformance::PROMISES.len());
    let store = MemoryStore::new();
    conformance::run(async || store.client()).await;
}

#[tokio::test(start_paused = true)]
async fn every_planted_bug_is_caught_by_the_promise_that_it_breaks() {
    for (bug, promise) in CAUGHT {
        let broken = conformance::find(async || Mutant::new(bug)).await;
        assert!(broken.iter().any(|it| it.promise == promise), "{bug:?} breaks {promise}, and found was {broken:#?}");
    }
    println!("{} planted bugs caught", CAUGHT.len());
}

#[tokio::test(start_paused = true)]
async fn every_promise_is_broken_by_some_bug() {
    let mut unbroken: Vec<_> = conformance::PROMISES.to_vec();
    for (bug, _) in CAUGHT {
        let broken = conformance::find(async || Mutant::new(bug)).await;
        unbroken.retain(|it| broken.iter().all(|broken| broken.promise != *it));
    }
    assert_eq!(unbroken, [""; 0], "no planted bug breaks these, so they may say nothing");
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "a renewal never shortens a lease")]
async fn a_run_panics_with_the_promise() {
    conformance::run(async || Mutant::new(Bug::RenewalShortens)).await;
}
