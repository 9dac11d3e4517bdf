//! The server that most tests share, and stores on it.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{
    Layout, ZooKeeperStore,
    zookeeper_client::{Client, Error},
};
use tokio::time::{Instant, sleep, timeout};

/// The session timeout of the tests' stores: leases are trusted for 4.5 s, longer than a busy machine stops a test.
pub(crate) const SESSION: Duration = Duration::from_secs(12);

/// Longer than anything takes that does not hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The address of the server that the tests share. No test kills or stops it.
pub(crate) fn shared_server() -> &'static str {
    ZooKeeper::shared()
}

/// A root that no other test uses.
pub(crate) fn own_root() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("/tests/{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A session of its own on these servers.
pub(crate) async fn store_on(hosts: &str, root: &str, session: Duration, layout: Layout) -> ZooKeeperStore {
    let builder = ZooKeeperStore::builder(hosts).root(root).session_timeout(session).layout(layout);
    builder.connect().await.expect("a session")
}

/// A session of its own on the shared server.
pub(crate) async fn store(root: &str) -> ZooKeeperStore {
    store_on(shared_server(), root, SESSION, Layout::Curator).await
}

/// A client of the shared server that knows nothing of leases.
pub(crate) async fn client() -> Client {
    Client::connector().with_session_timeout(SESSION * 5).connect(shared_server()).await.expect("a session")
}

/// The names of the children of a node. None if the node does not exist.
pub(crate) async fn children(client: &Client, path: &str) -> Vec<String> {
    match client.list_children(path).await {
        Ok(children) => children,
        Err(Error::NoNode) => Vec::new(),
        Err(err) => panic!("list {path}: {err}"),
    }
}

/// Waits until the node has this many children.
pub(crate) async fn wait_for_children(client: &Client, path: &str, count: usize) {
    let started = Instant::now();
    loop {
        let found = children(client, path).await;
        if found.len() == count {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{path} has {found:?}, not {count} children");
        sleep(Duration::from_millis(2)).await;
    }
}

/// The result of what does not hang.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("it hangs")
}
