//! Keys of other owners where a lease has its own: never written, released over or deleted.

use std::time::Duration;

use lockkit::{
    Error, Fault, LeaseStore, Leases,
    store::{AcquiredAll, Claim, Token},
};
use lockkit_etcd::EtcdStore;

use crate::server::{SESSION, client_at, keys, shared, store, until};

const CONFIG: &str = r#"{"host":"db1","pool":20,"user":"app","timeout":"30s"}"#;

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

#[track_caller]
fn assert_foreign<T: std::fmt::Debug>(answer: Result<T, Error>, path: &str) {
    let refused = answer.expect_err("it is no lock");
    assert!(matches!(refused, Error::Database { fault: Fault::Other, .. }), "{refused:?}");
    let said = text(&refused);
    assert!(said.contains(path) && said.contains(r#"{"host":"db1","pool":20"#) && !said.contains("30s"), "{said}");
}

#[tokio::test]
async fn a_key_of_another_owner_below_the_name_is_an_error_and_stays() {
    let mut client = client_at(shared()).await;
    let path = "foreign/db/primary";
    client.put(path, CONFIG, None).await.unwrap();
    let builder = EtcdStore::builder([shared()]).session_ttl(SESSION).prefix("foreign/");
    let leases = Leases::new(builder.connect().await.unwrap());
    for wait in [Duration::ZERO, Duration::from_secs(20)] {
        assert_foreign(leases.lease("db").wait(wait).acquire().await.map(drop), path);
        until("no claim is left", async || keys(&mut client, "foreign/").await == 1).await;
    }
    assert_foreign(leases.all(["db", "other"]).acquire().await.map(drop), path);
    assert_foreign(leases.show("db").await, path);
    assert_foreign(leases.steal("db").await, path);
    assert_foreign(
        leases.store().lease_release(&"db".into(), Token::from_bytes(*b"         primary"), Duration::ZERO).await,
        path,
    );
    assert_eq!(leases.list("").await.unwrap().len(), 0);
    until("no claim is left", async || keys(&mut client, "foreign/").await == 1).await;
    let kept = client.get(path, None).await.unwrap();
    assert_eq!((kept.kvs()[0].value_str().unwrap(), kept.kvs()[0].version()), (CONFIG, 1));
}

#[tokio::test]
async fn a_key_of_another_owner_at_the_last_holders_place_is_an_error_and_stays() {
    let (mut client, store) = (client_at(shared()).await, store().await);
    let path = "lockkit/last/lockkit/lock/foreign-last";
    client.put(path, CONFIG, None).await.unwrap();
    for queue in [false, true] {
        let mut claim = Claim::new("foreign-last", Token::random(), "holder", SESSION);
        claim.queue = queue;
        assert_foreign(store.lease_acquire(&claim).await, path);
        let claims = [
            Claim::new("foreign-last", Token::random(), "holder", SESSION),
            Claim::new("foreign-other", Token::random(), "holder", SESSION),
        ];
        let both = store.lease_acquire_all(&claims).await;
        assert_foreign(both.map(|it| matches!(it, AcquiredAll::Granted(_))), path);
    }
    until("no claim is left", async || keys(&mut client, "lockkit/lock/foreign-").await == 0).await;
    store.lease_sweep(Duration::ZERO, 100).await.unwrap();
    let kept = client.get(path, None).await.unwrap();
    assert_eq!((kept.kvs()[0].value_str().unwrap(), kept.kvs()[0].version()), (CONFIG, 1));
    client.delete(path, None).await.unwrap();
    Leases::new(store).lease("foreign-last").acquire().await.unwrap().release().await.unwrap();
}
