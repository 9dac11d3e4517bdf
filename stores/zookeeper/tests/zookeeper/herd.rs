//! How many requests and wake-ups a release costs while many wait. On a server of its own, whose counters it reads.

use std::time::Duration;

use lockkit::{
    LeaseStore,
    store::{Acquired, Claim, Token},
};
use lockkit_store_servers::zookeeper::ZooKeeper;
use lockkit_zookeeper::{Layout, ZooKeeperStore};
use tokio::{sync::mpsc, time::Instant};

use crate::support::{PATIENCE, store_on, within};

const WAITERS: u64 = 30;

/// So long that no session sends a sign of life while requests are counted.
const SESSION: Duration = Duration::from_secs(600);

async fn claim(store: &ZooKeeperStore) -> Claim {
    let mut claim = Claim::new("k", Token::random(), "waiter", SESSION);
    claim.queue = true;
    store.lease_acquire(&claim).await.expect("an answer");
    claim
}

#[tokio::test]
async fn one_release_wakes_one_of_many_waiters() {
    let server = ZooKeeper::alone();
    let host = server.host();
    let holder = store_on(&host, "/herd", SESSION, Layout::Curator).await;
    let held = claim(&holder).await;
    let (woken, mut wakes) = mpsc::unbounded_channel();
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        let store = store_on(&host, "/herd", SESSION, Layout::Curator).await;
        let claim = claim(&store).await;
        let (waiting, woken) = (store.clone(), woken.clone());
        tokio::spawn(async move {
            waiting.lease_freed(&claim.key).await;
            woken.send((number, claim)).expect("the test listens");
        });
        waiters.push(store);
    }
    wait_until(&server, "zk_watch_count", WAITERS).await;
    let before = server.number("zk_packets_received");

    let started = Instant::now();
    holder.lease_release(&held.key, held.token, Duration::ZERO).await.expect("an answer");
    let (number, first) = within(wakes.recv()).await.expect("somebody is woken");
    assert_eq!(number, 0, "the one who waits longest");
    let took = started.elapsed();
    wait_until(&server, "zk_watch_count", WAITERS - 1).await;
    let requests = server.number("zk_packets_received") - before;
    assert!(wakes.try_recv().is_err(), "a second one was woken");
    eprintln!("{WAITERS} waiters: a release woke 1 after {took:?}; the server got {requests} requests in all");
    // The release, and the list of the one who was woken.
    assert!(requests < 10, "{requests} requests");
    let granted = waiters[0].lease_acquire(&first).await.expect("an answer");
    assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
}

async fn wait_until(server: &ZooKeeper, counter: &str, count: u64) {
    let started = Instant::now();
    while server.number(counter) != count {
        assert!(started.elapsed() < PATIENCE, "{counter} is {}, not {count}", server.number(counter));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
