//! The promises of a store, on one server.

use std::time::Duration;

use lockkit::{
    Fault, LeaseStore, Leases, LossReason,
    store::{Acquired, Answer, Claim, Token},
    testing::conformance,
};
use lockkit_zookeeper::{
    ConnectError, FENCE_SHIFT, Layout, Unfit, ZooKeeperStore, ZooKeeperStoreBuilder,
    zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Error, Permission},
};

use crate::support::{SESSION, children, client, own_root, shared_server, store, store_on, wait_for_children, within};

#[tokio::test]
async fn the_store_keeps_the_promises_of_stores() {
    let root = own_root();
    let store = store(&root).await;
    conformance::run(async || store.clone()).await;
}

#[tokio::test]
async fn it_keeps_them_with_the_names_of_kazoo_and_a_session_for_each() {
    let root = own_root();
    conformance::run(async || store_on(shared_server(), &root, SESSION, Layout::Kazoo).await).await;
}

#[tokio::test]
async fn a_fence_is_the_transaction_that_created_the_child() {
    let root = own_root();
    let leases = Leases::new(store(&root).await);
    let lease = leases.lease("k").acquire().await.expect("it is free");
    let (client, path) = (client().await, leases.store().path("k"));
    let children = client.list_children(&path).await.expect("the node of the key");
    let stat = client.check_stat(&format!("{path}/{}", children[0])).await.expect("an answer").expect("the child");
    assert_eq!(lease.fence().get(), u64::try_from(stat.czxid).expect("a number") << FENCE_SHIFT);
    assert_eq!(Some(stat.ephemeral_owner), leases.store().session_id());
    assert!(children[0].starts_with("_c_") && children[0].ends_with("-lock-0000000000"), "{children:?}");
}

#[tokio::test]
async fn a_lease_is_trusted_for_less_than_the_session_timeout() {
    let leases = Leases::builder(store(&own_root()).await).ttl(SESSION * 10).build().expect("valid settings");
    let trusted = leases.store().trusted_for().expect("a session");
    assert!(trusted < SESSION * 3 / 4, "{trusted:?}");
    let lease = leases.lease("k").acquire().await.expect("it is free");
    let left = |lease: &lockkit::Lease<_>| lease.trusted_until() - std::time::Instant::now();
    assert!(left(&lease) < trusted);
    lease.extend(SESSION * 20).await.expect("it is held");
    assert!(left(&lease) < trusted, "an extension does not make the session longer");
}

#[tokio::test]
async fn an_extended_lease_is_shown_with_its_new_expiry() {
    let root = own_root();
    // So long that the lease is not lost because the machine is slow.
    let session = SESSION * 15;
    let store = async || Leases::new(store_on(shared_server(), &root, session, Layout::Curator).await);
    let (here, there) = (store().await, store().await);
    let lease = here.lease("k").ttl(SESSION).acquire().await.expect("it is free");
    lease.extend(SESSION * 100).await.expect("it is held");
    for leases in [&here, &there] {
        let shown = leases.show("k").await.expect("an answer").expect("it is held");
        assert_eq!(shown.ttl, Some(SESSION * 100));
        assert!(shown.expires_in > SESSION * 50, "{shown:?}");
        assert_eq!(leases.list("k").await.expect("an answer")[0].ttl, shown.ttl);
    }
    lease.release().await.expect("a release");
}

#[tokio::test]
async fn the_holder_whose_session_ended_is_shown_to_its_heir() {
    let root = own_root();
    let (dead, heir) = (store(&root).await, store(&root).await);
    let claim = Claim::new("k", Token::random(), "the dead one", SESSION);
    let Ok(Acquired::Granted(grant)) = dead.lease_acquire(&claim).await else { panic!("it is free") };
    drop(dead);
    let lease = Leases::new(heir).lease("k").wait(SESSION * 3).acquire().await.expect("its session was closed");
    let previous = lease.previous().expect("it was not released");
    assert_eq!(
        (&*previous.holder, previous.fence, previous.expired_for),
        ("the dead one", grant.fence, Duration::ZERO)
    );
    assert!(lease.fence().get() > grant.fence.get() + grant.spare_fences);
    lease.release().await.expect("a release");
}

