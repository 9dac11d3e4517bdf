//! Watches on nodes, and how many of them a session has.
//!
//! After each reconnect the client sends the paths of all watches again, in requests of up to 128 KiB. It cannot read
//! the answers to more than one such request, gives up the connection, and so loses the session with all its leases
//! (`docs/upstream/zookeeper-client-watches.md`). So the paths that a session watches stay below that. A request beyond
//! them looks again after a pause. More sessions would need a queue across sessions.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use zookeeper_client::{Error as Zk, OneshotWatcher};

use crate::session::Session;

/// How many bytes the watched paths of a session have. Half of what one request may have: the other half is for watches
/// that were given up before their answer came, and are removed then.
const WATCHED: usize = 64 * 1024;

/// Pause before a node without a watch is looked at again.
const UNWATCHED: Duration = Duration::from_secs(1);

/// What is left of [`WATCHED`].
#[derive(Debug, Clone)]
pub(crate) struct Room(Arc<Semaphore>);

impl Default for Room {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(WATCHED)))
    }
}

/// A watch on a node, if there was room for it.
#[derive(Debug)]
pub(crate) struct Watch(Option<(OneshotWatcher, OwnedSemaphorePermit)>);

impl Session {
    /// Watches the data of a node that exists.
    pub(crate) async fn watch(&self, path: &str) -> Result<Watch, Zk> {
        let bytes = u32::try_from(self.client.path().len() + path.len()).unwrap_or(u32::MAX);
        let Ok(room) = self.watches.0.clone().try_acquire_many_owned(bytes) else { return Ok(Watch(None)) };
        // Reading the data leaves no watch behind if the node is gone, unlike a check of its existence.
        let (_, _, watcher) = self.client.get_and_watch_data(path).await?;
        Ok(Watch(Some((watcher, room))))
    }
}

impl Watch {
    /// Returns when the node has changed, the session has ended, or it is time to look again.
    pub(crate) async fn changed(self) {
        match self.0 {
            Some((watcher, _room)) => drop(watcher.changed().await),
            None => sleep(UNWATCHED).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::faults::{inside, own_root, session};

    #[tokio::test]
    async fn a_watch_takes_room_for_its_path_in_half_a_request_until_it_is_over() {
        let root = own_root();
        let shared = inside(&root).await;
        let session = session(&shared);
        let free = || session.watches.0.available_permits();
        // A request of the client has 128 KiB.
        assert_eq!(free(), 128 * 1024 / 2);
        let watch = session.watch(&root).await.expect("a node");
        assert_eq!(free(), 128 * 1024 / 2 - session.client.path().len() - root.len());
        drop(watch);
        assert_eq!(free(), 128 * 1024 / 2);
    }
}
