//! Wakes waiters when the lease may be free.

use std::{sync::Arc, time::Duration};

use etcd_client::{Error as Etcd, GetOptions, KeyValue, SortOrder, SortTarget, WatchFilterType, WatchOptions};
use lockkit::{Key, Result};
use tokio::time::sleep;

use crate::store::Shared;

/// Pause before a watch that has ended is opened again. Meanwhile waiting requests poll.
const OPEN_AGAIN: Duration = Duration::from_millis(500);

/// Shortest pause before waiters try again, though no key stands in the way.
const LEAST_PAUSE: Duration = Duration::from_millis(50);

/// What is watched, and since when.
struct Watched {
    path: Vec<u8>,
    with_prefix: bool,
    since: i64,
}

impl Shared {
    /// Completes when the lease may be free for the waiters of this process. A claim with a place in the queue
    /// watches only the claim before it, so a release wakes one process.
    pub(crate) async fn freed(self: &Arc<Self>, key: &Key) {
        loop {
            match self.before(key).await {
                Ok(Some(watched)) => match self.watch(key, &watched).await {
                    Ok(()) => return,
                    Err(err) => tracing::debug!(target: "lockkit", %err, "a watch of etcd has ended"),
                },
                Ok(None) => {
                    // Nothing is there, but the last holder may still trust its lease.
                    sleep(self.lost.left(key).max(LEAST_PAUSE)).await;
                    return;
                }
                Err(err) => tracing::debug!(target: "lockkit", %err, "the keys to watch could not be read from etcd"),
            }
            sleep(OPEN_AGAIN).await;
        }
    }

    /// What must go before the lease is free. `None` if there is nothing.
    async fn before(self: &Arc<Self>, key: &Key) -> Result<Option<Watched>> {
        let doing = "waiting for lease";
        let place = self.place(doing, key)?;
        let options = GetOptions::new().with_prefix().with_keys_only().with_limit(1);
        let options = options.with_sort(SortTarget::Create, SortOrder::Descend);
        let own = self.claims.waiting(key);
        let options = own.map_or(options.clone(), |own| options.with_max_create_revision(own - 1));
        let answer = self.get(doing, Some(key), &place.dir, options).await?;
        let since = answer.header().map_or(0, etcd_client::ResponseHeader::revision) + 1;
        Ok(answer.kvs().first().map(|kv: &KeyValue| match own {
            Some(_) => Watched { path: kv.key().to_vec(), with_prefix: false, since },
            None => Watched { path: place.dir.clone().into_bytes(), with_prefix: true, since },
        }))
    }

    /// Completes when a watched key is deleted, or if that may have been missed.
    async fn watch(self: &Arc<Self>, key: &Key, Watched { path, with_prefix, since }: &Watched) -> Result<(), Etcd> {
        let members = self.members();
        let options = WatchOptions::new().with_start_revision(*since).with_filters([WatchFilterType::NoPut]);
        let options = if *with_prefix { options.with_prefix() } else { options };
        let attempt = members.attempt();
        let client = members.current().await?;
        let mut watch = client.watch_client().watch(&**path, Some(options)).await?;
        attempt.settle();
        loop {
            self.claims.touch(key, path);
            match watch.message().await? {
                // The history since then is compacted.
                Some(message) if message.canceled() && message.compact_revision() > 0 => return Ok(()),
                Some(message) if message.canceled() => {
                    return Err(Etcd::WatchError(message.cancel_reason().to_owned()));
                }
                Some(message) if !message.events().is_empty() => return Ok(()),
                Some(_) => {}
                None => return Err(Etcd::WatchError("the watch was closed".to_owned())),
            }
        }
    }
}
