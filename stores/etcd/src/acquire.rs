//! Taking leases.
//!
//! A claim is a key `name/token`. The claim whose key was created first holds the lease, as in etcd's own
//! `concurrency.Mutex`. A claim that does not wait creates its key only if there is none, in one transaction. A claim
//! that waits creates it at once, and holds the lease when no older key is left.

use std::{sync::Arc, time::Duration};

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnResponse,
};
use lockkit::{
    Error, Fault, Result,
    store::{Acquired, AcquiredAll, Claim, Grant, Previous, Token},
};
use tokio::time::Instant;

use crate::{
    claims::Claimed,
    layout::{Place, Record, SPARE_FENCES, State, fence},
    members::{Members, Trouble},
    session::Session,
    store::{Inner, failed, kvs},
};

const DOING: &str = "acquiring lease";

/// How often a claim is sent again because something changed on the way.
const ROUNDS: usize = 8;

/// How many claims one transaction takes: etcd allows 128 operations, and each claim needs three.
const CHUNK: usize = 40;

/// What one transaction has brought.
enum Step {
    Answer(Acquired),
    /// Something changed on the way.
    Again,
}

/// One claim on its way.
struct Asking<'c> {
    claim: &'c Claim,
    place: Arc<Place>,
    path: String,
    record: String,
    sent: Instant,
    /// The revision of the record of the last holder that does not stand in the way. `None` if none does.
    last: Option<i64>,
}

impl<'c> Asking<'c> {
    fn new(claim: &'c Claim, place: Arc<Place>, sent: Instant, waits: bool) -> Self {
        let record = Record::now(State::Held, claim.token, claim.ttl, &claim.holder).text();
        Self { path: place.path(claim.token), claim, place, record, sent, last: waits.then_some(0) }
    }

    /// The claim's key exists since this revision.
    fn since(&mut self, revision: i64) {
        let record = Record::now(State::Held, self.claim.token, self.claim.ttl, &self.claim.holder);
        self.record = Record { revision, ..record }.text();
    }

    /// What a grant reads and writes: the last holder, the record of this one, and the key of the claim.
    fn grant(&self, session: &Session) -> [TxnOp; 3] {
        let Place { last, .. } = &*self.place;
        [
            TxnOp::get(&**last, None),
            TxnOp::put(&**last, &*self.record, None),
            TxnOp::put(&*self.path, &*self.record, Some(PutOptions::new().with_lease(session.id))),
        ]
    }

    /// No claim is there, of this process or another.
    fn is_free(&self) -> Compare {
        Compare::create_revision(&*self.place.dir, CompareOp::Equal, 0).with_prefix()
    }

    /// The last holder, if it did not release the lease, does not trust it any more.
    fn is_over(&self) -> Option<Compare> {
        Some(Compare::mod_revision(&*self.place.last, CompareOp::Equal, self.last?))
    }

    fn last(&self) -> TxnOp {
        TxnOp::get(&*self.place.last, None)
    }

    /// The oldest claim.
    fn first(&self) -> TxnOp {
        TxnOp::get(&*self.place.dir, Some(oldest()))
    }

    fn own(&self) -> TxnOp {
        TxnOp::get(&*self.path, Some(GetOptions::new().with_keys_only()))
    }

    fn granted(&self, revision: i64, session: &Session, last: &[KeyValue]) -> Acquired {
        let mut grant = Grant::from(fence(revision)).after(previous(last, self.claim.token));
        grant.spare_fences = SPARE_FENCES;
        let left = session.until().saturating_duration_since(self.sent);
        grant.ttl = Some(left).filter(|it| *it < self.claim.ttl);
        Acquired::Granted(grant)
    }
}

/// Selects the oldest key of a range.
pub(crate) fn oldest() -> GetOptions {
    GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend).with_limit(1)
}

/// No late request that was given up creates a key.
pub(crate) fn is_current(session: &Session) -> Compare {
    Compare::mod_revision(&*session.marker, CompareOp::Equal, session.marker_revision())
}

pub(crate) fn marker(session: &Session) -> TxnOp {
    TxnOp::get(&*session.marker, Some(GetOptions::new().with_keys_only()))
}

pub(crate) fn note_marker(session: &Session, read: &[KeyValue]) {
    session.set_marker_revision(read.first().map_or(0, KeyValue::mod_revision));
}

