//! Claims to one lease.
//!
//! A claim is a key `name/token-number`. The claim whose key was created first holds the lease, as in etcd's own
//! `concurrency.Mutex`. A claim that does not wait creates its key only if there is none, in one transaction. A claim
//! that waits creates it at once, and holds the lease when no older key is left.

use std::{sync::Arc, time::Duration};

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnResponse,
};
use lockkit::{
    Error, Fault, Result,
    store::{Acquired, Claim, Grant, Previous, Token},
};
use tokio::time::Instant;

use crate::{
    claimed::Claimed,
    error::Failure,
    layout::{Place, Record, SPARE_FENCES, State, check_claim, check_last, fence, put_last},
    members::Members,
    session::Session,
    store::{Shared, kvs},
};

pub(crate) const DOING: &str = "acquiring lease";

/// How often a claim is sent again because something changed on the way.
pub(crate) const ROUNDS: usize = 8;

/// What one transaction has brought.
enum Step {
    Answer(Acquired),
    /// Something changed on the way.
    Again,
}

/// One claim on its way.
pub(crate) struct ClaimRequest<'c> {
    pub(crate) claim: &'c Claim,
    pub(crate) place: Arc<Place>,
    /// Its key, once it is noted.
    pub(crate) path: String,
    pub(crate) record: String,
    pub(crate) sent: Instant,
    /// The revision of the record of the last holder that does not stand in the way. `None` if none does.
    last: Option<i64>,
}

impl<'c> ClaimRequest<'c> {
    pub(crate) fn new(claim: &'c Claim, place: Arc<Place>, sent: Instant, waits: bool) -> Self {
        let record = Record::now(State::Held, claim.token, claim.ttl, &claim.holder).text();
        Self { claim, place, path: String::new(), record, sent, last: waits.then_some(0) }
    }

    /// The claim's key exists since this revision.
    fn since(&mut self, revision: i64) {
        if let Some(record) = Record::parse(self.record.as_bytes()) {
            self.record = Record { revision, ..record }.text();
        }
    }

    /// What a grant reads and writes: the last holder, the record of this one, and the key of the claim.
    pub(crate) fn grant(&self, session: &Session) -> [TxnOp; 3] {
        let Place { last, .. } = &*self.place;
        [
            TxnOp::get(&**last, None),
            put_last(last, &self.record),
            TxnOp::put(&*self.path, &*self.record, Some(PutOptions::new().with_lease(session.id))),
        ]
    }

    /// No claim is there, of this process or another.
    pub(crate) fn is_free(&self) -> Compare {
        Compare::create_revision(&*self.place.dir, CompareOp::Equal, 0).with_prefix()
    }

    /// The last holder, if it did not release the lease, does not trust it any more.
    pub(crate) fn is_over(&self) -> Option<Compare> {
        Some(Compare::mod_revision(&*self.place.last, CompareOp::Equal, self.last?))
    }

    pub(crate) fn last(&self) -> TxnOp {
        TxnOp::get(&*self.place.last, None)
    }

    /// The oldest claim.
    pub(crate) fn first(&self) -> TxnOp {
        TxnOp::get(&*self.place.dir, Some(oldest()))
    }

    pub(crate) fn own(&self) -> TxnOp {
        TxnOp::get(&*self.path, Some(GetOptions::new().with_keys_only()))
    }