#[tokio::test]
async fn a_stolen_lease_is_lost_and_its_holder_hears_of_it() {
    let root = own_root();
    let here = Leases::builder(store(&root).await).ttl(Duration::from_secs(1)).build().expect("valid settings");
    let operator = Leases::new(store(&root).await);
    let lease = here.lease("k").acquire().await.expect("it is free");
    let shown = operator.show("k").await.expect("an answer").expect("it is held");
    assert_eq!((shown.fence, shown.is_this_process), (lease.fence(), false));
    operator.steal("k").await.expect("an answer").expect("it is held");
    let next = operator.lease("k").acquire().await.expect("it was freed");
    assert!(next.previous().is_none(), "an operator has ended it");
    assert_eq!(within(lease.lost()).await, LossReason::Stolen);
}

#[tokio::test]
async fn permits_readers_and_sets_of_keys_work_among_sessions() {
    let root = own_root();
    let (here, there) = (Leases::new(store(&root).await), Leases::new(store(&root).await));
    let a = here.semaphore("s", 2).acquire().await.expect("a permit");
    let b = there.semaphore("s", 2).acquire().await.expect("a permit");
    assert!(here.semaphore("s", 2).try_acquire().await.expect("an answer").is_none());
    b.release().await.expect("a release");
    drop((a, here.semaphore("s", 2).acquire().await.expect("a permit")));

    let (one, two) = (here.rw("rw").read().acquire().await, there.rw("rw").read().acquire().await);
    assert!(here.rw("rw").write().try_acquire().await.expect("an answer").is_none());
    one.expect("a reader").release().await.expect("a release");
    two.expect("a reader").release().await.expect("a release");
    drop(there.rw("rw").write().acquire().await.expect("no readers"));

    let held = there.lease("b").acquire().await.expect("it is free");
    let (keys, wait) = (["a", "b", "c"], Duration::from_secs(20));
    let all = tokio::spawn({
        let request = here.all(keys).wait(wait);
        async move { request.acquire().await.map(drop) }
    });
    held.release().await.expect("a release");
    within(all).await.expect("no panic").expect("all are free");
}

