//! Many waiting requests in one process, whose session watches many nodes.

use std::time::Duration;

use lockkit::{
    LeaseStore,
    store::{Acquired, Answer, Claim, Renewal, Token},
};
use lockkit_zookeeper::{Layout, ZooKeeperStore};
use tokio::task::JoinSet;

use crate::{
    proxy::Proxy,
    support::{children, client, own_root, shared_server, store_on, wait_for_children, within},
};

/// So long that no session ends because the machine is slow.
const SESSION: Duration = Duration::from_secs(30);

/// With their paths, more than the 128 KiB that one request to the server may have.
const KEYS: usize = 600;

async fn claim_all(store: &ZooKeeperStore, keys: &[String]) -> Vec<Claim> {
    let mut claims = Vec::new();
    let mut asked = JoinSet::new();
    for key in keys {
        let mut claim = Claim::new(&**key, Token::random(), "waiter", SESSION * 10);
        claim.queue = true;
        claims.push(claim.clone());
        let store = store.clone();
        asked.spawn(async move { store.lease_acquire(&claim).await.expect("an answer") });
    }
    asked.join_all().await;
    claims
}

#[tokio::test]
async fn a_process_that_waits_for_many_keys_keeps_its_leases_across_a_reconnect() {
    let (root, client) = (own_root(), client().await);
    let proxy = Proxy::to(shared_server()).await;
    let here = store_on(&proxy.host(), &root, SESSION, Layout::Curator).await;
    let there = store_on(shared_server(), &root, SESSION, Layout::Curator).await;
    let keys: Vec<_> = (0..KEYS).map(|number| format!("{number:0230}")).collect();
    let held = within(claim_all(&there, &keys)).await;
    let waiting = within(claim_all(&here, &keys)).await;
    let own = Claim::new("own", Token::random(), "holder", SESSION * 10);
    here.lease_acquire(&own).await.expect("an answer");
    let session = here.session_id();

    for _ in 0..2 {
        proxy.cut();
        let renewed = async {
            let renewal = Renewal::new("own", own.token, SESSION * 10);
            loop {
                // An error while no connection is open.
                if let Ok(answers) = here.lease_renew(std::slice::from_ref(&renewal)).await {
                    return answers;
                }
            }
        };
        assert_eq!(within(renewed).await, [Answer::Done], "the lease is kept");
        assert_eq!(here.session_id(), session, "the session is kept");
    }

    // Each release is noticed, watched or not.
    for at in [0, KEYS / 2, KEYS - 1] {
        there.lease_release(&held[at].key, held[at].token, Duration::ZERO).await.expect("an answer");
        let granted = async {
            loop {
                match here.lease_acquire(&waiting[at]).await.expect("an answer") {
                    Acquired::Held { .. } => here.lease_freed(&waiting[at].key).await,
                    granted @ Acquired::Granted(_) => return granted,
                }
            }
        };
        assert!(matches!(within(granted).await, Acquired::Granted(_)));
        wait_for_children(&client, &here.path(&keys[at]), 1).await;
    }
    assert_eq!(children(&client, &root).await.len(), KEYS + 1);
}
