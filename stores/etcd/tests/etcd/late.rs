//! Requests that reach the server after they were given up.

use std::time::Duration;

use lockkit::{
    LeaseStore,
    store::{Acquired, Answer, Claim, Renewal, Token},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::timeout;

use crate::server::{client_at, keys, store_at, until};

const TTL: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_it_was_given_up_takes_nothing() {
    let server = Etcd::alone();
    let (stopped, other) = (store_at(server.endpoints()).await, store_at(server.endpoints()).await);
    // Sessions are there before the server stops.
    for (store, key) in [(&stopped, "warm/1"), (&other, "warm/2")] {
        let claim = Claim::new(key, Token::random(), "test", TTL);
        assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
        assert_eq!(store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap(), Answer::Done);
    }

    for queue in [false, true] {
        let mut claims = ["late/1", "late/2", "late/3"].map(|it| Claim::new(it, Token::random(), "late", TTL));
        for claim in &mut claims {
            claim.queue = queue;
        }
        server.members[0].stop();
        // The requests are in the buffers of a server that does not read them.
        for claim in &claims {
            let given_up = timeout(Duration::from_millis(100), stopped.lease_acquire(claim)).await;
            assert!(given_up.is_err(), "a stopped server answered {given_up:?}");
        }
        let releases = claims.each_ref().map(|claim| {
            let (store, claim) = (stopped.clone(), claim.clone());
            tokio::spawn(async move { store.lease_release(&claim.key, claim.token, Duration::ZERO).await })
        });
        server.members[0].go_on();
        for release in releases {
            release.await.unwrap().expect("the server answers again");
        }
        let mut client = client_at(&server.endpoints()[0]).await;
        let left = keys(&mut client, "lockkit/lock/late").await;
        assert_eq!(left, 0, "keys are left (queue: {queue})");
        for claim in &claims {
            let next = Claim::new(&claim.key, Token::random(), "next", TTL);
            let granted = other.lease_acquire(&next).await.unwrap();
            assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
            other.lease_release(&next.key, next.token, Duration::ZERO).await.unwrap();
        }
        assert_eq!(keys(&mut client, "lockkit/lock/").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_was_dropped_and_never_released_ends_with_its_ttl() {
    let server = Etcd::alone();
    let store = store_at(server.endpoints()).await;
    let warm = Claim::new("warm", Token::random(), "test", Duration::from_secs(1));
    assert!(matches!(store.lease_acquire(&warm).await.unwrap(), Acquired::Granted(_)));
    server.members[0].stop();
    let claim = Claim::new("dropped", Token::random(), "test", Duration::from_secs(1));
    timeout(Duration::from_millis(100), store.lease_acquire(&claim)).await.expect_err("a stopped server answered");
    server.members[0].go_on();
    let other = store_at(server.endpoints()).await;
    let free = until("the lease is free", async || {
        let next = Claim::new("dropped", Token::random(), "next", Duration::from_secs(5));
        matches!(other.lease_acquire(&next).await.unwrap(), Acquired::Granted(_))
    });
    println!("free after {:?}", free.await);
    // The stale claim cannot be renewed.
    let renewal = Renewal::new("dropped", claim.token, Duration::from_secs(1));
    assert_eq!(store.lease_renew(&[renewal]).await.unwrap(), [Answer::Gone]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_renewal_is_done_while_the_server_does_not_answer() {
    let server = Etcd::alone();
    let store = store_at(server.endpoints()).await;
    let claim = Claim::new("k", Token::random(), "test", Duration::from_secs(8));
    assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
    let renewal = [Renewal::new("k", claim.token, Duration::from_secs(8))];
    assert_eq!(store.lease_renew(&renewal).await.unwrap(), [Answer::Done]);
    server.members[0].stop();
    // Also bounded without a limit of the caller's.
    let silent = timeout(Duration::from_secs(20), store.lease_renew(&renewal)).await.expect("the call ends");
    assert!(silent.is_err(), "{silent:?}");
    server.members[0].go_on();
    until("renewed again", async || store.lease_renew(&renewal).await.is_ok_and(|it| it == [Answer::Done])).await;
}
