//! The servers of the tests.

use std::{
    sync::{OnceLock, mpsc},
    thread,
    time::Duration,
};

use lockkit_etcd::{EtcdStore, Options};
use lockkit_store_servers::etcd::Etcd;

/// A short session, so that a dead process is noticed soon.
pub(crate) const SESSION: Duration = Duration::from_secs(2);

/// The address of the one member that all tests share. It ends with the process: its thread never ends before.
pub(crate) fn shared() -> &'static str {
    static SHARED: OnceLock<String> = OnceLock::new();
    SHARED.get_or_init(|| {
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let server = Etcd::alone();
            tell.send(server.endpoints().remove(0)).expect("the test waits");
            // Its folder is removed by the next line only if the process lets threads end; see `Cleaner`.
            loop {
                thread::park();
            }
        });
        told.recv().expect("the server starts")
    })
}

/// A store with a session of its own, as in another process.
pub(crate) async fn store() -> EtcdStore {
    store_at([shared()]).await
}

pub(crate) async fn store_at<E: AsRef<str>>(endpoints: impl IntoIterator<Item = E>) -> EtcdStore {
    EtcdStore::connect(endpoints, Options::new().session_ttl(SESSION)).await.expect("connect")
}
