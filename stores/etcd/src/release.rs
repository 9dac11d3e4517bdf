//! Giving up claims: releases, places in the queue, and keys that are left over.

use std::{collections::HashMap, sync::Arc, time::Duration};

use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse};
use lockkit::{
    Key, Result,
    store::{Answer, Release, Token},
};
use tokio::time::Instant;

use crate::{
    claim::oldest,
    claimed::Claimed,
    claims::Left,
    error::Failure,
    layout::{Record, State, check_claim, describe},
    members::Members,
    session::Session,
    sessions::revoke,
    store::Shared,
};

const DOING: &str = "releasing lease";

/// How many keys one transaction removes: etcd allows 128 operations.
const CHUNK: usize = 40;

impl Shared {
    pub(crate) async fn release(self: &Arc<Self>, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let members = self.members();
        let claimed = self.claims.get(token).filter(|it| it.place.name == *key);
        let Some(claimed) = claimed.and_then(|_| self.claims.end(token)) else {
            return self.release_of_other(key, token).await;
        };
        let err = |err: Failure| err.while_doing(DOING, key);
        let left = claimed.unexpired_since().map_or(Duration::ZERO, |since| min_hold.saturating_sub(since.elapsed()));
        if !left.is_zero() {
            self.claims.stay(token, Instant::now() + left);
            let is_done = self.leave(&members, &claimed, left).await.map_err(err)?;
            self.claims.forget(token);
            return Ok(if is_done { Answer::Done } else { Answer::Gone });
        }
        let removed = self.remove(&members, std::slice::from_ref(&claimed), true).await.map_err(err)?;
        Ok(answer(&claimed, removed.first()))
    }

    pub(crate) async fn release_all(self: &Arc<Self>, releases: &[Release]) -> Result<Vec<Answer>> {
        let Some(first) = releases.first() else { return Ok(Vec::new()) };
        let members = self.members();
        let mut answers = vec![Answer::Gone; releases.len()];
        let mut together = Vec::new();
        for (at, Release { key, token, min_hold, .. }) in releases.iter().enumerate() {
            let claimed = self.claims.get(*token).filter(|it| min_hold.is_zero() && it.place.name == *key);
            match claimed.and_then(|_| self.claims.end(*token)) {
                Some(claimed) => together.push((at, claimed)),
                None => answers[at] = self.release(key, *token, *min_hold).await?,
            }
        }
        let claims: Vec<_> = together.iter().map(|(_, claimed)| claimed.clone()).collect();
        let removed = self.remove(&members, &claims, true).await.map_err(|err| err.while_doing(DOING, &first.key))?;
        for ((at, claimed), removed) in together.iter().zip(&removed) {
            answers[*at] = answer(claimed, Some(removed));
        }
        Ok(answers)
    }

    /// Removes the keys of these claims, and forgets the claims. With `released`, also forgets who the last holders
    /// were. Answers for each whether its key was there.
    pub(crate) async fn remove(
        &self,
        members: &Members,
        claims: &[Claimed],
        released: bool,
    ) -> Result<Vec<bool>, Failure> {
        let mut removed = vec![false; claims.len()];
        for chunk in in_transactions(claims) {
            let of_chunk: Vec<_> = chunk.iter().map(|at| &claims[*at]).collect();
            let answers = self.remove_chunk(members, &of_chunk, released).await?;
            for (at, was_there) in chunk.into_iter().zip(answers) {
                removed[at] = was_there;
            }
        }
        Ok(removed)
    }

    async fn remove_chunk(&self, members: &Members, chunk: &[&Claimed], released: bool) -> Result<Vec<bool>, Failure> {
        let removals = || {
            let expired = chunk.iter().filter(|it| !released && it.held_once()).map(|it| mark_expired(it));
            // A claim that was never answered has held nothing.
            chunk.iter().map(|it| removal(it, released || !it.held_once())).chain(expired)
        };
        let doubtful = doubtful(chunk);
        let txn = Txn::new().and_then(removals().chain(markers(&doubtful)).collect::<Vec<_>>());
        let answer = match self.txn(members, txn).await {
            Ok(answer) => {
                note_markers(&doubtful, &answer);
                answer
            }
            Err(Failure::NoLease) => {
                // One of the sessions has ended. This writes the markers of the others.
                for session in doubtful {
                    self.sessions.retire(members, session).await?;
                }
                self.txn(members, Txn::new().and_then(removals().collect::<Vec<_>>())).await?
            }
            Err(failure) => return Err(failure),
        };
        for Claimed { token, .. } in chunk {
            self.claims.forget(*token);
        }
        let answers = answer.op_responses().into_iter().take(chunk.len());
        Ok(answers.map(|it| matches!(it, TxnOpResponse::Txn(removal) if removal.succeeded())).collect())
    }