#[tokio::test]
async fn a_set_of_keys_does_not_ask_without_a_pause_while_one_is_held() {
    let (root, client) = (own_root(), client().await);
    let (here, there) = (Leases::new(store(&root).await), Leases::new(store(&root).await));
    let held = there.lease("b").acquire().await.expect("it is free");
    let short = here.all(["a", "b"]).wait(Duration::from_secs(2)).acquire().await;
    assert!(short.expect_err("one is held").is_contended());
    let changes = client.check_stat(&here.store().path("a")).await.expect("an answer").map(|it| it.cversion);
    assert!(changes.is_some_and(|it| it <= 40), "the free key was taken and released: {changes:?}");
    held.release().await.expect("a release");
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_with_a_reason() {
    let refused = |builder: ZooKeeperStoreBuilder| async { builder.connect().await.expect_err("refused") };
    for (wrong, named) in [
        (ZooKeeperStore::builder(shared_server()).root("/"), "root"),
        (ZooKeeperStore::builder(shared_server()).session_timeout(Duration::ZERO), "session_timeout"),
        (ZooKeeperStore::builder(format!("app:secret@{}", shared_server())), "hosts"),
    ] {
        assert!(!format!("{wrong:?}").contains("secret"), "{wrong:?}");
        let err = refused(wrong).await;
        assert!(matches!(err, ConnectError::InvalidOption { option, .. } if option == named), "{err}");
        assert!(!format!("{err} {err:?}").contains("secret"), "{err}");
    }
    let nobody = format!("127.0.0.1:{}", lockkit_store_servers::free_port());
    let nobody = refused(ZooKeeperStore::builder(nobody).session_timeout(Duration::from_millis(300))).await;
    assert!(matches!(nobody, ConnectError::Unreachable { .. }), "{nobody}");
    let chroot = format!("{}/missing", shared_server());
    let chroot = refused(ZooKeeperStore::builder(chroot)).await;
    assert!(matches!(chroot, ConnectError::Unfit(Unfit::Root { .. })), "{chroot}");
}

#[tokio::test]
async fn access_rights_and_a_chroot_are_those_of_the_settings() {
    let everybody = client().await;
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    everybody.mkdir("/app", &options).await.expect("a node");
    let hosts = format!("{}/app", shared_server());
    let connector = Client::connector().with_auth("digest", b"app:secret");
    let ours = ZooKeeperStore::builder(&hosts).root("/locks").connector(connector).acls(Acls::creator_all());
    let ours = Leases::new(ours.connect().await.expect("a session"));
    let lease = ours.lease("a/b").acquire().await.expect("it is free");
    assert_eq!(ours.store().path("a/b"), "/locks/a%2fb");
    assert_eq!(ours.list("a/").await.expect("an answer").len(), 1);
    let refused = everybody.list_children("/app/locks/a%2fb").await;
    assert!(matches!(refused, Err(Error::NoAuth)), "{refused:?}");

    let strangers = ZooKeeperStore::connect(&hosts, "/locks").await.expect("a session");
    let refused = within(Leases::new(strangers).lease("a/b").acquire()).await.expect_err("no right");
    assert!(matches!(refused, lockkit::Error::Database { fault: Fault::Other, .. }), "{refused:?}");
    lease.release().await.expect("a release");
}

#[tokio::test]
async fn a_key_whose_node_cannot_be_written_is_released() {
    let (root, client) = (own_root(), client().await);
    let store = store(&root).await;
    let path = store.path("k");
    let rights = [Acl::new(Permission::READ | Permission::CREATE | Permission::DELETE, AuthId::anyone())];
    client.mkdir(&path, &CreateMode::Persistent.with_acls(Acls::new(&rights))).await.expect("a node");
    for min_hold in [Duration::ZERO, Duration::from_millis(1500)] {
        let claim = Claim::new("k", Token::random(), "first", SESSION * 10);
        let granted = store.lease_acquire(&claim).await.expect("an answer");
        assert!(matches!(granted, Acquired::Granted(_)), "{granted:?}");
        let released = store.lease_release(&claim.key, claim.token, min_hold).await;
        assert_eq!(released.expect("an answer"), Answer::Done);
        assert_eq!(children(&client, &path).await.len(), usize::from(min_hold > Duration::ZERO));
        wait_for_children(&client, &path, 0).await;
    }
}

#[tokio::test]
async fn a_root_that_exists_needs_no_rights_on_its_parent() {
    let (parent, client) = (own_root(), client().await);
    let root = format!("{parent}/locks");
    client.mkdir(&root, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.expect("a node");
    client.set_acl(&parent, &[Acl::new(Permission::READ, AuthId::anyone())], None).await.expect("the right to do so");
    let leases = Leases::new(store(&root).await);
    leases.lease("k").acquire().await.expect("it is free").release().await.expect("a release");
}

#[tokio::test]
async fn many_leases_are_released_at_once() {
    let leases = Leases::new(store(&own_root()).await);
    let mut held = Vec::new();
    for number in 0..20 {
        held.push(leases.lease(format!("k{number}")).acquire().await.expect("it is free"));
    }
    leases.close().await.expect("all are released");
    assert!(held.iter().all(|it| !it.is_trusted()));
    assert!(leases.list("k").await.expect("an answer").is_empty());
}

#[test]
fn a_store_outlives_the_runtime_that_opened_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    let leases = Leases::new(first.block_on(store(&own_root())));
    let lease = first.block_on(leases.lease("k").acquire()).expect("it is free");
    second.block_on(async {
        drop(leases.lease("other").acquire().await.expect("it is free"));
        first.shutdown_background();
        tokio::time::sleep(SESSION).await;
        assert!(lease.is_trusted(), "it is renewed by the other runtime");
        lease.release().await.expect("a release");
    });
}