    pub(crate) fn granted(&self, revision: i64, session: &Session, last: &[KeyValue]) -> Acquired {
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

impl Shared {
    pub(crate) async fn acquire(self: &Arc<Self>, claim: &Claim) -> Result<Acquired> {
        let err = |err: Failure| err.while_doing(DOING, &claim.key);
        let (place, sent) = (self.place(DOING, &claim.key)?, Instant::now());
        let mut request = ClaimRequest::new(claim, place, sent, self.waits(&self.members()).await);
        for _ in 0..ROUNDS {
            let members = self.members();
            let session = self.sessions.get(&members, claim.ttl).await.map_err(err)?;
            let known = self.claims.get(claim.token).and_then(|it| Some((it.revision()?, it.written)));
            let step = match known {
                Some((revision, written)) => {
                    request.since(revision);
                    self.claim_again(&members, &session, &mut request, revision, written).await
                }
                None => self.enter(&members, &session, &mut request).await,
            };
            match step {
                Ok(Step::Answer(answer)) => return Ok(answer),
                Ok(Step::Again) => {}
                Err(Failure::NoLease) => self.sessions.retire(&members, &session).await.map_err(err)?,
                Err(failure) => {
                    if matches!(failure, Failure::Foreign(_)) {
                        self.withdraw(&members, &[claim.token]).await;
                    }
                    return Err(err(failure));
                }
            }
        }
        Err(unsettled(claim))
    }

    /// Creates the key of the claim: if the lease is free or the claim waits.
    async fn enter(
        &self,
        members: &Members,
        session: &Arc<Session>,
        request: &mut ClaimRequest<'_>,
    ) -> Result<Step, Failure> {
        let token = request.claim.token;
        // Before the claim is noted: a call that gives it up from then on writes the marker.
        let is_current = is_current(session);
        let Some(path) = self.claims.begin(&request.place, token, session, request.claim.ttl, &request.record) else {
            return Err(Failure::too_late());
        };
        request.path = path;
        let ClaimRequest { claim, path, .. } = &*request;
        let enqueue = if claim.queue {
            let waiting = Record::now(State::Waiting, token, claim.ttl, &claim.holder).text();
            let put = TxnOp::put(&**path, waiting, Some(PutOptions::new().with_lease(session.id)));
            let is_new = Compare::create_revision(&**path, CompareOp::Equal, 0);
            TxnOp::txn(Txn::new().when([is_new, is_current.clone()]).and_then([put]))
        } else {
            marker(session)
        };
        let when = [request.is_free(), is_current].into_iter().chain(request.is_over());
        let txn = Txn::new().when(when.collect::<Vec<_>>()).and_then(request.grant(session)).or_else([
            enqueue,
            request.own(),
            request.first(),
            marker(session),
            request.last(),
        ]);
        let answer = self.claim_txn(members, session, &[token], txn).await;
        if answer.as_ref().is_err_and(Failure::left_nothing) {
            self.claims.refused(token);
        }
        let answer = answer?;
        let answers = answer.op_responses();
        if answer.succeeded() {
            let (revision, last) = (revision(&answer), kvs(answers.first()));
            let is_wanted = self.claims.answered(token, Some(revision));
            check_last(last).map_err(Failure::Foreign)?;
            let is_held = is_wanted && self.claims.granted(token, revision, request.sent);
            self.lost.forget(&request.claim.key);
            let granted = request.granted(revision, session, last);
            return is_held.then_some(Step::Answer(granted)).ok_or_else(Failure::too_late);
        }
        let [_, own, first, marker, last] = &*answers else { return Ok(Step::Again) };
        let own = kvs(Some(own)).first().map(KeyValue::create_revision);
        let is_wanted = self.claims.answered(token, own);
        note_marker(session, kvs(Some(marker)));
        let first = kvs(Some(first)).first();
        // Nothing else stands in the way.
        if is_wanted
            && own == first.map(KeyValue::create_revision)
            && let Some(left) = self.last_is_over(request, kvs(Some(last)))
        {
            if !request.claim.queue {
                self.claims.refused(token);
            }
            return Ok(Step::Answer(Acquired::Held { free_in: Some(left) }));
        }
        match (own, first) {
            _ if !is_wanted => Err(Failure::too_late()),
            // The key exists: from this transaction or from one whose answer was lost.
            (Some(own), Some(first)) if own == first.create_revision() => Ok(Step::Again),
            (Some(_), Some(first)) => self.held(request, first).map(Step::Answer),
            (None, Some(first)) if !request.claim.queue => {
                self.claims.refused(token);
                self.held(request, first).map(Step::Answer)
            }
            // The marker was written for a request that was given up.
            _ => Ok(Step::Again),
        }
    }

    /// The key of the claim exists: takes the lease if it is the oldest. A late request does not move a key that was
    /// written after `written`.
    async fn claim_again(
        &self,
        members: &Members,
        session: &Arc<Session>,
        request: &mut ClaimRequest<'_>,
        revision: i64,
        written: i64,
    ) -> Result<Step, Failure> {
        let token = request.claim.token;
        let is_current = is_current(session);
        let Some(path) = self.claims.again(token, session, request.claim.ttl, &request.record) else {
            return Err(Failure::too_late());
        };
        request.path = path;
        let ClaimRequest { place, path, sent, .. } = &*request;
        let exists = Compare::create_revision(&**path, CompareOp::Equal, revision);
        let is_same = Compare::mod_revision(&**path, CompareOp::Equal, written);
        let is_first = Compare::create_revision(&*place.dir, CompareOp::Greater, revision - 1).with_prefix();
        let when = [exists, is_same, is_first, is_current].into_iter().chain(request.is_over());
        let txn = Txn::new().when(when.collect::<Vec<_>>()).and_then(request.grant(session)).or_else([
            request.own(),
            request.first(),
            marker(session),
            request.last(),
        ]);
        let answer = self.claim_txn(members, session, &[token], txn).await?;
        let answers = answer.op_responses();
        if answer.succeeded() {
            let last = kvs(answers.first());
            self.claims.moved(token, session, self::revision(&answer));
            check_last(last).map_err(Failure::Foreign)?;
            let is_held = self.claims.granted(token, revision, *sent);
            self.lost.forget(&request.claim.key);
            let granted = request.granted(revision, session, last);
            return is_held.then_some(Step::Answer(granted)).ok_or_else(Failure::too_late);
        }
        let own = kvs(answers.first()).first();
        if let Some(own) = own {
            self.claims.written(token, own.mod_revision());
        }
        let own = own.map(KeyValue::create_revision);
        let Some(first) = kvs(answers.get(1)).first().filter(|_| own == Some(revision)) else {
            // The place is lost: the etcd lease has ended, or another client deleted the key.
            self.claims.answered(token, own);
            return Ok(Step::Again);
        };
        note_marker(session, kvs(answers.get(2)));
        if first.create_revision() == revision {
            self.claims.touch(&request.claim.key, b"");
            return Ok(match self.last_is_over(request, kvs(answers.get(3))) {
                Some(left) => Step::Answer(Acquired::Held { free_in: Some(left) }),
                None => Step::Again,
            });
        }
        self.held(request, first).map(Step::Answer)
    }

    /// Sends the transaction of these claims, and notes whether nothing more will come of it.
    pub(crate) async fn claim_txn(
        &self,
        members: &Members,
        session: &Arc<Session>,
        tokens: &[Token],
        txn: Txn,
    ) -> Result<TxnResponse, Failure> {
        let answer = self.txn_counted(members, txn).await;
        let is_settled = match &answer {
            Ok((_, was_sent_once)) => *was_sent_once,
            Err(failure) => failure.left_nothing(),
        };
        if is_settled {
            for token in tokens {
                self.claims.settled(*token, session);
            }
        }
        answer.map(|(answer, _)| answer)
    }

    /// Nothing but the record of the last holder may stand in the way. Returns how long it does, or `None` if it does
    /// not.
    pub(crate) fn last_is_over(&self, request: &mut ClaimRequest<'_>, last: &[KeyValue]) -> Option<Duration> {
        request.last?;
        let revision = last.first().map_or(0, KeyValue::mod_revision);
        let record = last.first().and_then(|kv| Record::parse(kv.value()));
        let record = record.filter(|it| it.state == State::Held && it.token != request.claim.token);
        let left = match record {
            // This process knows until when it trusts a lease of its own.
            Some(record) => match self.claims.get(record.token).filter(Claimed::held_once) {
                Some(own) => own.until.saturating_duration_since(Instant::now()),
                None => self.lost.seen(&request.claim.key, revision, record.ttl),
            },
            None => Duration::ZERO,
        };
        if !left.is_zero() {
            return Some(left);
        }
        request.last = Some(revision);
        None
    }

    /// The answer to a claim that is not the first. Only of its own claims does this process know how long they last.
    pub(crate) fn held(&self, request: &ClaimRequest<'_>, first: &KeyValue) -> Result<Acquired, Failure> {
        let ClaimRequest { claim, place, .. } = request;
        check_claim(&place.dir, first).map_err(Failure::Foreign)?;
        self.claims.touch(&claim.key, first.key());
        let own = Record::parse(first.value()).and_then(|it| self.claims.get(it.token));
        let own = own.filter(|it| it.held_since().is_some());
        Ok(Acquired::Held { free_in: own.map(|it| it.until.saturating_duration_since(Instant::now())) })
    }

    /// Removes claims that met a key of another owner.
    pub(crate) async fn withdraw(&self, members: &Members, tokens: &[Token]) {
        let claims: Vec<_> = tokens.iter().filter_map(|it| self.claims.end(*it)).collect();
        // What is not removed here is removed in the background.
        drop(self.remove(members, &claims, true).await);
    }
}

pub(crate) fn revision(answer: &TxnResponse) -> i64 {
    answer.header().map_or(0, etcd_client::ResponseHeader::revision)
}

pub(crate) fn unsettled(claim: &Claim) -> Error {
    let what = "the claim was answered by a change of its etcd lease each time";
    Error::database(DOING, &claim.key, Fault::Unavailable, std::io::Error::new(std::io::ErrorKind::TimedOut, what))
}

#[cfg(test)]
mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::{
        EtcdStore, TakeOver,
        claimed::Phase,
        store::tests::{SECOND, claim, client_at, is_held, queued, store_at, store_of, take},
    };

    #[tokio::test(start_paused = true)]
    async fn a_grant_says_how_long_the_session_lives_if_that_is_less_than_was_asked_for() {
        let (claim, now) = (claim("k"), Instant::now());
        let place = Arc::new(Place::new("p/", &claim.key, DOING).expect("a place"));
        let request = ClaimRequest::new(&claim, place, now, false);
        for (left, told) in [(39, Some(SECOND * 39)), (40, None), (41, None)] {
            let session = Session::new(1, SECOND * left, now);
            let Acquired::Granted(grant) = request.granted(7, &session, &[]) else { panic!("it is a grant") };
            assert_eq!((grant.ttl, grant.fence), (told, fence(7)), "{left} s");
        }
    }

    #[test]
    fn the_record_of_a_claim_that_has_waited_says_since_when_its_key_exists() {
        let claim = claim("k");
        let place = Arc::new(Place::new("p/", &claim.key, DOING).expect("a place"));
        let mut request = ClaimRequest::new(&claim, place, Instant::now(), false);
        let before = Record::parse(request.record.as_bytes()).expect("a record");
        request.since(7);
        assert_eq!(Record::parse(request.record.as_bytes()), Some(Record { revision: 7, ..before }));
    }

    #[tokio::test]
    async fn a_marker_that_was_written_unnoticed_stands_in_no_claims_way() {
        let server = Server::alone();
        let (store, other, client) = (store_at(&server).await, store_at(&server).await, client_at(&server).await);
        let session = store.sessions.get(&store.members(), SECOND * 20).await.expect("a session");
        // As by a release whose answer was lost.
        let write = async || client.kv_client().put(&*session.marker, "", None).await.expect("it is written");
        for claim in [claim("plain"), queued("queued")] {
            write().await;
            take(&store, &claim).await;
        }
        take(&other, &claim("held")).await;
        let waits = queued("held");
        write().await;
        is_held(&store, &waits).await;
        let claimed = store.claims.get(waits.token).expect("it has a place");
        assert!(matches!(claimed.phase, Phase::Waiting { .. }), "{claimed:?}");
    }

    #[tokio::test]
    async fn a_claim_with_a_place_is_told_each_time_that_it_is_not_the_first() {
        let server = Server::alone();
        let (holder, builder) = (store_at(&server).await, EtcdStore::builder(server.endpoints()));
        let store = store_of(builder.take_over(TakeOver::AtOnce)).await;
        take(&holder, &claim("k")).await;
        let waits = queued("k");
        for _ in 0..2 {
            is_held(&store, &waits).await;
        }
    }

    #[tokio::test]
    async fn a_lease_whose_holder_is_lost_is_waited_for_and_only_a_waiting_claim_keeps_a_place() {
        let server = Server::alone();
        let (holder, client) = (store_at(&server).await, client_at(&server).await);
        let store = store_of(EtcdStore::builder(server.endpoints()).take_over(TakeOver::AfterTtl)).await;
        take(&holder, &claim("k")).await;
        let session = holder.sessions.get(&holder.members(), SECOND * 20).await.expect("a session");
        client.lease_client().revoke(session.id).await.expect("it is revoked");

        let (passing, waits) = (claim("k"), queued("k"));
        for (claim, times) in [(&passing, 1), (&waits, 2)] {
            for _ in 0..times {
                let answer = store.acquire(claim).await.expect("it is answered");
                assert!(matches!(answer, Acquired::Held { free_in: Some(left) } if !left.is_zero()), "{answer:?}");
            }
        }
        assert!(store.claims.get(passing.token).is_none());
        let claimed = store.claims.get(waits.token).expect("it has a place");
        assert!(matches!(claimed.phase, Phase::Waiting { .. }), "{claimed:?}");
    }
}
