//! Requests that reach the server after they were given up.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use etcd_client::GetOptions;
use lockkit::{
    LeaseStore,
    store::{Acquired, Answer, Claim, Renewal, Token},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    time::timeout,
};

use crate::server::{client_at, keys, shared, store, store_at, until};

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
async fn a_release_that_is_repeated_or_dropped_keeps_its_minimum_hold() {
    let server = Etcd::alone();
    let (store, other) = (store_at(server.endpoints()).await, store_at(server.endpoints()).await);
    for repeats in [true, false] {
        let claim = Claim::new("least", Token::random(), "test", TTL);
        assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
        let min_hold = Duration::from_secs(6);
        server.members[0].stop();
        let released = store.lease_release(&claim.key, claim.token, min_hold);
        timeout(Duration::from_millis(300), released).await.expect_err("a stopped server answered");
        server.members[0].go_on();
        if repeats {
            assert_eq!(store.lease_release(&claim.key, claim.token, min_hold).await.unwrap(), Answer::Done);
        }
        let is_left = async || other.lease_look(&claim.key).await.unwrap().expect("it stays taken").token.is_nobody();
        until("nobody holds it", is_left).await;
        until("it is free", async || other.lease_look(&claim.key).await.unwrap().is_none()).await;
    }
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_network_delivers_after_the_release_takes_nothing() {
    let server = Etcd::alone();
    let direct = server.endpoints().remove(0);
    let mut client = client_at(&direct).await;
    for queue in [false, true] {
        let slow = Slow::to(server.members[0].port).await;
        let store = store_at([format!("http://127.0.0.1:{}", slow.port), direct.clone()]).await;
        let warm = Claim::new("warm", Token::random(), "test", TTL);
        assert!(matches!(store.lease_acquire(&warm).await.unwrap(), Acquired::Granted(_)));
        store.lease_release(&warm.key, warm.token, Duration::ZERO).await.unwrap();

        let mut claim = Claim::new("delayed", Token::random(), "late", TTL);
        claim.queue = queue;
        slow.freeze();
        let mut acquiring = Box::pin(store.lease_acquire(&claim));
        assert!(timeout(Duration::from_millis(200), &mut acquiring).await.is_err());
        let request = slow.held();
        assert!(request > 0, "the request is on its way");
        drop(acquiring);
        // By way of the other address.
        store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap();
        let before = slow.answered();
        slow.deliver(request);
        until("the server has answered the late request", async || slow.answered() > before).await;
        assert_eq!(keys(&mut client, "lockkit/lock/delayed").await, 0, "it took the lease (queue: {queue})");
    }
}

#[tokio::test]
async fn a_token_that_is_used_again_gets_another_key() {
    let store = store().await;
    let mut client = client_at(shared()).await;
    let claim = Claim::new("used-again", Token::random(), "test", TTL);
    let mut keys = Vec::new();
    for _ in 0..2 {
        assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
        let options = GetOptions::new().with_prefix();
        let answer = client.get("lockkit/lock/used-again/", Some(options)).await.unwrap();
        keys.extend(answer.kvs().iter().map(|it| it.key().to_vec()));
        assert_eq!(store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap(), Answer::Done);
    }
    assert_eq!(keys.len(), 2);
    assert_ne!(keys[0], keys[1], "a late removal of the first would remove the second");
}

/// A network that holds back what a client sends.
struct Slow {
    port: u16,
    state: Arc<Mutex<Held>>,
    changed: Arc<Notify>,
}

#[derive(Default)]
struct Held {
    frozen: bool,
    bytes: Vec<u8>,
    /// How much of it may go on.
    released: usize,
    answered: usize,
}

impl Slow {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("listen");
        let slow = Self {
            port: listener.local_addr().expect("an address").port(),
            state: Arc::default(),
            changed: Arc::default(),
        };
        let (state, changed) = (slow.state.clone(), slow.changed.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { continue };
                let ((mut from, mut back), (mut answers, mut to)) = (client.into_split(), server.into_split());
                let held = state.clone();
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = answers.read(&mut bytes).await {
                        held.lock().unwrap().answered += count;
                        if back.write_all(&bytes[..count]).await.is_err() {
                            break;
                        }
                    }
                });
                let (state, changed) = (state.clone(), changed.clone());
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    loop {
                        let read = tokio::select! {
                            read = from.read(&mut bytes) => read.unwrap_or(0),
                            () = changed.notified() => {
                                let go_on = take(&state);
                                if to.write_all(&go_on).await.is_err() {
                                    break;
                                }
                                continue;
                            }
                        };
                        if read == 0 {
                            // What is held is delivered though the client is gone.
                            changed.notified().await;
                        }
                        let go_on = arrived(&state, &bytes[..read]);
                        if to.write_all(&go_on).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        slow
    }

    fn freeze(&self) {
        self.state.lock().unwrap().frozen = true;
    }

    /// How many bytes are held back.
    fn held(&self) -> usize {
        self.state.lock().unwrap().bytes.len()
    }

    fn deliver(&self, count: usize) {
        self.state.lock().unwrap().released = count;
        self.changed.notify_one();
    }

    /// How many bytes the server has sent.
    fn answered(&self) -> usize {
        self.state.lock().unwrap().answered
    }
}

/// What may go on after these bytes have come.
fn arrived(state: &Mutex<Held>, bytes: &[u8]) -> Vec<u8> {
    let mut held = state.lock().unwrap();
    held.bytes.extend_from_slice(bytes);
    if !held.frozen {
        held.released = held.bytes.len();
    }
    drop(held);
    take(state)
}

fn take(state: &Mutex<Held>) -> Vec<u8> {
    let mut held = state.lock().unwrap();
    let released = std::mem::take(&mut held.released).min(held.bytes.len());
    held.bytes.drain(..released).collect()
}
