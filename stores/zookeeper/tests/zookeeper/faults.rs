//! One server that stops, dies and comes back.

use std::time::Duration;

use lockkit::{
    Error, Fault, LeaseStore, Leases, LossReason,
    store::{Acquired, Answer, Claim, Renewal, Token},
    testing::Oracle,
};
use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{Layout, zookeeper_client::Client};
use tokio::time::{Instant, sleep};

use crate::{
    proxy::Proxy,
    support::{own_root, shared_server, store_on, wait_for_children, within},
};

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

/// Servers that come back after an outage give every session its whole timeout again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_given_up_during_an_outage_leaves_no_child_when_the_servers_are_back() {
    let mut server = ZooKeeper::alone();
    let store = store_on(&server.host(), "/locks", SESSION * 2, Layout::Curator).await;
    let claim = Claim::new("k", Token::random(), "before", SESSION * 100);
    store.lease_acquire(&claim).await.expect("an answer");
    let old = format!("0x{:x}", store.session_id().expect("a session"));
    assert!(server.query("dump").contains("-lock-"));
    server.program.kill();
    within(async {
        while store.session_id().is_some() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    server.program.start_again();
    server.wait_until_it_serves();
    let deleted = async {
        loop {
            let dump = server.query("dump");
            let (has_session, has_child) = (dump.contains(&old), dump.contains("-lock-"));
            // An empty answer is one of a server that does not serve yet.
            assert!(has_session || dump.is_empty(), "the child went with its session: {dump}");
            if has_session && !has_child {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    within(deleted).await;
    let renewal = Renewal::new("k", claim.token, SESSION);
    assert_eq!(store.lease_renew(&[renewal]).await.expect("an answer"), [Answer::Gone]);
    let heir = Claim::new("k", Token::random(), "heir", SESSION);
    assert!(matches!(store.lease_acquire(&heir).await.expect("an answer"), Acquired::Granted(_)));
}

#[tokio::test]
async fn a_holder_that_is_cut_off_stops_trusting_before_its_heir_is_granted() {
    let root = own_root();
    let (proxy, oracle) = (Proxy::to(shared_server()).await, Oracle::new());
    let cut_off = store_on(&proxy.host(), &root, SESSION, Layout::Curator).await;
    let other = store_on(shared_server(), &root, SESSION, Layout::Curator).await;
    let here = Leases::new(oracle.watch(cut_off.clone()));
    let there = Leases::new(oracle.watch(other));
    for _ in 0..2 {
        let lease = here.lease("k").wait(SESSION * 20).acquire().await.expect("its turn");
        let waiting = tokio::spawn({
            let request = there.lease("k").wait(SESSION * 20);
            async move { request.acquire().await.expect("the session of the holder ends") }
        });
        proxy.part();
        let parted = Instant::now();
        assert_eq!(within(lease.lost()).await, LossReason::Unreachable);
        let (lost, session) = (parted.elapsed(), cut_off.session_id());
        let heir = within(waiting).await.expect("no panic");
        eprintln!("a holder was cut off: lost after {lost:?}, the heir had the lease after {:?}", parted.elapsed());
        assert!(heir.fence() > lease.fence());
        drop(lease);
        proxy.join();
        // It learns that its session has ended, and opens another one.
        within(async {
            while cut_off.session_id().is_none_or(|it| Some(it) == session) {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        heir.release().await.expect("a release");
    }
    assert_eq!(oracle.assert_exclusive(), 4);
}