/// The last holder, if it did not release the lease.
fn previous(last: &[KeyValue], token: Token) -> Option<Previous> {
    let kv = last.first()?;
    let record = Record::parse(kv.value()).filter(|it| it.token != token)?;
    // The time of the last renewal is not in etcd, so this is the longest that it can be.
    let expired_for = record.age().saturating_sub(record.ttl);
    let revision = if record.revision == 0 { kv.mod_revision() } else { record.revision };
    Some(Previous::new(record.holder, fence(revision), expired_for))
}

impl Inner {
    pub(crate) async fn acquire(self: &Arc<Self>, claim: &Claim) -> Result<Acquired> {
        let err = |err| failed(DOING, &claim.key, err);
        let (place, sent) = (self.place(DOING, &claim.key)?, Instant::now());
        let mut asking = Asking::new(claim, place, sent, self.waits(&self.members()).await);
        for _ in 0..ROUNDS {
            let members = self.members();
            let session = self.sessions.get(&members, claim.ttl).await.map_err(err)?;
            let known = self.claims.get(claim.token).and_then(|it| it.revision());
            let step = match known {
                Some(revision) => {
                    asking.since(revision);
                    self.claim_again(&members, &session, &mut asking, revision).await
                }
                None => self.enter(&members, &session, &mut asking).await,
            };
            match step {
                Ok(Step::Answer(answer)) => return Ok(answer),
                Ok(Step::Again) => {}
                Err(Trouble::NoLease) => self.sessions.retire(&members, &session).await.map_err(err)?,
                Err(trouble) => return Err(err(trouble)),
            }
        }
        Err(unsettled(claim))
    }

    /// Creates the key of the claim: if the lease is free or the claim waits.
    async fn enter(&self, members: &Members, session: &Arc<Session>, asking: &mut Asking<'_>) -> Result<Step, Trouble> {
        let Asking { claim, place, path, record, .. } = &*asking;
        let token = claim.token;
        if !self.claims.ask(place, token, session, claim.ttl, record) {
            return Ok(Step::Answer(Acquired::Held { free_in: None }));
        }
        let line_up = if claim.queue {
            let waiting = Record::now(State::Waiting, token, claim.ttl, &claim.holder).text();
            let put = TxnOp::put(&**path, waiting, Some(PutOptions::new().with_lease(session.id)));
            let is_new = Compare::create_revision(&**path, CompareOp::Equal, 0);
            TxnOp::txn(Txn::new().when([is_new, is_current(session)]).and_then([put]))
        } else {
            marker(session)
        };
        let when = [asking.is_free(), is_current(session)].into_iter().chain(asking.is_over());
        let txn = Txn::new().when(when.collect::<Vec<_>>()).and_then(asking.grant(session)).or_else([
            line_up,
            asking.own(),
            asking.first(),
            marker(session),
            asking.last(),
        ]);
        let (answer, was_sent_once) = self.txn_counted(members, txn).await?;
        if was_sent_once {
            self.claims.settled(token, session);
        }
        let answers = answer.op_responses();
        if answer.succeeded() {
            let revision = revision(&answer);
            let is_wanted = self.claims.answered(token, Some(revision));
            let is_held = is_wanted && self.claims.granted(token, revision, asking.sent);
            let granted = asking.granted(revision, session, kvs(answers.first()));
            self.lost.forget(&asking.claim.key);
            return Ok(Step::Answer(if is_held { granted } else { Acquired::Held { free_in: None } }));
        }
        let [_, own, first, marker, last] = &*answers else { return Ok(Step::Again) };
        let own = kvs(Some(own)).first().map(KeyValue::create_revision);
        let is_wanted = self.claims.answered(token, own);
        note_marker(session, kvs(Some(marker)));
        let first = kvs(Some(first)).first();
        // Nothing else stands in the way.
        if is_wanted
            && own == first.map(KeyValue::create_revision)
            && let Some(left) = self.last_is_over(asking, kvs(Some(last)))
        {
            if !asking.claim.queue {
                self.claims.refused(token);
            }
            return Ok(Step::Answer(Acquired::Held { free_in: Some(left) }));
        }
        match (own, first) {
            _ if !is_wanted => Ok(Step::Answer(Acquired::Held { free_in: None })),
            // The key exists: from this transaction or from one whose answer was lost.
            (Some(own), Some(first)) if own == first.create_revision() => Ok(Step::Again),
            (Some(_), Some(first)) => Ok(Step::Answer(self.held(asking.claim, first))),
            (None, Some(first)) if !asking.claim.queue => {
                self.claims.refused(token);
                Ok(Step::Answer(self.held(asking.claim, first)))
            }
            // The marker was written for a request that was given up.
            _ => Ok(Step::Again),
        }
    }

