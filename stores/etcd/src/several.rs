//! Taking several leases: all or none.

use std::{sync::Arc, time::Duration};

use etcd_client::{KeyValue, Txn};
use lockkit::{
    Result,
    store::{Acquired, AcquiredAll, Claim, Grant, Release},
};
use tokio::time::Instant;

use crate::{
    acquire::{Asking, DOING, ROUNDS, is_current, marker, note_marker, revision, unsettled},
    layout::check_last,
    members::{Members, Trouble},
    session::Session,
    store::{Inner, failed, kvs},
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

impl Inner {
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
            let given_back = self.release_all(&before).await;
            // The error of a claim is what the caller needs. What is not released here is removed in the background.
            return taken.and_then(|held| given_back.map(|_| held));
        }
        Ok(AcquiredAll::Granted(grants))
    }

    /// Takes all of a few leases or none, in one transaction.
    async fn acquire_chunk(self: &Arc<Self>, claims: &[Claim]) -> Result<AcquiredAll> {
        let sent = Instant::now();
        let Some(first) = claims.first() else { return Ok(AcquiredAll::Granted(Vec::new())) };
        let err = |err| failed(DOING, &first.key, err);
        let waits = self.waits(&self.members()).await;
        let mut asking = Vec::with_capacity(claims.len());
        for claim in claims {
            asking.push(Asking::new(claim, self.place(DOING, &claim.key)?, sent, waits));
        }
        let ttl = claims.iter().map(|it| it.ttl).max().unwrap_or(Duration::ZERO);
        for _ in 0..ROUNDS {
            let members = self.members();
            let session = self.sessions.get(&members, ttl).await.map_err(err)?;
            match self.enter_all(&members, &session, &mut asking).await {
                Ok(Entered::Granted(grants)) => return Ok(AcquiredAll::Granted(grants)),
                Ok(Entered::Held(at, free_in)) => {
                    return Ok(AcquiredAll::Held { key: claims[at].key.clone(), free_in });
                }
                Ok(Entered::Before) => return self.acquire_again(claims).await,
                Ok(Entered::Again) => {}
                Err(Trouble::NoLease) => self.sessions.retire(&members, &session).await.map_err(err)?,
                Err(trouble) => {
                    if matches!(trouble, Trouble::Foreign(_)) {
                        let tokens: Vec<_> = claims.iter().map(|it| it.token).collect();
                        self.withdraw(&members, &tokens).await;
                    }
                    return Err(err(trouble));
                }
            }
        }
        Err(unsettled(first))
    }

    async fn enter_all(
        &self,
        members: &Members,
        session: &Arc<Session>,
        asking: &mut [Asking<'_>],
    ) -> Result<Entered, Trouble> {
        let is_current = is_current(session);
        for at in 0..asking.len() {
            let Asking { claim, place, path, record, .. } = &mut asking[at];
            let Some(noted) = self.claims.ask(place, claim.token, session, claim.ttl, record) else {
                self.refuse_all(asking);
                return Err(Trouble::too_late());
            };
            *path = noted;
        }
        let when = asking.iter().map(Asking::is_free).chain(asking.iter().filter_map(Asking::is_over));
        let when: Vec<_> = when.chain([is_current]).collect();
        let then: Vec<_> = asking.iter().flat_map(|it| it.grant(session)).collect();
        let read = asking.iter().flat_map(|it| [it.own(), it.first(), it.last()]);
        let otherwise: Vec<_> = [marker(session)].into_iter().chain(read).collect();
        let txn = Txn::new().when(when).and_then(then).or_else(otherwise);
        let tokens: Vec<_> = asking.iter().map(|it| it.claim.token).collect();
        let answer = self.claim_txn(members, session, &tokens, txn).await;
        if answer.as_ref().is_err_and(Trouble::left_nothing) {
            self.refuse_all(asking);
        }
        let answer = answer?;
        let answers = answer.op_responses();
        if answer.succeeded() {
            let revision = revision(&answer);
            let mut grants = Vec::with_capacity(asking.len());
            let mut foreign = Ok(());
            for (asking, answers) in asking.iter().zip(answers.chunks(3)) {
                let token = asking.claim.token;
                let is_wanted = self.claims.answered(token, Some(revision));
                foreign = foreign.and(check_last(kvs(answers.first())));
                if is_wanted
                    && self.claims.granted(token, revision, asking.sent)
                    && let Acquired::Granted(grant) = asking.granted(revision, session, kvs(answers.first()))
                {
                    grants.push(grant);
                }
            }
            foreign.map_err(Trouble::Foreign)?;
            if grants.len() == asking.len() {
                return Ok(Entered::Granted(grants));
            }
            // One has expired before the answer came. The others are removed.
            self.end_all(asking);
            return Err(Trouble::too_late());
        }
        note_marker(session, kvs(answers.first()));
        let (mut own, mut held) = (0, None);
        for (at, (asking, answers)) in asking.iter_mut().zip(answers[1..].chunks(3)).enumerate() {
            let revision = kvs(answers.first()).first().map(KeyValue::create_revision);
            self.claims.answered(asking.claim.token, revision);
            match kvs(answers.get(1)).first() {
                Some(first) if Some(first.create_revision()) == revision => own += 1,
                Some(first) if held.is_none() => held = Some((at, self.held(asking, first))),
                None if held.is_none() => {
                    let left = self.last_is_over(asking, kvs(answers.get(2)));
                    held = left.map(|left| (at, Ok(Acquired::Held { free_in: Some(left) })));
                }
                _ => {}
            }
        }
        if own == asking.len() {
            return Ok(Entered::Before);
        }
        if own > 0 && held.is_some() {
            // A request that was given up has taken some of them.
            self.end_all(asking);
        } else if held.is_some() {
            self.refuse_all(asking);
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
    fn refuse_all(&self, asking: &[Asking<'_>]) {
        for Asking { claim, .. } in asking {
            self.claims.refused(claim.token);
        }
    }

    /// Gives up the claims. What is there is removed in the background.
    fn end_all(&self, asking: &[Asking<'_>]) {
        for Asking { claim, .. } in asking {
            self.claims.end(claim.token);
        }
    }
}

fn release_of(claim: &Claim) -> Release {
    Release::new(&claim.key, claim.token, Duration::ZERO)
}
