//! Renewing leases.
//!
//! [`Answer::Done`] needs three answers of the cluster, in this order: a keep-alive of the etcd lease, then a
//! linearizable read in the same Raft term that finds the key. See [`session`](crate::session).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, PutOptions, ResponseHeader, Txn, TxnOp};
use lockkit::{
    Result,
    store::{Answer, Renewal, Token},
};
use tokio::time::Instant;

use crate::{
    claim::{is_current, marker, note_marker, revision},
    claimed::Claimed,
    error::Failure,
    layout::{Record, put_last},
    members::Members,
    session::{Session, leader_changes},
    store::{Shared, kvs},
};

const DOING: &str = "renewing leases";

/// How many keys one transaction reads: etcd allows 128 operations.
const CHUNK: usize = 120;

/// How often a batch is sent again because the leader changed meanwhile.
const ROUNDS: usize = 4;

impl Shared {
    pub(crate) async fn renew(self: &Arc<Self>, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let (members, sent) = (self.members(), Instant::now());
        let held = |it: &Renewal| {
            self.claims.get(it.token).filter(|claimed| claimed.held_since().is_some() && claimed.place.name == it.key)
        };
        let claims: HashMap<Token, (Claimed, Duration)> =
            renewals.iter().filter_map(|it| Some((it.token, (held(it)?, it.ttl)))).collect();
        let mut of_session: BTreeMap<i64, Vec<&Claimed>> = BTreeMap::new();
        let mut alive = HashSet::new();
        for (claimed, ttl) in claims.values() {
            if claimed.session.ttl < *ttl || claimed.ttl < *ttl {
                let moved = self.renew_longer(&members, claimed, *ttl).await;
                if moved.map_err(|err| err.while_doing(DOING, &claimed.place.name))? {
                    alive.insert(claimed.token);
                }
            } else {
                of_session.entry(claimed.session.id).or_default().push(claimed);
            }
        }
        for claims in of_session.values() {
            for chunk in claims.chunks(CHUNK) {
                let renewed = self.renew_chunk(&members, chunk, sent).await;
                alive.extend(renewed.map_err(|err| err.while_doing(DOING, &chunk[0].place.name))?);
            }
        }
        let answer = |it: &Renewal| {
            let is_alive = claims.contains_key(&it.token) && alive.contains(&it.token);
            if is_alive && self.claims.renewed(it.token, sent + it.ttl) { Answer::Done } else { Answer::Gone }
        };
        Ok(renewals.iter().map(answer).collect())
    }

    /// Extends the session of these claims and returns those whose keys exist.
    async fn renew_chunk(&self, members: &Members, claims: &[&Claimed], sent: Instant) -> Result<Vec<Token>, Failure> {
        let Some(session) = claims.first().map(|it| &it.session) else { return Ok(Vec::new()) };
        session.touch();
        let exist: Vec<_> = claims.iter().map(|it| exists(it)).collect();
        // A transaction without any read would not be linearizable.
        let read: Vec<_> =
            claims.iter().map(|it| TxnOp::get(&*it.path, Some(GetOptions::new().with_keys_only()))).collect();
        let txn = Txn::new().when(exist).or_else(read);
        let mut since = sent;
        for _ in 0..ROUNDS {
            let kept =
                if session.has_ended() { Err(Failure::NoLease) } else { session.keep_alive(members, since).await };
            let kept = match kept {
                Ok(kept) => Some(kept),
                Err(Failure::NoLease) => None,
                Err(failure) => return Err(failure),
            };
            let read_at = Instant::now();
            let answer = self.txn(members, txn.clone()).await?;
            let alive: Vec<_> = if answer.succeeded() {
                claims.iter().map(|it| it.token).collect()
            } else {
                let answers = answer.op_responses();
                let found = answers.iter().map(|it| kvs(Some(it)).first().map(KeyValue::create_revision));
                claims.iter().zip(found).filter(|(it, found)| it.revision() == *found).map(|(it, _)| it.token).collect()
            };
            let term = answer.header().map_or(0, ResponseHeader::raft_term);
            match kept {
                Some(kept) if session.prove(kept, read_at, term) => return Ok(alive),
                None if alive.is_empty() => return Ok(alive),
                _ => since = Instant::now(),
            }
        }
        Err(leader_changes())
    }

