//! Nodes of other owners at the path of a key, and below the root: never written, released over or deleted.

use std::time::Duration;

use lockkit::{
    Error, Fault, LeaseStore, Leases, Released,
    store::{Acquired, Answer, Claim, Token},
};
use lockkit_zookeeper::{
    Layout, ZooKeeperStore,
    zookeeper_client::{Acls, Client, CreateMode},
};

use crate::support::{children, client, own_root, shared_server, store_on, wait_for_children, within};

/// So long that no session ends because the machine is slow.
const SESSION: Duration = Duration::from_secs(60);

/// What a service keeps in the node of its configuration.
const CONFIG: &[u8] = br#"{"host":"db1","pool":20,"user":"app","timeout":"30s"}"#;

async fn store(root: &str) -> ZooKeeperStore {
    store_on(shared_server(), root, SESSION, Layout::Curator).await
}

/// Creates the node, and the nodes above it.
async fn put(client: &Client, path: &str, data: &[u8]) {
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let (above, _) = path.rsplit_once('/').expect("a path");
    client.mkdir(above, &options).await.expect("the nodes above");
    client.create(path, data, &options).await.expect("a new node");
}

/// The data of the node, which no client has written since it was created.
async fn assert_untouched(client: &Client, path: &str, data: &[u8]) {
    let (found, stat) = client.get_data(path).await.expect("the node is there");
    assert_eq!((String::from_utf8_lossy(&found), stat.version), (String::from_utf8_lossy(data), 0), "{path}");
}

