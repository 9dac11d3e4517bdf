//! A cluster whose database has no space left: nothing is granted, and the error says why.

use std::time::Duration;

use lockkit::{Error, Fault, Leases, Released};
use lockkit_etcd::etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client};
use lockkit_store_servers::etcd::Etcd;

use crate::server::{client_at, store_at, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_without_space_says_so_and_keeps_what_is_held() {
    let server = Etcd::alone();
    let mut client = client_at(&server.endpoints()[0]).await;
    let store = store_at(server.endpoints()).await;
    let leases = Leases::builder(store).ttl(Duration::from_secs(60)).renew_every(Duration::from_millis(100));
    let leases = leases.build().unwrap();
    let [first, second] = [leases.lease("a").acquire().await.unwrap(), leases.lease("b").acquire().await.unwrap()];
    let member = client.status().await.unwrap().header().expect("a header").member_id();
    let alarm = async |client: &mut Client, action| {
        let mut options = AlarmOptions::new();
        options.with_member(member);
        client.alarm(action, AlarmType::Nospace, Some(options)).await.unwrap();
    };
    alarm(&mut client, AlarmAction::Activate).await;

    for wait in [Duration::ZERO, Duration::from_secs(20)] {
        let refused = leases.lease("c").wait(wait).acquire().await.map(drop).unwrap_err();
        assert!(matches!(refused, Error::Database { fault: Fault::Unavailable, .. }), "{refused:?}");
        let why = std::error::Error::source(&refused).expect("what the store said").to_string();
        assert!(why.contains("no space") && why.contains("etcdctl alarm disarm"), "{why}");
    }
    // Neither a renewal nor a release needs space.
    let renewals = leases.show("b").await.unwrap().expect("it is held").renewals;
    until("renewed", async || leases.show("b").await.unwrap().expect("it is held").renewals > renewals + 1).await;
    assert_eq!(first.release().await.unwrap(), Released::WhileHeld);
    assert!(leases.show("a").await.unwrap().is_none());

    alarm(&mut client, AlarmAction::Deactivate).await;
    let lease = leases.lease("c").acquire().await.expect("nobody has it");
    assert_eq!(lease.release().await.unwrap(), Released::WhileHeld);
    assert_eq!(second.release().await.unwrap(), Released::WhileHeld);
}
