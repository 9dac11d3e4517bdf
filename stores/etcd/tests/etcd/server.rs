//! The servers of the tests.

use std::{
    process::{Command, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use lockkit::Leases;
use lockkit_etcd::{
    EtcdStore,
    etcd_client::{Client, GetOptions},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::sleep;

/// A short session, so that a dead process is noticed soon.
pub(crate) const SESSION: Duration = Duration::from_secs(2);

/// Longer than anything takes that is waited for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// The address of the one member that most tests share. It dies with the process of the tests.
pub(crate) fn shared() -> &'static str {
    static SHARED: OnceLock<String> = OnceLock::new();
    SHARED.get_or_init(|| {
        let (started, starting) = mpsc::channel();
        thread::spawn(move || {
            let server = Etcd::alone();
            // Nothing runs when the process ends. The pipe of this shell is closed then.
            let mut cleaner = Command::new("sh");
            cleaner.args(["-c", "cat; sleep 0.3; rm -rf \"$1\"", "sh"]).arg(server.folder()).stdin(Stdio::piped());
            let mut cleaner = cleaner.stdout(Stdio::null()).spawn().expect("start sh");
            let _pipe = cleaner.stdin.take();
            started.send(server.endpoints().remove(0)).expect("the test waits");
            // The server dies with this thread, which waits for what never happens before.
            let _ = cleaner.wait();
        });
        starting.recv().expect("the server starts")
    })
}

/// A store with a session of its own, as in another process.
pub(crate) async fn store() -> EtcdStore {
    store_at([shared()]).await
}

pub(crate) async fn store_at<E: AsRef<str>>(endpoints: impl IntoIterator<Item = E>) -> EtcdStore {
    EtcdStore::builder(endpoints).session_ttl(SESSION).connect().await.expect("connect")
}

/// A client of the cluster, for what the store does not do.
pub(crate) async fn client_at(endpoint: &str) -> Client {
    Client::connect([endpoint], None).await.expect("connect")
}

/// How many keys have this start.
pub(crate) async fn keys(client: &mut Client, start: impl Into<Vec<u8>>) -> i64 {
    let options = GetOptions::new().with_prefix().with_count_only();
    client.get(start, Some(options)).await.expect("count keys").count()
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "not so after {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(10)).await;
    }
    begun.elapsed()
}

/// Leases of another process, with a ttl of 2 s.
pub(crate) async fn leases() -> Leases<EtcdStore> {
    Leases::builder(store().await).ttl(Duration::from_secs(2)).wait(PATIENCE).build().expect("valid settings")
}