    /// The key of the claim exists: takes the lease if it is the oldest.
    async fn claim_again(
        &self,
        members: &Members,
        session: &Arc<Session>,
        asking: &mut Asking<'_>,
        revision: i64,
    ) -> Result<Step, Trouble> {
        let Asking { claim, place, path, record, sent, .. } = &*asking;
        let token = claim.token;
        if !self.claims.again(token, session, claim.ttl, record) {
            return Ok(Step::Answer(Acquired::Held { free_in: None }));
        }
        let exists = Compare::create_revision(&**path, CompareOp::Equal, revision);
        let is_first = Compare::create_revision(&*place.dir, CompareOp::Greater, revision - 1).with_prefix();
        let when = [exists, is_first, is_current(session)].into_iter().chain(asking.is_over());
        let txn = Txn::new().when(when.collect::<Vec<_>>()).and_then(asking.grant(session)).or_else([
            asking.own(),
            asking.first(),
            marker(session),
            asking.last(),
        ]);
        let (answer, was_sent_once) = self.txn_counted(members, txn).await?;
        if was_sent_once {
            self.claims.settled(token, session);
        }
        let answers = answer.op_responses();
        if answer.succeeded() {
            self.claims.moved(token, session);
            let is_held = self.claims.granted(token, revision, *sent);
            let granted = asking.granted(revision, session, kvs(answers.first()));
            self.lost.forget(&asking.claim.key);
            return Ok(Step::Answer(if is_held { granted } else { Acquired::Held { free_in: None } }));
        }
        let own = kvs(answers.first()).first().map(KeyValue::create_revision);
        let Some(first) = kvs(answers.get(1)).first().filter(|_| own == Some(revision)) else {
            // The place is lost: the etcd lease has ended, or somebody deleted the key.
            self.claims.answered(token, own);
            return Ok(Step::Again);
        };
        note_marker(session, kvs(answers.get(2)));
        if first.create_revision() == revision {
            self.claims.touch(&asking.claim.key);
            return Ok(match self.last_is_over(asking, kvs(answers.get(3))) {
                Some(left) => Step::Answer(Acquired::Held { free_in: Some(left) }),
                None => Step::Again,
            });
        }
        Ok(Step::Answer(self.held(asking.claim, first)))
    }

    /// Nothing but the record of the last holder may stand in the way. Returns how long it does, or `None` if it does
    /// not.
    fn last_is_over(&self, asking: &mut Asking<'_>, last: &[KeyValue]) -> Option<Duration> {
        let revision = last.first().map_or(0, KeyValue::mod_revision);
        let record = last.first().and_then(|kv| Record::parse(kv.value()));
        let record = record.filter(|it| it.state == State::Held && it.token != asking.claim.token);
        let left = match record {
            // This process knows until when it trusts a lease of its own.
            Some(record) => match self.claims.get(record.token).filter(Claimed::held_once) {
                Some(own) => own.until.saturating_duration_since(Instant::now()),
                None => self.lost.seen(&asking.claim.key, revision, record.ttl),
            },
            None => Duration::ZERO,
        };
        if asking.last.is_some() && !left.is_zero() {
            return Some(left);
        }
        asking.last = asking.last.map(|_| revision);
        None
    }

