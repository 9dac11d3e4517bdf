//! Leases that are not in a database.

use lockkit_redis::RedisStore;
use lockkit_store_servers::{etcd::Etcd, redis::Redis, zookeeper::ZooKeeper};
use rustix::process::Signal;

use crate::{life::Running, lockkit, output};

const ENDING: (&str, &str) = ("exit 0", "trap ': >FOLDER/term; exit 0' TERM");

/// A command on this store: its lease is stolen, and its `lockkit` is killed and stopped.
async fn ends(store: &str) {
    let on = ["--no-dotenv", "--store", store].map(str::to_owned);
    let lost = async |name: &str, signal: Signal| {
        let running = Running::start(&on, name, ENDING).await;
        running.signal_lockkit(signal);
        running.is_followed_without_overlap(&on).await;
    };
    let stolen = async { Running::start(&on, "stolen", ENDING).await.stolen(&on).await };
    let (stolen, (), ()) = tokio::join!(stolen, lost("killed", Signal::KILL), lost("stopped", Signal::STOP));
    println!("{store}: last sign of life {} ms after the theft", stolen / 1000);
    let listed = output(lockkit(&on, &["ls"])).await;
    assert_eq!((listed.status.code(), listed.stdout.len()), (Some(0), 0), "{listed:?}");
}

#[tokio::test]
async fn a_command_ends_with_its_lease_in_redis() {
    let server = Redis::start();
    let store = RedisStore::connect(lockkit_redis::redis::Client::open(server.url()).expect("a URL")).await;
    // An empty server may have forgotten leases, so it grants none at first. Nobody else has them.
    let on = ["--no-dotenv", "--store", &server.url()].map(str::to_owned);
    let refused = output(lockkit(&on, &["run", "nightly", "--nonblock", "--busy-exit", "0", "--", "true"])).await;
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), said.contains("may have forgotten leases")), (Some(69), true), "{said}");
    store.expect("connect").declare_new().await.expect("say that it is new");
    ends(&server.url()).await;
}

#[tokio::test]
async fn a_list_that_fails_in_redis_names_the_cause() {
    let server = Redis::start();
    let client = lockkit_redis::redis::Client::open(server.url()).expect("a URL");
    let mut conn = client.get_multiplexed_async_connection().await.expect("connect");
    let mut set = lockkit_redis::redis::cmd("SET");
    set.arg("lockkit:names").arg("no set").query_async::<()>(&mut conn).await.expect("write");
    let refused = output(lockkit(&["--no-dotenv", "--store", &server.url()].map(str::to_owned), &["ls"])).await;
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("while listing leases: `lockkit:names` has a value of the type string"), "{said}");
}

#[tokio::test]
async fn a_command_ends_with_its_lease_in_zookeeper() {
    let server = ZooKeeper::alone();
    ends(&format!("zookeeper://{}/locks", server.host())).await;
}

#[tokio::test]
async fn a_command_ends_with_its_lease_in_etcd() {
    let server = Etcd::alone();
    ends(&server.endpoints().join(",").replace("http://", "etcd://")).await;
}