    /// Replaces the holder by nobody, on an etcd lease of its own, so that the key stays if this process ends.
    async fn leave(&self, members: &Members, claimed: &Claimed, left: Duration) -> Result<bool, Failure> {
        let until = Instant::now() + left;
        let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX).saturating_add(1);
        let granted =
            members.call(|client: Arc<Client>| async move { client.lease_client().grant(seconds, None).await });
        let lease = granted.await?.id();
        self.claims.leave(claimed.token, lease, until);
        let record = Record::now(State::Nobody, Token::nobody(), left, "");
        let record = Record { revision: claimed.revision().unwrap_or(0), ..record }.text();
        let put = TxnOp::put(&*claimed.path, record, Some(PutOptions::new().with_lease(lease)));
        let doubtful = doubtful(&[claimed]);
        let then: Vec<_> = [put, forget_last(claimed)].into_iter().chain(markers(&doubtful)).collect();
        let answer = self.txn(members, Txn::new().when([exists(claimed)]).and_then(then)).await?;
        if answer.succeeded() {
            note_markers(&doubtful, &answer);
        }
        Ok(answer.succeeded())
    }

    /// Repeats a release that was not answered: the key stays taken until an instant.
    pub(crate) async fn leave_until(
        &self,
        members: &Members,
        claimed: &Claimed,
        until: Instant,
    ) -> Result<(), Failure> {
        self.leave(members, claimed, until.saturating_duration_since(Instant::now())).await?;
        self.claims.forget(claimed.token);
        Ok(())
    }

    /// Removes a key that stayed for its minimum time.
    pub(crate) async fn remove_left(&self, members: &Members, Left { path, lease }: Left) -> Result<(), Failure> {
        let is_left = Compare::lease(&*path, CompareOp::Equal, lease);
        self.txn(members, Txn::new().when([is_left]).and_then([TxnOp::delete(&*path, None)])).await?;
        revoke(members, lease).await
    }

    /// Frees a lease that another process holds, or that stays taken without a holder.
    async fn release_of_other(self: &Arc<Self>, key: &Key, token: Token) -> Result<Answer> {
        let place = self.place(DOING, key)?;
        let answer = self.get(DOING, Some(key), &place.dir, oldest()).await?;
        let Some(kv) = answer.kvs().first() else { return Ok(Answer::Gone) };
        check_claim(&place.dir, kv).map_err(|what| Failure::Foreign(what).while_doing(DOING, key))?;
        let last = kv.key_str().ok().and_then(|it| it.strip_prefix(&*place.dir)).unwrap_or_default();
        let first = describe(key, last, kv);
        if first.record.token != token || first.state == State::Waiting {
            return Ok(Answer::Gone);
        }
        let is_same = Compare::mod_revision(kv.key(), CompareOp::Equal, kv.mod_revision());
        let is_last = Compare::value(&*place.last, CompareOp::Equal, kv.value());
        let forget = TxnOp::txn(Txn::new().when([is_last]).and_then([TxnOp::delete(&*place.last, None)]));
        let txn = Txn::new().when([is_same]).and_then([TxnOp::delete(kv.key(), None), forget]);
        let answer = self.txn(&self.members(), txn).await.map_err(|err| err.while_doing(DOING, key))?;
        Ok(if answer.succeeded() { Answer::Done } else { Answer::Gone })
    }
}

/// `Done` if the claim held the lease until its key was removed. If an attempt had no answer, the next one finds no
/// key.
fn answer(claimed: &Claimed, removed: Option<&bool>) -> Answer {
    match removed {
        Some(true) if claimed.unexpired_since().is_some() => Answer::Done,
        _ => Answer::Gone,
    }
}

/// Divides claims, by their places in the list, among transactions. etcd refuses one that writes a key twice, so
/// claims to the same lease are in different ones.
fn in_transactions(claims: &[Claimed]) -> Vec<Vec<usize>> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (at, claimed) in claims.iter().enumerate() {
        let round = seen.entry(&claimed.place.dir).or_default();
        if rounds.len() == *round {
            rounds.push(Vec::new());
        }
        rounds[*round].push(at);
        *round += 1;
    }
    rounds.iter().flat_map(|it| it.chunks(CHUNK)).map(<[usize]>::to_vec).collect()
}

/// The sessions whose markers must be written, so that no late request brings a key back.
fn doubtful<'c>(claims: &[&'c Claimed]) -> Vec<&'c Arc<Session>> {
    let mut sessions: Vec<_> = claims.iter().flat_map(|it| &it.doubts).filter(|it| !it.has_ended()).collect();
    sessions.sort_by_key(|it| it.id);
    sessions.dedup_by_key(|it| it.id);
    sessions
}

fn markers(sessions: &[&Arc<Session>]) -> impl Iterator<Item = TxnOp> {
    let put = |it: &&Arc<Session>| TxnOp::put(&*it.marker, "", Some(PutOptions::new().with_lease(it.id)));
    sessions.iter().map(put).collect::<Vec<_>>().into_iter()
}

fn note_markers(sessions: &[&Arc<Session>], answer: &TxnResponse) {
    let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
    for session in sessions {
        session.set_marker_revision(revision);
    }
}

/// The key is still the one of this claim. One that is in doubt may have been created again.
fn exists(claimed: &Claimed) -> Compare {
    match claimed.revision().filter(|_| !claimed.is_in_doubt()) {
        Some(revision) => Compare::create_revision(&*claimed.path, CompareOp::Equal, revision),
        None => Compare::version(&*claimed.path, CompareOp::Greater, 0),
    }
}

