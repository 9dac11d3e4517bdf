//! The fence guard with leases in real Redis, `ZooKeeper` and etcd: a holder whose lease has expired cannot commit any
//! more.

mod snippets;

use std::time::Duration;

use lockkit::store::{Acquired, Claim, LeaseStore, Renewal, Token};
use lockkit::{Error, Key, Leases, with_lock};
use lockkit_etcd::EtcdStore;
use lockkit_redis::RedisStore;
use lockkit_redis::redis::Client;
use lockkit_store_servers::{etcd::Etcd, redis::Redis, zookeeper::ZooKeeper};
use lockkit_zookeeper::ZooKeeperStore;
use sqlx::{SqlitePool, sqlite::SqliteConnectOptions};

const TTL: Duration = Duration::from_secs(1);

#[with_lock(lease, on = leases, pool = pool, key = "item:7", tx = tx)]
async fn sell<S: LeaseStore>(leases: &Leases<S>, pool: &SqlitePool) -> Result<(), Error> {
    sqlx::query("UPDATE t_items SET stock = stock - 1").execute(&mut *tx).await.expect("a statement");
    Ok(())
}

/// A holder that stops renewing, as a process that was stopped does, and comes back after its heir.
async fn stale_holders_are_refused<S: LeaseStore>(store: S) {
    let folder = tempfile::tempdir().expect("a folder");
    let options = SqliteConnectOptions::new().filename(folder.path().join("shop.db")).create_if_missing(true);
    let pool = &SqlitePool::connect_with(options).await.expect("a database");
    lockkit::migrate(pool).await.expect("the tables");
    sqlx::query("CREATE TABLE t_items (stock BIGINT NOT NULL)").execute(pool).await.expect("a table");
    sqlx::query("INSERT INTO t_items VALUES (10)").execute(pool).await.expect("a row");
    let number = async |sql: &'static str| sqlx::query_scalar::<_, i64>(sql).fetch_one(pool).await.expect("a number");
    let domain = store.profile().fence_domain;
    let claim = Claim::new("item:7", Token::random(), "stopped", TTL);
    let Acquired::Granted(stale) = store.lease_acquire(&claim).await.expect("an answer") else { panic!("it is free") };

    let leases = Leases::builder(store.clone()).wait(Duration::from_secs(60)).build().expect("settings");
    sell(&leases, pool).await.expect("the heir waits until the lease has expired, and sells");
    let heir = number("SELECT fence FROM lockkit_fence WHERE name = 'item:7'").await;

    let mut tx = lockkit::begin(pool).await.expect("a transaction");
    let refused = lockkit::guard(&mut *tx, domain, "item:7", stale.fence).await.expect_err("a stale fence");
    println!("{domain}: {refused}");
    assert_eq!(
        refused.to_string(),
        format!(
            "lease `item:7` with fence {} is stale: a transaction with fence {heir} has passed the guard",
            stale.fence
        )
    );
    tx.rollback().await.expect("a rollback");
    let late = store.lease_renew(&[Renewal::new(Key::from("item:7"), claim.token, TTL)]).await.expect("an answer");
    assert_eq!(late, [lockkit::store::Answer::Gone]);
    sell(&leases, pool).await.expect("who holds it now sells");
    assert_eq!(number("SELECT stock FROM t_items").await, 8);
}

#[tokio::test]
async fn in_redis() {
    let server = Redis::start();
    let store = RedisStore::connect(Client::open(server.url()).expect("a URL")).await.expect("a server");
    store.declare_new().await.expect("an answer");
    stale_holders_are_refused(store).await;
}

#[tokio::test]
async fn in_zookeeper() {
    let server = ZooKeeper::alone();
    stale_holders_are_refused(ZooKeeperStore::connect(server.host(), "/locks").await.expect("a server")).await;
}

#[tokio::test]
async fn in_etcd() {
    let servers = Etcd::alone();
    stale_holders_are_refused(EtcdStore::connect(servers.endpoints()).await.expect("a server")).await;
}
