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
    attempt::{Attempt, attempt},
    held::Lease,
    place::Place,
    request::LeaseRequest,
    shared::{MAX_PERMITS, TRIES},
};
use crate::{
    error::Result,
    key::Key,
    lease::{
        store::{LeaseStore, Token},
        wait::Turn,
    },
};

impl<S: LeaseStore, L> LeaseRequest<S, L> {
    /// Tries to take all of the permits. `place` has the permits that were granted before.
    pub(super) async fn try_permits(&self, place: &Place<S>, of: u32, take: u32) -> Result<Turn<Vec<Lease<S>>>> {
        let turn = self.try_missing(place, of, take).await?;
        // Without the gather lease the request keeps no permits. Otherwise it and the gathering request could each wait
        // for permits of the other.
        if !matches!(turn, Turn::Done(_)) && !place.has_gate() {
            drop(place.take_gathered());
        }
        Ok(turn)
    }

    async fn try_missing(&self, place: &Place<S>, of: u32, take: u32) -> Result<Turn<Vec<Lease<S>>>> {
        let prefix = format!("{}/permit/", self.key);
        for _ in 0..TRIES {
            let missing = take.saturating_sub(place.gathered());
            let held = self.list(&prefix, MAX_PERMITS).await?;
            let number = |key: &Key| key.strip_prefix(&*prefix)?.parse().ok().filter(|it| *it < of);
            let taken: BTreeMap<u32, Duration> =
                held.iter().filter_map(|it| Some((number(&it.info.key)?, it.info.expires_in))).collect();
            let mut free: Vec<u32> = (0..of).filter(|it| !taken.contains_key(it)).collect();
            let is_enough = free.len() >= usize::try_from(missing).unwrap_or(usize::MAX);
            let free_in = taken.into_values().min();
            if !is_enough && !place.has_gate() {
                let gather = Key::from(format!("{prefix}gather"));
                if place.ticket().is_none() || gather.check().is_err() {
                    return Ok(Turn::Held { free_in });
                }
                match self.try_keys(place, &[gather], true).await? {
                    Turn::Done(gate) => gate.into_iter().for_each(|it| place.set_gate(it)),
                    turn => return Ok(turn),
                }
            }
            fastrand::shuffle(&mut free);
            free.truncate(usize::try_from(missing).unwrap_or(usize::MAX));
            if free.is_empty() {
                return Ok(Turn::Held { free_in });
            }
            let mut keys: Vec<Key> = free.iter().map(|it| format!("{prefix}{it}").into()).collect();
            keys.sort_unstable();
            keys.iter().try_for_each(Key::check)?;
            let claims = keys.iter().map(|it| self.claim(place, it, Token::random())).collect();
            match attempt(self.inner.clone(), claims, None, self.terms()).await? {
                Attempt::Granted(leases) => {
                    place.gather(leases);
                    // A permit that was gathered before may be lost by now.
                    if place.gathered() == take {
                        return Ok(Turn::Done(place.take_gathered()));
                    }
                }
                // Another request took one of the permits first.
                Attempt::Held { .. } => {}
                Attempt::Silent => return Ok(Turn::Silent),
            }
        }
        Ok(Turn::Held { free_in: None })
    }
}
