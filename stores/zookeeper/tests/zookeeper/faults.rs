//! One server that stops, dies and comes back.

use std::time::Duration;

use lockkit::{
    Error, Fault, LeaseStore, Leases, LossReason,
    store::{Acquired, Claim, Renewal, Token},
    testing::Oracle,
};
use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{Layout, zookeeper_client::Client};
use tokio::time::Instant;

use crate::support::{store_on, wait_for_children, within};

const SESSION: Duration = Duration::from_secs(2);

fn is_unavailable<T>(answer: &Result<T, Error>) -> bool {
    matches!(answer, Err(Error::Database { fault: Fault::Unavailable, .. }))
}

/// All in one test, because a server takes a second to start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_is_not_trusted_and_one_that_comes_back_is_used() {
    let mut server = ZooKeeper::alone();
    let oracle = Oracle::new();
    let store = store_on(&server.host(), "/locks", SESSION, Layout::Curator).await;
    let leases = Leases::builder(oracle.watch(store.clone())).ttl(SESSION * 5).build().expect("valid settings");
    let path = store.path("k");

    // It stops for less than a session timeout.
    let lease = leases.lease("k").acquire().await.expect("it is free");
    let trusted = store.trusted_for().expect("a session");
    server.program.stop();
    let stopped = Instant::now();
    let renewal = Renewal::new("k", Token::random(), SESSION);
    assert_eq!(store.lease_renew(&[renewal]).await.expect("nothing to ask").len(), 1);
    let direct = within(store.lease_look(lease.key())).await;
    assert!(is_unavailable(&direct), "{direct:?}");
    let waited = stopped.elapsed();
    eprintln!("a call to a stopped server ended after {waited:?}");
    assert_eq!(within(lease.lost()).await, LossReason::Unreachable);
    assert!(lease.trusted_until() <= std::time::Instant::from(stopped) + trusted, "it is not renewed while stopped");
    let refused = within(leases.lease("other").wait(Duration::from_millis(300)).acquire()).await;
    assert!(is_unavailable(&refused.map(drop)));
    drop(lease);
    server.program.go_on();
    let resumed = Instant::now();
    let lease = within(leases.lease("k").wait(SESSION * 10).acquire()).await.expect("its child is deleted");
    eprintln!("after the server went on, the next grant came after {:?}", resumed.elapsed());

    // It dies, and comes back with its data.
    server.program.kill();
    server.program.start_again();
    server.wait_until_it_serves();
    let restarted = Instant::now();
    let heir = tokio::spawn({
        let other = store_on(&server.host(), "/locks", SESSION, Layout::Curator).await;
        let request = Leases::new(oracle.watch(other)).lease("k").wait(SESSION * 10);
        async move { request.acquire().await.expect("its turn") }
    });
    let survived = lease.is_trusted();
    let fence = lease.fence();
    drop(lease);
    let heir = within(heir).await.expect("no panic");
    eprintln!(
        "the server was killed and started: the lease survived: {survived}; the heir had it after {:?}",
        restarted.elapsed()
    );
    assert!(heir.fence() > fence);
    heir.release().await.expect("a release");

    // The data are gone: the node of the key, the root and the session.
    let client = Client::connect(&server.host()).await.expect("a session");
    wait_for_children(&client, &path, 0).await;
    client.delete(&path, None).await.expect("it has no children");
    for name in client.list_children("/locks").await.expect("the root") {
        client.delete(&format!("/locks/{name}"), None).await.expect("it has no children");
    }
    client.delete("/locks", None).await.expect("it has no children");
    let claim = Claim::new("k", Token::random(), "after all", SESSION);
    let granted = within(store.lease_acquire(&claim)).await.expect("an answer");
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
    assert!(oracle.assert_exclusive() >= 3);
}
