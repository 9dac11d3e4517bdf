//! The server that most tests share, and stores on it.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{Layout, ZooKeeperStore};

/// The session timeout of the tests' stores.
pub(crate) const SESSION: Duration = Duration::from_secs(4);

/// Longer than anything takes that does not hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The address of the server that the tests share. Nobody kills or stops it.
pub(crate) fn shared_server() -> &'static str {
    static SERVER: OnceLock<String> = OnceLock::new();
    SERVER.get_or_init(|| {
        let (started, starting) = mpsc::channel();
        // A server dies with the thread that started it. This thread lives as long as the process.
        thread::spawn(move || {
            let server = ZooKeeper::alone();
            started.send(server.host()).expect("the test waits");
            loop {
                thread::park();
            }
        });
        starting.recv().expect("the server starts")
    })
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
