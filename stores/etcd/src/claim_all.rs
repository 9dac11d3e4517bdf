//! Claims to several leases: all or none.

use std::{sync::Arc, time::Duration};

use etcd_client::{KeyValue, Txn};
use lockkit::{
    Result,
    store::{Acquired, AcquiredAll, Claim, Grant, Release},
};
use tokio::time::Instant;

use crate::{
    claim::{ClaimRequest, DOING, ROUNDS, is_current, marker, note_marker, revision, unsettled},
    error::Failure,
    layout::check_last,
    members::Members,
    session::Session,
    store::{Shared, kvs},
};

/// How many claims one transaction takes: etcd allows 128 operations, and each claim needs three.
const CHUNK: usize = 40;

/// What one transaction for several leases has brought.
enum Entered {
    Granted(Vec<Grant>),
    /// The claim at this place is refused, and all others with it.
    Held(usize, Option<Duration>),
    /// All keys were there before.
    Before,
    Again,
}

impl Shared {
    pub(crate) async fn acquire_all(self: &Arc<Self>, claims: &[Claim]) -> Result<AcquiredAll> {
        if let [claim] = claims {
            return Ok(match self.acquire(claim).await? {
                Acquired::Granted(grant) => AcquiredAll::Granted(vec![grant]),
                Acquired::Held { free_in } => AcquiredAll::Held { key: claim.key.clone(), free_in },
            });
        }
        let mut grants = Vec::with_capacity(claims.len());
        for chunk in claims.chunks(CHUNK) {
            let taken = match self.acquire_chunk(chunk).await {
                Ok(AcquiredAll::Granted(taken)) => {
                    grants.extend(taken);
                    continue;
                }
                taken => taken,
            };
            let before: Vec<_> = claims[..grants.len()].iter().map(release_of).collect();
            let released = self.release_all(&before).await;
            // The error of a claim is what the caller needs. What is not released here is removed in the background.
            return taken.and_then(|held| released.map(|_| held));
        }
        Ok(AcquiredAll::Granted(grants))
    }

    /// Takes all of a few leases or none, in one transaction.
    async fn acquire_chunk(self: &Arc<Self>, claims: &[Claim]) -> Result<AcquiredAll> {
        let sent = Instant::now();
        let Some(first) = claims.first() else { return Ok(AcquiredAll::Granted(Vec::new())) };
        let err = |err: Failure| err.while_doing(DOING, &first.key);
        let waits = self.waits(&self.members()).await;
        let mut requests = Vec::with_capacity(claims.len());
        for claim in claims {
            requests.push(ClaimRequest::new(claim, self.place(DOING, &claim.key)?, sent, waits));
        }
        let ttl = claims.iter().map(|it| it.ttl).max().unwrap_or(Duration::ZERO);
        for _ in 0..ROUNDS {
            let members = self.members();
            let session = self.sessions.get(&members, ttl).await.map_err(err)?;
            match self.enter_all(&members, &session, &mut requests).await {
                Ok(Entered::Granted(grants)) => return Ok(AcquiredAll::Granted(grants)),
                Ok(Entered::Held(at, free_in)) => {
                    return Ok(AcquiredAll::Held { key: claims[at].key.clone(), free_in });
                }
                Ok(Entered::Before) => return self.acquire_again(claims).await,
                Ok(Entered::Again) => {}
                Err(Failure::NoLease) => self.sessions.retire(&members, &session).await.map_err(err)?,
                Err(failure) => {
                    if matches!(failure, Failure::Foreign(_)) {
                        let tokens: Vec<_> = claims.iter().map(|it| it.token).collect();
                        self.withdraw(&members, &tokens).await;
                    }
                    return Err(err(failure));
                }
            }
        }
        Err(unsettled(first))
    }