    /// Moves the key of a claim to a session that lives at least as long as a longer ttl, and notes the ttl: others
    /// wait for as long as the key says.
    async fn renew_longer(
        self: &Arc<Self>,
        members: &Members,
        claimed: &Claimed,
        ttl: Duration,
    ) -> Result<bool, Failure> {
        let session: Arc<Session> = self.sessions.get(members, ttl).await?;
        let Some(before) = Record::parse(claimed.record.as_bytes()) else { return Ok(false) };
        let record = Record { ttl, revision: claimed.revision().unwrap_or(before.revision), ..before }.text();
        let put = [
            TxnOp::put(&*claimed.path, &*record, Some(PutOptions::new().with_lease(session.id))),
            put_last(&claimed.place.last, &record),
        ];
        let read = [TxnOp::get(&*claimed.path, Some(GetOptions::new().with_keys_only())), marker(&session)];
        let mut written = claimed.written;
        for _ in 0..ROUNDS {
            // A late request must not move the key back from the session to which a later one has moved it.
            let is_same = Compare::mod_revision(&*claimed.path, CompareOp::Equal, written);
            let when = [exists(claimed), is_same, is_current(&session)];
            self.claims.doubt(claimed.token, &session);
            let txn = Txn::new().when(when).and_then(put.clone()).or_else(read.clone());
            let (answer, was_sent_once) = self.txn_counted(members, txn).await?;
            if was_sent_once {
                self.claims.settled(claimed.token, &session);
            }
            if answer.succeeded() {
                self.claims.moved(claimed.token, &session, revision(&answer));
                self.claims.recorded(claimed.token, record, ttl);
                return Ok(true);
            }
            let answers = answer.op_responses();
            let Some(own) = kvs(answers.first()).first() else { return Ok(false) };
            if Some(own.create_revision()) != claimed.revision() {
                return Ok(false);
            }
            written = own.mod_revision();
            self.claims.written(claimed.token, written);
            note_marker(&session, kvs(answers.get(1)));
        }
        Err(leader_changes())
    }
}

/// The key of a claim that holds its lease. It holds the lease as long as it exists, because all other keys are
/// younger.
fn exists(claimed: &Claimed) -> Compare {
    Compare::create_revision(&*claimed.path, CompareOp::Equal, claimed.revision().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::store::tests::{SECOND, claim, client_at, store_at, take};

    async fn renew(store: &Arc<Shared>, key: &str, token: Token, ttl: Duration) -> Result<Answer> {
        store.renew(&[Renewal::new(key, token, ttl)]).await.map(|answers| answers[0])
    }

    #[tokio::test]
    async fn a_longer_ttl_is_written_for_others_though_a_marker_was_written_unnoticed() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let claim = claim("k");
        take(&store, &claim).await;
        let revision = store.claims.get(claim.token).and_then(|it| it.revision()).expect("it is held");
        let session = store.sessions.get(&store.members(), claim.ttl).await.expect("a session");
        client.kv_client().put(&*session.marker, "", None).await.expect("it is written");
        // Still shorter than the session.
        let longer = claim.ttl + SECOND;
        assert_eq!(renew(&store, "k", claim.token, longer).await.expect("it is answered"), Answer::Done);
        let last = client.kv_client().get("lockkit/last/lockkit/lock/k", None).await.expect("it is answered");
        let record = Record::parse(last.kvs()[0].value()).expect("a record");
        assert_eq!((record.ttl, record.revision), (longer, revision));
    }

    #[tokio::test]
    async fn a_renewal_extends_what_is_known_of_the_session() {
        let server = Server::alone();
        let (store, claim) = (store_at(&server).await, claim("k"));
        take(&store, &claim).await;
        let session = store.claims.get(claim.token).expect("it is held").session;
        let before = session.until();
        assert_eq!(renew(&store, "k", claim.token, claim.ttl).await.expect("it is answered"), Answer::Done);
        assert!(session.until() > before);
        assert_eq!(renew(&store, "other", claim.token, claim.ttl).await.expect("it is answered"), Answer::Gone);
    }

    #[tokio::test]
    async fn a_lease_is_renewed_or_gone_only_if_its_session_says_so_too() {
        let server = Server::alone();
        let (store, client, [kept, gone]) = (store_at(&server).await, client_at(&server).await, ["a", "b"].map(claim));
        take(&store, &kept).await;
        let session = store.claims.get(kept.token).expect("it is held").session;
        // As if a member had said so that lags behind.
        session.end();
        assert!(renew(&store, "a", kept.token, kept.ttl).await.is_err());

        let store = store_at(&server).await;
        take(&store, &gone).await;
        let session = store.claims.get(gone.token).expect("it is held").session;
        client.lease_client().revoke(session.id).await.expect("it is revoked");
        assert_eq!(renew(&store, "b", gone.token, gone.ttl).await.expect("it is answered"), Answer::Gone);
    }
}
