//! What the operations cost, by the server's own counters.

use std::time::{Duration, Instant};

use lockkit::{
    LeaseStore, Leases,
    store::{Claim, Release, Renewal, Token},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::sleep;

use crate::server::{client_at, keys, store_at, until};

/// Requests and messages that the server has received so far.
fn received(server: &Etcd) -> f64 {
    let calls = server.metrics(0, "grpc_server_msg_received_total{");
    assert!(calls > 0.0, "the server counts messages");
    calls
}

/// What the background sends in this time is small beside what is asserted.
async fn cost<T>(server: &Etcd, what: &str, times: u32, mut act: impl AsyncFnMut(u32) -> T) -> f64 {
    let before = received(server);
    for time in 0..times {
        act(time).await;
    }
    let each = (received(server) - before) / f64::from(times);
    println!("{what}: {each:.2} messages");
    each
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_is_one_round_trip() {
    let server = Etcd::alone();
    let builder = lockkit_etcd::EtcdStore::builder(server.endpoints()).session_ttl(Duration::from_secs(60));
    let store = builder.connect().await.unwrap();
    let claims: Vec<_> =
        (0..40).map(|it| Claim::new(format!("k{it}"), Token::random(), "test", Duration::from_secs(20))).collect();
    // The session is made by the first claim.
    store.lease_acquire(&Claim::new("warm", Token::random(), "test", Duration::from_secs(20))).await.unwrap();

    let acquire = cost(&server, "acquire", 40, async |it| store.lease_acquire(&claims[it as usize]).await.unwrap());
    assert!((acquire.await - 1.0).abs() < 0.1);
    let refused = |it: u32| Claim::new(&claims[it as usize].key, Token::random(), "other", Duration::from_secs(20));
    let refuse = cost(&server, "refused", 40, async |it| store.lease_acquire(&refused(it)).await.unwrap());
    assert!((refuse.await - 1.0).abs() < 0.1);
    let look = cost(&server, "look", 40, async |it| store.lease_look(&claims[it as usize].key).await.unwrap());
    assert!((look.await - 1.0).abs() < 0.1);
    let renewals: Vec<_> = claims.iter().map(|it| Renewal::new(&it.key, it.token, it.ttl)).collect();
    store.lease_renew(&renewals).await.unwrap();
    let renew = cost(&server, "renewal of 40", 40, async |_| store.lease_renew(&renewals).await.unwrap());
    assert!((renew.await - 2.0).abs() < 0.1, "a keep-alive and a read");
    let release = |it: &Claim| Release::new(&it.key, it.token, Duration::ZERO);
    let one = cost(&server, "release", 20, async |it| {
        let Release { key, token, min_hold, .. } = release(&claims[it as usize]);
        store.lease_release(&key, token, min_hold).await.unwrap()
    });
    assert!((one.await - 1.0).abs() < 0.1);
    let releases: Vec<_> = claims[20..].iter().map(release).collect();
    let all = cost(&server, "release of 20", 1, async |_| store.lease_release_all(&releases).await.unwrap());
    assert!(all.await <= 2.0);
    let claims: Vec<_> =
        (0..40).map(|it| Claim::new(format!("m{it}"), Token::random(), "test", Duration::from_secs(20))).collect();
    let all = cost(&server, "acquire of 40", 1, async |_| store.lease_acquire_all(&claims).await.unwrap());
    assert!(all.await <= 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_do_not_storm_the_server() {
    let server = Etcd::alone();
    let holder = Leases::new(store_at(server.endpoints()).await);
    let lease = holder.lease("k").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..20 {
        let leases = Leases::builder(store_at(server.endpoints()).await).build().unwrap();
        waiting.push(tokio::spawn(async move {
            leases.lease("k").wait(Duration::from_secs(60)).acquire().await.unwrap().release().await.unwrap();
            Instant::now()
        }));
    }
    // All of them are in the queue.
    let mut client = client_at(&server.endpoints()[0]).await;
    until("21 claims", async || keys(&mut client, "lockkit/lock/k/").await == 21).await;
    sleep(Duration::from_secs(1)).await;
    let (before, begun) = (received(&server), Instant::now());
    sleep(Duration::from_secs(3)).await;
    let each_second = (received(&server) - before) / begun.elapsed().as_secs_f64();
    println!("20 waiting processes: {each_second:.1} messages a second");
    assert!(each_second < 150.0, "{each_second} messages a second");

    let before = received(&server);
    let released = Instant::now();
    lease.release().await.unwrap();
    let mut last = released;
    for it in waiting {
        last = last.max(it.await.unwrap());
    }
    let messages = received(&server) - before;
    println!("20 turns, one after the other: {:?}, {messages} messages", last - released);
    assert!(messages < 20.0 * 12.0, "a release wakes one process: {messages} messages");
}