    /// The answer to a claim that is not the first. Only of its own claims does this process know how long they last.
    fn held(&self, claim: &Claim, first: &KeyValue) -> Acquired {
        self.claims.touch(&claim.key);
        let own = Record::parse(first.value()).and_then(|it| self.claims.get(it.token));
        let own = own.filter(|it| it.held_since().is_some());
        Acquired::Held { free_in: own.map(|it| it.until.saturating_duration_since(Instant::now())) }
    }

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
            let releases: Vec<_> = claims[..grants.len()].iter().map(release_of).collect();
            let released = self.release_all(&releases).await;
            // The error of a claim is what the caller needs. What is not released here is removed in the background.
            return taken.and_then(|held| released.map(|_| held));
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
                Err(trouble) => return Err(err(trouble)),
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
        for Asking { claim, place, record, .. } in &*asking {
            if !self.claims.ask(place, claim.token, session, claim.ttl, record) {
                asking.iter().for_each(|it| self.claims.refused(it.claim.token));
                return Ok(Entered::Held(0, None));
            }
        }
        let when = asking.iter().map(Asking::is_free).chain(asking.iter().filter_map(Asking::is_over));
        let when: Vec<_> = when.chain([is_current(session)]).collect();
        let then: Vec<_> = asking.iter().flat_map(|it| it.grant(session)).collect();
        let read = asking.iter().flat_map(|it| [it.own(), it.first(), it.last()]);
        let otherwise: Vec<_> = [marker(session)].into_iter().chain(read).collect();
        let txn = Txn::new().when(when).and_then(then).or_else(otherwise);
        let (answer, was_sent_once) = self.txn_counted(members, txn).await?;
        if was_sent_once {
            asking.iter().for_each(|it| self.claims.settled(it.claim.token, session));
        }
        let answers = answer.op_responses();
        if answer.succeeded() {
            let revision = revision(&answer);
            let mut grants = Vec::with_capacity(asking.len());
            for (asking, answers) in asking.iter().zip(answers.chunks(3)) {
                let token = asking.claim.token;
                let is_wanted = self.claims.answered(token, Some(revision));
                if is_wanted
                    && self.claims.granted(token, revision, asking.sent)
                    && let Acquired::Granted(grant) = asking.granted(revision, session, kvs(answers.first()))
                {
                    grants.push(grant);
                }
            }
            if grants.len() == asking.len() {
                return Ok(Entered::Granted(grants));
            }
            // One has expired before the answer came. The others are removed.
            asking.iter().for_each(|it| drop(self.claims.end(it.claim.token)));
            return Ok(Entered::Held(0, None));
        }
        note_marker(session, kvs(answers.first()));
        let (mut own, mut held) = (0, None);
        for (at, (asking, answers)) in asking.iter_mut().zip(answers[1..].chunks(3)).enumerate() {
            let revision = kvs(answers.first()).first().map(KeyValue::create_revision);
            self.claims.answered(asking.claim.token, revision);
            match kvs(answers.get(1)).first() {
                Some(first) if Some(first.create_revision()) == revision => own += 1,
                Some(first) if held.is_none() => held = Some((at, self.held(asking.claim, first))),
                None if held.is_none() => {
                    let left = self.last_is_over(asking, kvs(answers.get(2)));
                    held = left.map(|left| (at, Acquired::Held { free_in: Some(left) }));
                }
                _ => {}
            }
        }
        if own == asking.len() {
            return Ok(Entered::Before);
        }
        if own > 0 && held.is_some() {
            // A request that was given up has taken some of them.
            asking.iter().for_each(|it| drop(self.claims.end(it.claim.token)));
        } else if held.is_some() {
            asking.iter().for_each(|it| self.claims.refused(it.claim.token));
        }
        Ok(match held {
            Some((at, Acquired::Held { free_in })) => Entered::Held(at, free_in),
            _ => Entered::Again,
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
}

/// What one transaction for several leases has brought.
enum Entered {
    Granted(Vec<Grant>),
    /// The claim at this place is refused, and all others with it.
    Held(usize, Option<Duration>),
    /// All keys were there before.
    Before,
    Again,
}

fn release_of(claim: &Claim) -> lockkit::store::Release {
    lockkit::store::Release::new(&claim.key, claim.token, Duration::ZERO)
}

fn revision(answer: &TxnResponse) -> i64 {
    answer.header().map_or(0, etcd_client::ResponseHeader::revision)
}

fn unsettled(claim: &Claim) -> Error {
    let what = "the claim was answered by a change of its etcd lease each time";
    Error::database(DOING, &claim.key, Fault::Unavailable, std::io::Error::new(std::io::ErrorKind::TimedOut, what))
}
