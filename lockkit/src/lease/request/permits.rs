//! Several permits of one semaphore together: all of them or none.
//!
//! If enough permits are free, they are taken at once. Otherwise a request keeps nothing at first. A request that has
//! waited long enough to have a ticket takes the lease `<key>/permit/gather`. Only one request at a time holds it, and
//! from then on keeps the permits that it gets. So requests for single permits do not starve it, and two gathering
//! requests never wait for each other.
//!
//! The permits that the gathering request waits for are held by requests that have all of theirs, so there is no cycle.
//! Gathered permits are idle until then, as with Tokio's semaphore. They are released when the request gives up or
//! loses the gather lease, and expire when its process dies. `try_acquire` never gathers.

use super::{
    LeaseRequest,
    claim::{Attempt, attempt},
    mode::MAX_PERMITS,
    pending::Pending,
    shared::{TRIES, taken},
};
use crate::lease::held::Lease;
use crate::{
    lease::{queue::wait::Outcome, store::LeaseStore},
    value::{error::Result, key::Key, token::Token},
};

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Tries to take all of the permits. `pending` has the permits that were granted before.
    pub(super) async fn try_permits(&self, pending: &Pending<S>, of: u32, take: u32) -> Result<Outcome<Vec<Lease<S>>>> {
        let outcome = self.try_missing(pending, of, take).await?;
        // Without the gather lease the request keeps no permits. Otherwise it and the gathering request could each wait
        // for permits of the other.
        if !matches!(outcome, Outcome::Done(_)) && !pending.has_gate() {
            drop(pending.take_gathered());
        }
        Ok(outcome)
    }

    async fn try_missing(&self, pending: &Pending<S>, of: u32, take: u32) -> Result<Outcome<Vec<Lease<S>>>> {
        let prefix = self.permits();
        for _ in 0..TRIES {
            let missing = take.saturating_sub(pending.gathered());
            let held = self.list(&prefix, MAX_PERMITS).await?;
            let taken = taken(&held, &prefix, of);
            let mut free: Vec<u32> = (0..of).filter(|it| !taken.contains_key(it)).collect();
            let is_enough = free.len() >= usize::try_from(missing).unwrap_or(usize::MAX);
            let free_in = taken.into_values().min();
            if !is_enough && !pending.has_gate() {
                let gather = Key::from(format!("{prefix}gather"));
                if pending.ticket().is_none() || gather.check().is_err() {
                    return Ok(Outcome::Held { free_in });
                }
                match self.try_keys(pending, &[gather], true).await? {
                    Outcome::Done(gate) => gate.into_iter().for_each(|it| pending.set_gate(it)),
                    outcome => return Ok(outcome),
                }
            }
            fastrand::shuffle(&mut free);
            free.truncate(usize::try_from(missing).unwrap_or(usize::MAX));
            if free.is_empty() {
                return Ok(Outcome::Held { free_in });
            }
            let mut keys: Vec<Key> = free.iter().map(|it| format!("{prefix}{it}").into()).collect();
            keys.sort_unstable();
            keys.iter().try_for_each(Key::check)?;
            let claims = keys.iter().map(|it| self.claim(pending, it, Token::random())).collect();
            match attempt(self.inner.clone(), claims, None, self.terms()).await? {
                Attempt::Granted(leases) => {
                    pending.gather(leases);
                    // A permit that was gathered before may be lost by now.
                    if pending.gathered() == take {
                        return Ok(Outcome::Done(pending.take_gathered()));
                    }
                }
                // Another request took one of the permits first.
                Attempt::Held { .. } => {}
                Attempt::Silent => return Ok(Outcome::Silent),
            }
        }
        Ok(Outcome::Held { free_in: None })
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::time::sleep;

    use super::*;
    use crate::{
        Leases,
        lease::store::{Acquired, Claim},
        testing::{MemoryStore, Operation},
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_request_keeps_the_permits_that_become_free_for_as_long_as_it_is_the_one_that_gathers() {
        let store = MemoryStore::new();
        let ttl = 3 * SECOND;
        let leases = || Leases::builder(store.client()).ttl(ttl).build().unwrap();
        let (here, there) = (leases(), leases());
        let others = async || there.semaphore("k", 3).try_acquire().await.unwrap();
        let mut held = Vec::new();
        for _ in 0..3 {
            held.extend(others().await);
        }
        let gathering = tokio::spawn(here.semaphore("k", 3).take(3).wait(60 * SECOND).acquire());
        sleep(SECOND).await;
        held.pop().unwrap().release().await.unwrap();
        sleep(SECOND).await;
        assert!(others().await.is_none(), "the request that waits for three has it");

        store.steal("k/permit/gather").unwrap();
        let claim = Claim::new("k/permit/gather", Token::random(), Arc::from("another"), 2 * ttl);
        assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
        sleep(ttl).await;
        held.push(others().await.expect("another request gathers"));

        sleep(2 * ttl).await;
        for lease in held {
            lease.release().await.unwrap();
            sleep(SECOND).await;
        }
        assert_eq!(gathering.await.unwrap().unwrap().leases().len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_single_attempt_takes_no_permit_that_it_would_have_to_give_back() {
        let leases = Leases::new(MemoryStore::new());
        let _held = leases.semaphore("k", 3).acquire().await.unwrap();
        let claims = || leases.store().faults().calls(Operation::Acquire);
        let before = claims();
        assert!(leases.semaphore("k", 3).take(3).try_acquire().await.unwrap().is_none());
        assert_eq!(claims(), before);
    }
}