/// Deletes the key of the claim, unless the key stays for its minimum time.
fn removal(claimed: &Claimed, released: bool) -> TxnOp {
    let mut when = vec![exists(claimed)];
    when.extend(claimed.left_to.map(|lease| Compare::lease(&*claimed.path, CompareOp::NotEqual, lease)));
    let mut then = vec![TxnOp::delete(&*claimed.path, None)];
    if released {
        then.push(forget_last(claimed));
    }
    TxnOp::txn(Txn::new().when(when).and_then(then))
}

/// Says to the next holder that this one does not trust its lease any more.
fn mark_expired(claimed: &Claimed) -> TxnOp {
    let last = &*claimed.place.last;
    let record = Record::parse(claimed.record.as_bytes()).map(|it| Record {
        state: State::Expired,
        revision: claimed.revision().unwrap_or(it.revision),
        ..it
    });
    let put = record.map(|it| TxnOp::put(last, it.text(), None));
    TxnOp::txn(Txn::new().when(is_last(claimed)).and_then(put.into_iter().collect::<Vec<_>>()))
}

/// Forgets that this claim was the last holder.
fn forget_last(claimed: &Claimed) -> TxnOp {
    let last = &*claimed.place.last;
    TxnOp::txn(Txn::new().when(is_last(claimed)).and_then([TxnOp::delete(last, None)]))
}

/// This claim was the last holder, whatever ttl its record has: an answer to a change of it may have been lost.
fn is_last(claimed: &Claimed) -> [Compare; 2] {
    let last = &*claimed.place.last;
    let (from, below) = Record::range(State::Held, claimed.token);
    [Compare::value(last, CompareOp::Greater, from), Compare::value(last, CompareOp::Less, below)]
}

#[cfg(test)]
mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::store::tests::{SECOND, claim, client_at, is_held, is_revoked, keys, queued, store_at, take};

    #[tokio::test]
    async fn a_key_that_a_late_request_has_created_again_is_removed_and_the_marker_is_noted() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let (claim, mut kv) = (claim("k"), client.kv_client());
        take(&store, &claim).await;
        let path = store.claims.get(claim.token).expect("it is held").path;
        kv.delete(&*path, None).await.expect("it is deleted");
        kv.put(&*path, "late", None).await.expect("it is created");
        let session = store.sessions.get(&store.members(), claim.ttl).await.expect("a session");
        store.claims.doubt(claim.token, &session);
        let claimed = store.claims.end(claim.token).expect("it is not forgotten");
        assert_eq!(store.remove(&store.members(), &[claimed], true).await.expect("it is answered"), [true]);
        assert_eq!(keys(&client, "lockkit/lock/k/").await, 0);
        let marker = kv.get(&*session.marker, None).await.expect("it is answered");
        assert_eq!(marker.kvs().first().map(etcd_client::KeyValue::mod_revision), Some(session.marker_revision()));
    }

    #[tokio::test]
    async fn a_key_that_stayed_for_its_minimum_time_is_removed_with_its_lease() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let lease = client.lease_client().grant(60, None).await.expect("a lease").id();
        let options = PutOptions::new().with_lease(lease);
        client.kv_client().put("stays/1", "", Some(options)).await.expect("it is created");
        let left = Left { path: "stays/1".to_owned(), lease };
        store.remove_left(&store.members(), left).await.expect("it is answered");
        assert_eq!(keys(&client, "stays/").await, 0);
        assert!(is_revoked(&client, lease).await);
    }

    #[tokio::test]
    async fn of_releases_together_each_has_its_own_key_and_minimum_time() {
        let server = Server::alone();
        let store = store_at(&server).await;
        let [plain, stays, kept] = ["plain", "stays", "kept"].map(claim);
        for claim in [&plain, &stays, &kept] {
            take(&store, claim).await;
        }
        let releases = [
            Release::new(&plain.key, plain.token, Duration::ZERO),
            Release::new(&stays.key, stays.token, SECOND * 60),
            Release::new("elsewhere", kept.token, Duration::ZERO),
        ];
        let answers = store.release_all(&releases).await.expect("it is answered");
        assert_eq!(answers, [Answer::Done, Answer::Done, Answer::Gone]);
        let holder = async |claim: &lockkit::store::Claim| store.look(&claim.key).await.expect("it is answered");
        assert!(holder(&plain).await.is_none());
        assert!(holder(&stays).await.is_some_and(|it| it.token.is_nobody()));
        assert!(holder(&kept).await.is_some_and(|it| it.token == kept.token));
    }

    #[tokio::test]
    async fn a_claim_that_gives_up_its_place_has_released_no_lease() {
        let server = Server::alone();
        let (holder, store) = (store_at(&server).await, store_at(&server).await);
        take(&holder, &claim("k")).await;
        let waits = queued("k");
        is_held(&store, &waits).await;
        let answer = store.release(&waits.key, waits.token, Duration::ZERO).await.expect("it is answered");
        assert_eq!(answer, Answer::Gone);
    }
}
