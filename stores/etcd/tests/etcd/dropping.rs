//! Futures that are dropped at any point.

use std::time::Duration;

use lockkit::{
    LeaseStore, Leases,
    store::{Claim, Token},
    testing::{Oracle, drop_at_every_await},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::server::{client_at, keys, leases, shared, store, until};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

#[tokio::test]
async fn a_future_dropped_anywhere_leaves_no_claim() {
    let leases = leases().await;
    let mut client = client_at(shared()).await;
    let work = || async {
        let lease = leases.lease("dropped").acquire().await.unwrap();
        lease.extend(SECONDS(3)).await.unwrap();
        lease.release().await.unwrap();
    };
    let drops = drop_at_every_await(work)
        .then(async |_| {
            until("no claim is left", async || keys(&mut client, "lockkit/lock/dropped/").await == 0).await;
        })
        .await;
    println!("{drops:?}");
    assert!(drops.completed && drops.points > 5, "{drops:?}");
}

#[tokio::test]
async fn a_call_of_the_store_dropped_anywhere_takes_nothing_for_longer_than_its_ttl() {
    let store = store().await;
    let acquire = || async {
        let mut claim = Claim::new("raw", Token::random(), "test", Duration::from_millis(200));
        claim.queue = true;
        store.lease_acquire(&claim).await.unwrap();
        store.lease_release(&claim.key, claim.token, Duration::from_millis(300)).await.unwrap();
    };
    let mut client = client_at(shared()).await;
    let drops = drop_at_every_await(acquire)
        .then(async |_| {
            until("no claim is left", async || keys(&mut client, "lockkit/lock/raw/").await == 0).await;
        })
        .await;
    println!("{drops:?}");
    assert!(drops.points > 5, "{drops:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_that_are_dropped_at_any_time_neither_share_nor_leave_a_lease() {
    let oracle = Oracle::new();
    let mut working = JoinSet::new();
    for process in 0..6 {
        let leases = Leases::builder(oracle.watch(store().await)).ttl(SECONDS(2)).build().unwrap();
        for task in 0..2 {
            let leases = leases.clone();
            working.spawn(async move {
                let (begun, mut granted, mut dropped) = (Instant::now(), 0, 0);
                let mut turn = process * 7 + task * 3;
                while begun.elapsed() < SECONDS(3) {
                    turn += 1;
                    let patience = Duration::from_millis(turn * 37 % 200);
                    let key = if turn % 3 == 0 { "dropping/a" } else { "dropping/b" };
                    match timeout(patience, leases.lease(key).acquire()).await {
                        Ok(lease) => {
                            granted += 1;
                            sleep(Duration::from_millis(turn % 5)).await;
                            let lease = lease.unwrap();
                            if turn % 2 == 0 {
                                lease.release().await.unwrap();
                            }
                        }
                        Err(_) => dropped += 1,
                    }
                }
                (granted, dropped)
            });
        }
    }
    let (mut granted, mut dropped) = (0, 0);
    for (more_granted, more_dropped) in working.join_all().await {
        granted += more_granted;
        dropped += more_dropped;
    }
    oracle.assert_exclusive();
    println!("{granted} grants, {dropped} dropped waits");
    assert!(granted > 20 && dropped > 20, "{granted} {dropped}");
    let mut client = client_at(shared()).await;
    until("no claim is left", async || keys(&mut client, "lockkit/lock/dropping").await == 0).await;
}