    async fn enter_all(
        &self,
        members: &Members,
        session: &Arc<Session>,
        requests: &mut [ClaimRequest<'_>],
    ) -> Result<Entered, Failure> {
        let is_current = is_current(session);
        for at in 0..requests.len() {
            let ClaimRequest { claim, place, path, record, .. } = &mut requests[at];
            let Some(noted) = self.claims.begin(place, claim.token, session, claim.ttl, record) else {
                self.refuse_all(requests);
                return Err(Failure::too_late());
            };
            *path = noted;
        }
        let when = requests.iter().map(ClaimRequest::is_free).chain(requests.iter().filter_map(ClaimRequest::is_over));
        let when: Vec<_> = when.chain([is_current]).collect();
        let then: Vec<_> = requests.iter().flat_map(|it| it.grant(session)).collect();
        let read = requests.iter().flat_map(|it| [it.own(), it.first(), it.last()]);
        let otherwise: Vec<_> = [marker(session)].into_iter().chain(read).collect();
        let txn = Txn::new().when(when).and_then(then).or_else(otherwise);
        let tokens: Vec<_> = requests.iter().map(|it| it.claim.token).collect();
        let answer = self.claim_txn(members, session, &tokens, txn).await;
        if answer.as_ref().is_err_and(Failure::left_nothing) {
            self.refuse_all(requests);
        }
        let answer = answer?;
        let answers = answer.op_responses();
        if answer.succeeded() {
            let revision = revision(&answer);
            let mut grants = Vec::with_capacity(requests.len());
            let mut foreign = Ok(());
            for (request, answers) in requests.iter().zip(answers.chunks(3)) {
                let token = request.claim.token;
                let is_wanted = self.claims.answered(token, Some(revision));
                foreign = foreign.and(check_last(kvs(answers.first())));
                if is_wanted
                    && self.claims.granted(token, revision, request.sent)
                    && let Acquired::Granted(grant) = request.granted(revision, session, kvs(answers.first()))
                {
                    grants.push(grant);
                }
            }
            foreign.map_err(Failure::Foreign)?;
            if grants.len() == requests.len() {
                return Ok(Entered::Granted(grants));
            }
            // One has expired before the answer came. The others are removed.
            self.end_all(requests);
            return Err(Failure::too_late());
        }
        note_marker(session, kvs(answers.first()));
        let (mut own, mut held) = (0, None);
        for (at, (request, answers)) in requests.iter_mut().zip(answers[1..].chunks(3)).enumerate() {
            let revision = kvs(answers.first()).first().map(KeyValue::create_revision);
            self.claims.answered(request.claim.token, revision);
            match kvs(answers.get(1)).first() {
                Some(first) if Some(first.create_revision()) == revision => own += 1,
                Some(first) if held.is_none() => held = Some((at, self.held(request, first))),
                None if held.is_none() => {
                    let left = self.last_is_over(request, kvs(answers.get(2)));
                    held = left.map(|left| (at, Ok(Acquired::Held { free_in: Some(left) })));
                }
                _ => {}
            }
        }
        if own == requests.len() {
            return Ok(Entered::Before);
        }
        if own > 0 && held.is_some() {
            // A request that was given up has taken some of them.
            self.end_all(requests);
        } else if held.is_some() {
            self.refuse_all(requests);
        }
        Ok(match held {
            Some((at, answer)) => match answer? {
                Acquired::Held { free_in } => Entered::Held(at, free_in),
                Acquired::Granted(_) => Entered::Again,
            },
            None => Entered::Again,
        })
    }

    /// All of these claims hold their leases already: an answer was lost, or the call is repeated.
    async fn acquire_again(self: &Arc<Self>, claims: &[Claim]) -> Result<AcquiredAll> {
        let mut grants = Vec::with_capacity(claims.len());
        for claim in claims {
            match self.acquire(claim).await? {
                Acquired::Granted(grant) => grants.push(grant),
                Acquired::Held { free_in } => {
                    let releases: Vec<_> = claims.iter().map(release_of).collect();
                    self.release_all(&releases).await?;
                    return Ok(AcquiredAll::Held { key: claim.key.clone(), free_in });
                }
            }
        }
        Ok(AcquiredAll::Granted(grants))
    }

    /// The claims were refused and left nothing behind.
    fn refuse_all(&self, requests: &[ClaimRequest<'_>]) {
        for ClaimRequest { claim, .. } in requests {
            self.claims.refused(claim.token);
        }
    }

    /// Gives up the claims. What is there is removed in the background.
    fn end_all(&self, requests: &[ClaimRequest<'_>]) {
        for ClaimRequest { claim, .. } in requests {
            self.claims.end(claim.token);
        }
    }
}

fn release_of(claim: &Claim) -> Release {
    Release::new(&claim.key, claim.token, Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::store::tests::{claim, client_at, keys, store_at, take, until};

    #[tokio::test]
    async fn claims_that_were_refused_together_are_forgotten_and_the_first_in_the_way_is_named() {
        let server = Server::alone();
        let (store, other) = (store_at(&server).await, store_at(&server).await);
        for key in ["b", "c"] {
            take(&other, &claim(key)).await;
        }
        let claims = ["a", "b", "c"].map(claim);
        let answer = store.acquire_all(&claims).await.expect("it is answered");
        assert!(matches!(&answer, AcquiredAll::Held { key, .. } if key == "b"), "{answer:?}");
        assert!(claims.iter().all(|it| store.claims.get(it.token).is_none()));
    }

    #[tokio::test]
    async fn claims_of_which_some_were_taken_before_are_all_removed_if_another_is_refused() {
        let server = Server::alone();
        let (store, other, client) = (store_at(&server).await, store_at(&server).await, client_at(&server).await);
        let claims = ["a", "b"].map(claim);
        // As by a call that was given up.
        take(&store, &claims[0]).await;
        take(&other, &claim("b")).await;
        let answer = store.acquire_all(&claims).await.expect("it is answered");
        assert!(matches!(&answer, AcquiredAll::Held { key, .. } if key == "b"), "{answer:?}");
        until("nothing is left", async || keys(&client, "lockkit/lock/a/").await == 0).await;
    }
}
