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

use std::{collections::BTreeMap, time::Duration};

use super::{
    LeaseRequest,
    claim::{Attempt, attempt},
    mode::MAX_PERMITS,
    pending::Pending,
    shared::TRIES,
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
        let prefix = format!("{}/permit/", self.key);
        for _ in 0..TRIES {
            let missing = take.saturating_sub(pending.gathered());
            let held = self.list(&prefix, MAX_PERMITS).await?;
            let number = |key: &Key| key.strip_prefix(&*prefix)?.parse().ok().filter(|it| *it < of);
            let taken: BTreeMap<u32, Duration> =
                held.iter().filter_map(|it| Some((number(&it.info.key)?, it.info.expires_in))).collect();
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
