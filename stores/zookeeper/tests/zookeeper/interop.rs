//! Leases and the locks of other clients on one path: Curator itself, and the protocol of kazoo.

use std::{process::Stdio, time::Duration};

use lockkit::{Lease, LeaseStore, Leases};
use lockkit_zookeeper::{
    Layout, ZooKeeperStore,
    zookeeper_client::{Acls, Client, CreateMode},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    task::JoinHandle,
};

use crate::support::{SESSION, children, client, own_root, shared_server, store, store_on, wait_for_children, within};

const WAIT: Duration = Duration::from_secs(50);

fn waiting(leases: &Leases<ZooKeeperStore>) -> JoinHandle<Lease<ZooKeeperStore>> {
    let request = leases.lease("k").wait(WAIT);
    tokio::spawn(async move { request.acquire().await.expect("its turn") })
}

#[tokio::test]
async fn a_mutex_of_curator_and_a_lease_exclude_each_other_and_wait_for_each_other() {
    let client = client().await;
    let leases = Leases::new(store(&own_root()).await);
    let path = leases.store().path("k");
    let mut curator = Curator::start(&path);

    // Ours, and Curator is refused, and then waits.
    let lease = leases.lease("k").acquire().await.expect("it is free");
    assert_eq!(curator.tell("try").await, "false");
    wait_for_children(&client, &path, 1).await;
    curator.say("acquire").await;
    wait_for_children(&client, &path, 2).await;
    lease.release().await.expect("a release");
    assert_eq!(curator.line().await, "acquired");

    // Curator's, and ours is refused, and then waits.
    let shown = leases.show("k").await.expect("an answer").expect("it is held");
    assert!(shown.holder.starts_with("another client"), "{shown:?}");
    assert!(leases.lease("k").try_acquire().await.expect("an answer").is_none());
    let waiter = waiting(&leases);
    wait_for_children(&client, &path, 2).await;
    assert_eq!(curator.tell("release").await, "released");
    let lease = within(waiter).await.expect("no panic");
    assert!(lease.fence() > shown.fence);
    assert_eq!(curator.tell("try").await, "false");
    lease.release().await.expect("a release");

    // An operator frees Curator's.
    assert_eq!(curator.tell("try").await, "true");
    leases.steal("k").await.expect("an answer").expect("it is held");
    drop(leases.lease("k").acquire().await.expect("it was freed"));
    wait_for_children(&client, &path, 0).await;
}

#[tokio::test]
async fn a_lock_of_kazoo_and_a_lease_exclude_each_other_and_wait_for_each_other() {
    let client = client().await;
    let leases = Leases::new(store_on(shared_server(), &own_root(), SESSION, Layout::Kazoo).await);
    let path = leases.store().path("k");
    let lease = leases.lease("k").acquire().await.expect("it is free");
    let mut kazoo = Kazoo::new(&client, &path);
    assert!(!kazoo.acquire(false).await);
    kazoo.release().await;
    let kazoo_waits = tokio::spawn({
        let (client, path) = (client.clone(), path.clone());
        async move {
            let mut kazoo = Kazoo::new(&client, &path);
            assert!(kazoo.acquire(true).await);
            kazoo.own
        }
    });
    wait_for_children(&client, &path, 2).await;
    lease.release().await.expect("a release");
    kazoo.own = within(kazoo_waits).await.expect("no panic");

    let shown = leases.show("k").await.expect("an answer").expect("it is held");
    assert!(shown.holder.starts_with("another client"), "{shown:?}");
    assert!(leases.lease("k").try_acquire().await.expect("an answer").is_none());
    let waiter = waiting(&leases);
    wait_for_children(&client, &path, 2).await;
    kazoo.release().await;
    let lease = within(waiter).await.expect("no panic");
    assert!(lease.fence() > shown.fence);
    assert!(!Kazoo::new(&client, &path).acquire(false).await);
}

#[tokio::test]
async fn a_lease_of_one_layout_waits_for_the_locks_of_the_other() {
    let root = own_root();
    let kazoo = Leases::new(store_on(shared_server(), &root, SESSION, Layout::Kazoo).await);
    let curator = Leases::new(store(&root).await);
    for (holder, other) in [(&kazoo, &curator), (&curator, &kazoo)] {
        let lease = holder.lease("k").acquire().await.expect("it is free");
        assert!(other.lease("k").try_acquire().await.expect("an answer").is_none());
        lease.release().await.expect("a release");
    }
}

#[tokio::test]
async fn a_sweep_leaves_the_nodes_of_other_clients() {
    let client = client().await;
    let store = store(&own_root()).await;
    let path = store.path("k");
    client.mkdir(&path, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.expect("a node");
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(store.lease_sweep(Duration::from_millis(1), 10).await.expect("an answer"), 0);
    assert_eq!(children(&client, path.rsplit_once('/').expect("a path").0).await.len(), 1, "the key");
}

/// A Java program with a mutex of Curator.
struct Curator {
    _child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Curator {
    fn start(path: &str) -> Self {
        let jars = [
            "curator-recipes",
            "curator-framework",
            "curator-client",
            "zookeeper",
            "zookeeper-jute",
            "guava",
            "slf4j-api",
            "slf4j-nop",
            "netty-all",
        ];
        let jars: Vec<_> = jars.iter().map(|it| format!("/usr/share/java/{it}.jar")).collect();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/zookeeper/Curator.java");
        let mut child = Command::new("java")
            .args([
                "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC",
                "-cp",
                &jars.join(":"),
                source,
                shared_server(),
                path,
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("start java: tests/run installs it");
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { _child: child, input, output }
    }

    async fn say(&mut self, command: &str) {
        self.input.write_all(format!("{command}\n").as_bytes()).await.expect("it reads");
    }

    async fn line(&mut self) -> String {
        within(self.output.next_line()).await.expect("read a line").expect("it runs")
    }

    async fn tell(&mut self, command: &str) -> String {
        self.say(command).await;
        self.line().await
    }
}

/// A lock as that of kazoo 2.11: `recipe/lock.py`, its `_inner_acquire` and `_get_predecessor`.
struct Kazoo<'c> {
    client: &'c Client,
    path: String,
    prefix: String,
    /// The child that it has created.
    own: String,
}

impl<'c> Kazoo<'c> {
    fn new(client: &'c Client, path: &str) -> Self {
        let id = lockkit::store::Token::random();
        let hex = format!("{:032x}", u128::from_be_bytes(*id.as_bytes()));
        Self { client, path: path.to_owned(), prefix: format!("{hex}__lock__"), own: String::new() }
    }

    async fn acquire(&mut self, blocking: bool) -> bool {
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let path = format!("{}/{}", self.path, self.prefix);
        let (_, number) = self.client.create(&path, b"", &options).await.expect("a child");
        self.own = format!("{}{number}", self.prefix);
        loop {
            // `(?:__lock__)(-?\d{10})$`, compared as text.
            let number = |name: &str| name.split_once("__lock__").map(|it| it.1.to_owned());
            let own = number(&self.own).expect("a number");
            let children = children(self.client, &self.path).await;
            let before = children.iter().filter(|it| number(it).is_some_and(|it| it < own)).max_by_key(|it| number(it));
            let Some(before) = before else { return true };
            if !blocking {
                return false;
            }
            if let Ok((_, _, watcher)) = self.client.get_and_watch_data(&format!("{}/{before}", self.path)).await {
                watcher.changed().await;
            }
        }
    }

    async fn release(&mut self) {
        self.client.delete(&format!("{}/{}", self.path, self.own), None).await.expect("it is there");
    }
}
