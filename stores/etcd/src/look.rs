//! Reads who holds leases, also those of other processes and other clients.

use std::{collections::BTreeMap, sync::Arc};

use etcd_client::{GetOptions, KeyValue};
use lockkit::{Key, Result, store::LeaseRecord};
use tokio::time::Instant;

use crate::{
    claim::oldest,
    error::Failure,
    layout::{First, Record, State, check_claim, describe, is_mutex, name_of, start_of},
    store::Shared,
};

/// How many keys one answer of the server has. Answers are limited to 4 MiB.
const PAGE: i64 = 1000;

impl Shared {
    pub(crate) async fn look(self: &Arc<Self>, key: &Key) -> Result<Option<LeaseRecord>> {
        let doing = "looking at lease";
        let place = self.place(doing, key)?;
        let answer = self.get(doing, Some(key), &place.dir, oldest()).await;
        let first = answer.as_ref().ok().and_then(|it| it.kvs().first());
        self.claims.touch(key, first.map_or(b"", KeyValue::key));
        let answer = answer?;
        let Some(kv) = answer.kvs().first() else { return Ok(None) };
        check_claim(&place.dir, kv).map_err(|what| Failure::Foreign(what).while_doing(doing, key))?;
        let last = kv.key_str().ok().and_then(|it| it.strip_prefix(&*place.dir)).unwrap_or_default();
        Ok(self.shown(describe(key, last, kv)))
    }

    pub(crate) async fn list(self: &Arc<Self>, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let mut oldest: BTreeMap<Key, (i64, First)> = BTreeMap::new();
        let mut note = |kv: &KeyValue| {
            let Some((name, last)) = name_of(&self.prefix, kv.key()) else { return };
            if Record::parse(kv.value()).is_none() && !is_mutex(last, kv) {
                return;
            }
            if oldest.get(&name).is_none_or(|(revision, _)| kv.create_revision() < *revision) {
                let first = describe(&name, last, kv);
                oldest.insert(name, (kv.create_revision(), first));
            }
        };
        self.pages("listing leases", &start_of(&self.prefix, prefix), |page| page.iter().for_each(&mut note)).await?;
        let held = oldest.into_values().filter_map(|(_, first)| self.shown(first));
        Ok(held.take(limit as usize).collect())
    }

    /// Reads all keys with this start, a page at a time.
    pub(crate) async fn pages(
        self: &Arc<Self>,
        doing: &'static str,
        start: &str,
        mut note: impl FnMut(&[KeyValue]),
    ) -> Result<()> {
        // Of an empty start the client makes the whole range.
        let end = end_of(start);
        let mut from = if start.is_empty() { "\0".to_owned() } else { start.to_owned() };
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
            let answer = self.get(doing, None, &from, options).await?;
            note(answer.kvs());
            match answer.kvs().last().and_then(|kv| kv.key_str().ok()) {
                Some(last) if answer.more() => from = format!("{last}\0"),
                _ => return Ok(()),
            }
        }
    }

    /// The lease as it is shown, if it is held. Of its own leases this process knows more than etcd.
    fn shown(&self, First { mut record, state }: First) -> Option<LeaseRecord> {
        if state == State::Waiting {
            return None;
        }
        if let Some(claimed) = self.claims.get(record.token) {
            let now = Instant::now();
            let info = &mut record.info;
            info.expires_in = claimed.until.saturating_duration_since(now);
            info.renewals = claimed.renewals;
            if let Some(since) = claimed.held_since() {
                info.held_for = now.saturating_duration_since(since);
            }
        }
        Some(record)
    }
}

/// The end of the range of keys with this start.
fn end_of(start: &str) -> Vec<u8> {
    let mut end = start.as_bytes().to_vec();
    while let Some(byte) = end.pop() {
        if byte < u8::MAX {
            end.push(byte + 1);
            return end;
        }
    }
    vec![0]
}

#[cfg(test)]
mod tests {
    use etcd_client::{PutOptions, Txn, TxnOp};
    use lockkit::store::Token;
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::store::tests::{claim, client_at, is_held, queued, store_at, take};

    #[tokio::test]
    async fn the_oldest_claim_is_listed_wherever_its_key_is() {
        let server = Server::alone();
        let (store, other) = (store_at(&server).await, store_at(&server).await);
        for (key, first, second) in [("a", 1, 9), ("b", 9, 1)] {
            let (mut holds, mut waits) = (claim(key), queued(key));
            (holds.token, waits.token) = (Token::from_bytes([first; 16]), Token::from_bytes([second; 16]));
            take(&store, &holds).await;
            is_held(&other, &waits).await;
        }
        let listed = other.list("", 10).await.expect("it is answered");
        let tokens: Vec<_> = listed.iter().map(|it| it.token).collect();
        assert_eq!(tokens, [1, 9].map(|it| Token::from_bytes([it; 16])));
    }

    #[tokio::test]
    async fn leases_on_all_pages_are_listed_and_keys_that_are_no_locks_are_not() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let lease = client.lease_client().grant(60, None).await.expect("a lease").id();
        let on_lease = PutOptions::new().with_lease(lease);
        let lock = |name: i64| TxnOp::put(format!("lockkit/lock/{name}/{lease:x}"), "", Some(on_lease.clone()));
        for begin in (0..PAGE + 100).step_by(100) {
            let txn = Txn::new().and_then((begin..begin + 100).map(lock).collect::<Vec<_>>());
            client.kv_client().txn(txn).await.expect("they are written");
        }
        // On a lease that is not its name, and named so without a lease.
        client.kv_client().put("lockkit/lock/x/config", "", Some(on_lease)).await.expect("it is written");
        client.kv_client().put("lockkit/lock/y/0", "", None).await.expect("it is written");
        let listed = store.list("", u32::MAX).await.expect("it is answered");
        assert_eq!(listed.len(), usize::try_from(PAGE + 100).expect("a number"));
    }
}
