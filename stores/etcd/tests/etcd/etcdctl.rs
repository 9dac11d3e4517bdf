//! The lock of `etcdctl lock`, which is `concurrency.Mutex` of etcd's Go client, and ours are the same lock.

use std::{process::Stdio, time::Duration};

use lockkit::Leases;
use lockkit_etcd::EtcdStore;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::server::{PATIENCE, SESSION, client_at, keys, shared, until};

/// A process of `etcdctl lock`.
struct Other {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn lock(name: &str) -> Self {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", shared(), "lock", "--ttl", "3", name]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("etcdctl is installed: tests/run installs it");
        let lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        Self { process, lines }
    }

    /// It prints the name of its key when it has the lock.
    async fn has_it(&mut self) -> String {
        let line = timeout(PATIENCE, self.lines.next_line()).await.expect("etcdctl has the lock");
        line.expect("read").expect("etcdctl ended")
    }

    /// Unlocks as at Ctrl-C.
    async fn unlock(mut self) {
        let id = self.process.id().expect("it runs").to_string();
        Command::new("kill").args(["-INT", &id]).status().await.expect("send a signal");
        self.process.wait().await.expect("it ends");
    }
}

async fn leases() -> Leases<EtcdStore> {
    let builder = EtcdStore::builder([shared()]).session_ttl(SESSION).prefix("");
    let store = builder.connect().await.expect("connect");
    Leases::builder(store).wait(PATIENCE).build().expect("valid settings")
}

#[tokio::test]
async fn a_lock_of_etcdctl_excludes_us_until_it_is_released() {
    let (leases, name) = (leases().await, "interop-theirs");
    let mut other = Other::lock(name);
    let key = other.has_it().await;
    assert!(key.starts_with(&format!("{name}/")), "{key}");

    assert!(leases.lease(name).try_acquire().await.unwrap().is_none());
    let shown = leases.show(name).await.unwrap().expect("it is held");
    assert!(shown.holder.contains("another client"), "{shown:?}");
    let listed = leases.list(name).await.unwrap();
    assert_eq!(listed.iter().map(|it| it.fence).collect::<Vec<_>>(), [shown.fence]);

    let waiting = tokio::spawn({
        let leases = leases.clone();
        async move { leases.lease(name).acquire().await.unwrap() }
    });
    // Our claim waits behind theirs.
    let mut client = client_at(shared()).await;
    until("two claims", async || keys(&mut client, format!("{name}/")).await == 2).await;
    assert!(!waiting.is_finished());
    other.unlock().await;
    let lease = timeout(PATIENCE, waiting).await.expect("let in").unwrap();
    assert!(lease.fence() > shown.fence, "{} after {}", lease.fence(), shown.fence);
    lease.release().await.unwrap();
}

#[tokio::test]
async fn our_lease_makes_etcdctl_wait_until_it_is_released() {
    let (leases, name) = (leases().await, "interop-ours");
    let lease = leases.lease(name).acquire().await.unwrap();
    let mut other = Other::lock(name);
    let mut client = client_at(shared()).await;
    until("two claims", async || keys(&mut client, format!("{name}/")).await == 2).await;
    let early = timeout(Duration::from_millis(300), other.lines.next_line()).await;
    assert!(early.is_err(), "it has the lock while the lease is held: {early:?}");

    // A request that only tries is refused while etcdctl waits, and does not pass it.
    lease.release().await.unwrap();
    other.has_it().await;
    assert!(leases.lease(name).try_acquire().await.unwrap().is_none());
    other.unlock().await;
    leases.lease(name).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_lock_of_etcdctl_can_be_stolen() {
    let (leases, name) = (leases().await, "interop-stolen");
    let mut other = Other::lock(name);
    other.has_it().await;
    assert!(leases.steal(name).await.unwrap().is_some());
    leases.lease(name).acquire().await.unwrap().release().await.unwrap();
}
