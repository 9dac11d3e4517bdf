//! How a store is set up and what it outlives.

use std::{error::Error as _, time::Duration};

use lockkit::{
    LeaseStore, Leases, Released,
    store::{Claim, Token},
};
use lockkit_etcd::{
    ConnectError, EtcdStore, EtcdStoreBuilder,
    etcd_client::{ConnectOptions, Permission},
};
use lockkit_store_servers::etcd::Etcd;
use tokio::time::timeout;

use crate::server::{client_at, leases, shared, store, until};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

#[test]
fn a_store_survives_the_runtime_on_which_it_was_made() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let (leases, lease) = first.block_on(async {
        let leases = leases().await;
        let lease = leases.lease("runtime").acquire().await.unwrap();
        (leases, lease)
    });
    let second = runtime();
    // The second runtime is known before the first one ends.
    let _other = second.block_on(async {
        assert!(leases.lease("runtime").try_acquire().await.unwrap().is_none());
        leases.lease("runtime/other").acquire().await.unwrap()
    });
    drop(first);
    second.block_on(async {
        let lost = timeout(SECONDS(3), lease.lost()).await;
        assert!(lost.is_err(), "it is renewed on the other runtime: {lost:?}");
        assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
        leases.lease("runtime").acquire().await.unwrap().release().await.unwrap();
    });
}

#[tokio::test]
async fn wrong_settings_are_named() {
    let builder = || EtcdStore::builder([shared()]);
    for (wrong, named) in [
        (builder().session_ttl(SECONDS(1)), "session_ttl"),
        (builder().prefix("lockkit/last/x"), "prefix"),
        (EtcdStore::builder([""; 0]), "endpoints"),
    ] {
        let refused = wrong.connect().await.unwrap_err();
        assert!(matches!(refused, ConnectError::InvalidOption { option, .. } if option == named), "{refused}");
    }
    let port = lockkit_store_servers::free_port();
    let silent = EtcdStore::connect([format!("http://127.0.0.1:{port}")]).await.unwrap_err();
    assert!(matches!(silent, ConnectError::Unreachable { .. }), "{silent}");
    let reserved = builder().prefix("").connect().await.unwrap();
    let refused = Leases::new(reserved).lease("lockkit").try_acquire().await.unwrap_err();
    assert!(!refused.is_contended(), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_works_with_a_user_and_says_when_the_password_is_wrong() {
    let server = Etcd::alone();
    let mut admin = client_at(&server.endpoints()[0]).await;
    admin.user_add("root", "root", None).await.unwrap();
    admin.user_grant_role("root", "root").await.unwrap();
    admin.user_add("locker", "secret", None).await.unwrap();
    admin.role_add("locks").await.unwrap();
    let below = |prefix: &str| Permission::read_write(prefix).with_prefix();
    admin.role_grant_permission("locks", below("lockkit/")).await.unwrap();
    admin.user_grant_role("locker", "locks").await.unwrap();
    admin.auth_enable().await.unwrap();

    let connect = async |password| {
        let options = ConnectOptions::new().with_user("locker", password);
        EtcdStore::builder(server.endpoints()).connect_options(options).connect().await
    };
    let refused = connect("wrong").await.unwrap_err();
    assert!(matches!(refused, ConnectError::Unreachable { .. }), "{refused}");
    let leases = Leases::builder(connect("secret").await.unwrap()).ttl(SECONDS(1)).build().unwrap();
    let lease = leases.lease("k").min_hold(Duration::from_millis(1)).acquire().await.unwrap();
    until("renewed", async || leases.show("k").await.unwrap().expect("it is held").renewals >= 2).await;
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    assert_eq!(leases.list("").await.unwrap().len(), 0);
}

#[tokio::test]
async fn no_password_is_printed() {
    let options = ConnectOptions::new().with_user("locker", "secret");
    let port = lockkit_store_servers::free_port();
    for endpoint in [format!("http://locker:secret@127.0.0.1:{port}"), format!("locker:top/secret@127.0.0.1:{port}/x")]
    {
        let builder: EtcdStoreBuilder = EtcdStore::builder([&endpoint]).connect_options(options.clone());
        let shown = format!("{builder:?}");
        assert!(!shown.contains("secret") && shown.contains(&format!("127.0.0.1:{port}")), "{shown}");
        let refused = builder.connect().await.unwrap_err();
        let printed = format!("{refused} {refused:?} {:?}", refused.source());
        assert!(!printed.contains("secret"), "{printed}");
        assert!(refused.to_string().contains(&format!("127.0.0.1:{port}")), "{refused}");
    }
}

#[tokio::test]
async fn all_futures_can_be_spawned() {
    fn spawned<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) {
        tokio::spawn(future).abort();
    }
    let store = store().await;
    let key: fn() -> lockkit::Key = || "spawned".into();
    let claim = move || Claim::new(key(), Token::random(), "test", SECONDS(2));
    spawned(async { EtcdStore::connect([shared()]).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_acquire(&claim()).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_acquire_all(&[claim(), claim()]).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_look(&key()).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_renew(&[]).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_release(&key(), Token::random(), Duration::ZERO).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_list("", 1).await.is_ok() });
    let it = store.clone();
    spawned(async move { it.lease_sweep(SECONDS(60), 1).await.is_ok() });
    spawned(async move { store.lease_freed(&key()).await });
}

#[tokio::test]
async fn a_store_works_on_a_client_that_is_connected_already() {
    let client = client_at(shared()).await;
    let leases = Leases::new(EtcdStore::builder_with_client(client).connect().await.unwrap());
    let lease = leases.lease("own-client").acquire().await.unwrap();
    assert!(leases.show("own-client").await.unwrap().is_some());
    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
}