/// The error and its sources, in one text.
fn text(err: &Error) -> String {
    let mut text = err.to_string();
    let mut next = std::error::Error::source(err);
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

#[tokio::test]
async fn a_node_with_data_of_another_owner_is_an_error_and_keeps_them() {
    let (root, client) = (own_root(), client().await);
    let path = format!("{root}/db");
    put(&client, &path, CONFIG).await;
    let leases = Leases::new(store(&root).await);
    for wait in [Duration::ZERO, Duration::from_secs(20)] {
        let refused = within(leases.lease("db").wait(wait).acquire()).await.expect_err("it is no lock");
        assert!(matches!(refused, Error::Database { fault: Fault::Other, .. }), "{refused:?}");
        let said = text(&refused);
        assert!(said.contains(r#"{"host":"db1","pool":20"#) && !said.contains("30s"), "{said}");
        wait_for_children(&client, &path, 0).await;
    }
    assert_untouched(&client, &path, CONFIG).await;

    // A lock of kazoo is held below it. An operator does not free it, because the node is no lock of lockkit.
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let lock = format!("{path}/0123456789abcdef0123456789abcdef__lock__");
    client.create(&lock, b"", &options).await.expect("a child");
    let refused = leases.steal("db").await.expect_err("it is no lock of lockkit");
    assert!(text(&refused).contains("db1"), "{refused:?}");
    assert_eq!(children(&client, &path).await.len(), 1);
    assert_untouched(&client, &path, CONFIG).await;
}

#[tokio::test]
async fn the_node_of_another_clients_lock_is_used_without_a_write() {
    let (root, client) = (own_root(), client().await);
    let store = store(&root).await;
    // As kazoo creates it; as Curator does with its default data; as a later version of lockkit may.
    for (number, data) in
        [&b""[..], b"127.0.1.1", b"fe80:0:0:0:1:2:3:4%eth0", b"lockkit 2\nfree"].into_iter().enumerate()
    {
        let key = format!("k{number}");
        let path = store.path(&key);
        put(&client, &path, data).await;
        for (ttl, min_hold) in [
            (SESSION, Some(Duration::ZERO)),
            (SESSION, Some(Duration::from_millis(200))),
            // It expires.
            (Duration::from_millis(100), None),
        ] {
            let claim = Claim::new(&*key, Token::random(), "holder", ttl);
            let granted = within(store.lease_acquire(&claim)).await.expect("an answer");
            assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
            if let Some(min_hold) = min_hold {
                let released = store.lease_release(&claim.key, claim.token, min_hold).await;
                assert_eq!(released.expect("an answer"), Answer::Done);
            }
            wait_for_children(&client, &path, 0).await;
            assert_untouched(&client, &path, data).await;
        }
    }
    assert_eq!(store.lease_sweep(Duration::ZERO, 10).await.expect("an answer"), 0);
    assert_eq!(children(&client, &root).await.len(), 4);
}

#[tokio::test]
async fn data_that_another_owner_writes_while_the_lease_is_held_stay() {
    let (root, client) = (own_root(), client().await);
    let here = store(&root).await;
    let leases = Leases::new(here.clone());
    let path = here.path("k");
    let write = async || client.set_data(&path, CONFIG, None).await.expect("the node is there").version;
    let assert_kept = async |version| {
        wait_for_children(&client, &path, 0).await;
        let (data, stat) = client.get_data(&path).await.expect("the node is there");
        assert_eq!((&*data, stat.version), (CONFIG, version), "{}", String::from_utf8_lossy(&data));
        assert_eq!(here.lease_sweep(Duration::ZERO, 10).await.expect("an answer"), 0);
        client.delete(&path, None).await.expect("no child is left");
    };

    let lease = leases.lease("k").acquire().await.expect("it is free");
    let version = write().await;
    assert_eq!(lease.release().await.expect("a release"), Released::WhileHeld);
    assert_kept(version).await;

    let kept = Claim::new("k", Token::random(), "holder", SESSION * 10);
    here.lease_acquire(&kept).await.expect("an answer");
    let version = write().await;
    let released = here.lease_release(&kept.key, kept.token, Duration::from_millis(200)).await;
    assert_eq!(released.expect("an answer"), Answer::Done);
    assert_kept(version).await;

    let expiring = Claim::new("k", Token::random(), "holder", Duration::from_secs(1));
    here.lease_acquire(&expiring).await.expect("an answer");
    let version = write().await;
    assert_kept(version).await;
}

#[tokio::test]
async fn a_persistent_node_that_is_named_as_a_claim_is_not_released() {
    let (root, client) = (own_root(), client().await);
    let leases = Leases::new(store(&root).await);
    let drawer = format!("{}/padlock-0000000001", leases.store().path("k"));
    put(&client, &drawer, CONFIG).await;
    let refused = leases.steal("k").await.expect_err("no client holds it");
    assert!(text(&refused).contains("padlock-0000000001"), "{refused:?}");
    assert_untouched(&client, &drawer, CONFIG).await;
}

#[tokio::test]
async fn nodes_that_cannot_be_read_or_are_no_keys_end_no_list_and_no_sweep() {
    let (root, client) = (own_root(), client().await);
    let leases = Leases::new(store(&root).await);
    let open = CreateMode::Persistent.with_acls(Acls::anyone_all());
    for odd in ["a%", "a%2F", "%clock", &"long".repeat(100)] {
        client.create(&format!("{root}/{odd}"), CONFIG, &open).await.expect("a new node");
    }
    let owner =
        Client::connector().with_auth("digest", b"owner:secret").connect(shared_server()).await.expect("a session");
    let private = CreateMode::Persistent.with_acls(Acls::creator_all());
    owner.create(&format!("{root}/private"), CONFIG, &private).await.expect("a new node");
    // Its claim cannot be read, the node can.
    let claimed = leases.store().path("claimed");
    put(&client, &claimed, b"").await;
    let claim = CreateMode::EphemeralSequential.with_acls(Acls::creator_all());
    owner.create(&format!("{claimed}/0123456789abcdef0123456789abcdef__lock__"), b"", &claim).await.expect("a child");

    let lease = leases.lease("mine").acquire().await.expect("it is free");
    drop(leases.lease("swept").acquire().await.expect("it is free"));
    wait_for_children(&client, &leases.store().path("swept"), 0).await;
    let listed = leases.list("").await.expect("a list");
    assert_eq!(listed.iter().map(|it| it.key.as_str()).collect::<Vec<_>>(), ["claimed", "mine"]);
    let shown = leases.show("claimed").await.expect("an answer").expect("it is held");
    assert!(shown.holder.starts_with("another client") && shown.fence.get() > 0, "{shown:?}");
    assert_eq!(leases.store().lease_sweep(Duration::ZERO, 100).await.expect("a sweep"), 1);
    assert_untouched(&client, &format!("{root}/%clock"), CONFIG).await;
    lease.release().await.expect("a release");
}
