//! Reading who holds leases, and forgetting who held them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse};
use lockkit::{Key, Result, store::LeaseRecord};
use tokio::time::Instant;

use crate::{
    acquire::oldest,
    layout::{
        First, Place, Record, State, check_claim, describe, is_mutex, name_of, name_of_last, start_of, start_of_last,
    },
    members::Trouble,
    store::{Inner, failed},
};

/// How many keys one answer of the server has. Answers are limited to 4 MiB.
const PAGE: i64 = 1000;

/// How many records one transaction removes: etcd allows 128 operations.
const CHUNK: usize = 100;

impl Inner {
    pub(crate) async fn look(self: &Arc<Self>, key: &Key) -> Result<Option<LeaseRecord>> {
        let doing = "looking at lease";
        let place = self.place(doing, key)?;
        let answer = self.get(doing, Some(key), &place.dir, oldest()).await;
        let first = answer.as_ref().ok().and_then(|it| it.kvs().first());
        self.claims.touch(key, first.map_or(b"", KeyValue::key));
        let answer = answer?;
        let Some(kv) = answer.kvs().first() else { return Ok(None) };
        check_claim(&place.dir, kv).map_err(|what| failed(doing, key, Trouble::Foreign(what)))?;
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

    /// Deletes the records of holders that died, if the leases were free since.
    pub(crate) async fn sweep(self: &Arc<Self>, retention: Duration, limit: u32) -> Result<u64> {
        let doing = "sweeping leases";
        let mut old = Vec::new();
        let note = |page: &[KeyValue]| {
            let is_old = |kv: &&KeyValue| {
                Record::parse(kv.value()).is_some_and(|it| it.age() > it.ttl.saturating_add(retention))
            };
            old.extend(page.iter().filter(is_old).filter_map(|kv| {
                let name = name_of_last(&self.prefix, kv.key())?;
                Some((self.place(doing, &name).ok()?, kv.mod_revision()))
            }));
        };
        self.pages(doing, &start_of_last(&self.prefix), note).await?;
        // A lease that is held is not swept and does not count, or held ones would keep others from being swept.
        let (mut swept, limit, mut old) = (0, limit as usize, &old[..]);
        while !old.is_empty() && swept < limit {
            let (chunk, rest) = old.split_at(old.len().min(CHUNK).min(limit - swept));
            old = rest;
            let ops: Vec<_> = chunk.iter().map(|(place, revision)| forget(place, *revision)).collect();
            let answer = self.txn(&self.members(), Txn::new().and_then(ops)).await;
            let answers = answer.map_err(|err| failed(doing, None, err))?.op_responses();
            let deleted = answers.iter().filter(|it| matches!(it, TxnOpResponse::Txn(it) if it.succeeded()));
            swept += deleted.count();
        }
        Ok(swept as u64)
    }

    /// Reads all keys with this start, a page at a time.
    async fn pages(
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

/// Deletes the record of the last holder, if it is still this one and the lease is free.
fn forget(place: &Place, revision: i64) -> TxnOp {
    let is_same = Compare::mod_revision(&*place.last, CompareOp::Equal, revision);
    let is_free = Compare::create_revision(&*place.dir, CompareOp::Equal, 0).with_prefix();
    TxnOp::txn(Txn::new().when([is_same, is_free]).and_then([TxnOp::delete(&*place.last, None)]))
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
