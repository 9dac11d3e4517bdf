//! Deletes the records of holders that died.

use std::{sync::Arc, time::Duration};

use etcd_client::{Compare, CompareOp, KeyValue, Txn, TxnOp, TxnOpResponse};
use lockkit::Result;

use crate::{
    layout::{Place, Record, name_of_last, start_of_last},
    store::Shared,
};

/// How many records one transaction removes: etcd allows 128 operations.
const CHUNK: usize = 100;

impl Shared {
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
            let answers = answer.map_err(|err| err.while_doing(doing, None))?.op_responses();
            let deleted = answers.iter().filter(|it| matches!(it, TxnOpResponse::Txn(it) if it.succeeded()));
            swept += deleted.count();
        }
        Ok(swept as u64)
    }
}

/// Deletes the record of the last holder, if it is still this one and the lease is free.
fn forget(place: &Place, revision: i64) -> TxnOp {
    let is_same = Compare::mod_revision(&*place.last, CompareOp::Equal, revision);
    let is_free = Compare::create_revision(&*place.dir, CompareOp::Equal, 0).with_prefix();
    TxnOp::txn(Txn::new().when([is_same, is_free]).and_then([TxnOp::delete(&*place.last, None)]))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use lockkit::store::Token;
    use lockkit_store_servers::etcd::Etcd as Server;

    use super::*;
    use crate::{
        layout::State,
        store::tests::{SECOND, client_at, keys, store_at},
    };

    #[tokio::test]
    async fn no_more_are_swept_than_was_asked_for_and_those_held_do_not_count() {
        let server = Server::alone();
        let (store, client) = (store_at(&server).await, client_at(&server).await);
        let old = Record { at: UNIX_EPOCH, ..Record::now(State::Held, Token::random(), SECOND, "the dead") }.text();
        let mut kv = client.kv_client();
        for name in ["a", "b", "c", "d"] {
            kv.put(format!("lockkit/last/lockkit/lock/{name}"), &*old, None).await.expect("it is written");
        }
        kv.put("lockkit/lock/a/1", &*old, None).await.expect("it is written");
        let left = async || keys(&client, "lockkit/last/").await;
        assert_eq!((store.sweep(SECOND, 2).await.expect("it is answered"), left().await), (2, 2));
        assert_eq!((store.sweep(SECOND, 2).await.expect("it is answered"), left().await), (1, 1));
        assert_eq!((store.sweep(SECOND, 2).await.expect("it is answered"), left().await), (0, 1));
    }
}
