//! What one acquire and release of an uncontended lease costs in Redis, `ZooKeeper` and etcd, beside the same lock by
//! hand with the same client. Each task has a key of its own. Both work in turns, on one server.
//!
//! ```text
//! cargo bench -p lockkit-store-tests --bench pairs
//! cargo bench -p lockkit-store-tests --bench pairs -- Redis
//! ```
//!
//! By hand is what the well-known recipe does at least: in Redis `SET NX PX` and a script that compares and deletes, in
//! `ZooKeeper` a node of the session in the key's folder, a look at its neighbors and its deletion, in etcd a
//! transaction that creates a key of the session's lease, and its deletion. None of them has fences that outlive a
//! failover, or tells others who holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lockkit::Leases;
use lockkit::store::LeaseStore;
use lockkit_etcd::EtcdStore;
use lockkit_etcd::etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use lockkit_redis::RedisStore;
use lockkit_redis::redis::{self, Script, aio::MultiplexedConnection};
use lockkit_store_servers::{etcd::Etcd, redis::Redis, zookeeper::ZooKeeper};
use lockkit_zookeeper::ZooKeeperStore;
use lockkit_zookeeper::zookeeper_client as zk;
use tokio::task::JoinSet;

const ROUNDS: usize = 5;
const RUN: Duration = Duration::from_millis(1500);
const TTL: Duration = Duration::from_secs(30);
const TASKS: [usize; 2] = [1, 32];

/// An uncontended lock, acquired and released.
trait Pair: Clone + Send + Sync + 'static {
    fn once(&self, key: String) -> impl Future<Output = ()> + Send;
}

/// lockkit's lease.
impl<S: LeaseStore> Pair for Leases<S> {
    async fn once(&self, key: String) {
        let lease = self.lease(key).acquire().await.expect("a lease");
        lease.release().await.expect("a held lease");
    }
}

#[derive(Clone)]
struct RedisByHand {
    connection: MultiplexedConnection,
    delete: Arc<Script>,
    tokens: Arc<AtomicU64>,
}

impl Pair for RedisByHand {
    async fn once(&self, key: String) {
        let mut connection = self.connection.clone();
        let (key, token) = (format!("hand:{key}"), format!("{:032x}", self.tokens.fetch_add(1, Relaxed)));
        let ttl = u64::try_from(TTL.as_millis()).expect("a short ttl");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&token).arg("NX").arg("PX").arg(ttl);
        let granted: Option<String> = set.query_async(&mut connection).await.expect("an answer");
        assert!(granted.is_some(), "`{key}` is held");
        let deleted: u64 = self.delete.key(&key).arg(&token).invoke_async(&mut connection).await.expect("an answer");
        assert_eq!(deleted, 1, "`{key}` is lost");
    }
}

#[derive(Clone)]
struct ZooKeeperByHand(zk::Client);

impl Pair for ZooKeeperByHand {
    async fn once(&self, key: String) {
        let Self(client) = self;
        let folder = format!("/hand/{key}");
        let place = format!("{folder}/place-");
        let options = zk::CreateMode::EphemeralSequential.with_acls(zk::Acls::anyone_all());
        let (_, number) = match client.create(&place, b"", &options).await {
            Err(zk::Error::NoNode) => {
                let folders = zk::CreateMode::Persistent.with_acls(zk::Acls::anyone_all());
                client.mkdir(&folder, &folders).await.expect("a folder");
                client.create(&place, b"", &options).await.expect("a node")
            }
            created => created.expect("a node"),
        };
        let children = client.list_children(&folder).await.expect("the children");
        assert_eq!(children.len(), 1, "`{key}` is held");
        client.delete(&format!("{place}{number}"), None).await.expect("its node");
    }
}

#[derive(Clone)]
struct EtcdByHand {
    client: Client,
    session: i64,
}

impl Pair for EtcdByHand {
    async fn once(&self, key: String) {
        let mut client = self.client.clone();
        let key = format!("hand/{key}");
        let put = TxnOp::put(&*key, "", Some(PutOptions::new().with_lease(self.session)));
        let create = Txn::new().when([Compare::create_revision(&*key, CompareOp::Equal, 0)]).and_then([put]);
        assert!(client.txn(create).await.expect("an answer").succeeded(), "`{key}` is held");
        let deleted = client.delete(&*key, None).await.expect("an answer").deleted();
        assert_eq!(deleted, 1, "`{key}` is lost");
    }
}

#[tokio::main]
async fn main() {
    println!("| store | tasks | by hand, per second | lockkit, per second | ratio (least to greatest) |");
    println!("|---|---|---|---|---|");

    let wanted: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|it| it == name);
    if is_wanted("Redis") {
        in_redis().await;
    }
    if is_wanted("ZooKeeper") {
        in_zookeeper().await;
    }
    if is_wanted("etcd") {
        Box::pin(in_etcd()).await;
    }
}

async fn in_redis() {
    let redis = Redis::start();
    let client = redis::Client::open(redis.url()).expect("a URL");
    let store = RedisStore::connect(client.clone()).await.expect("a store");
    store.declare_new().await.expect("no quarantine");
    let by_hand = RedisByHand {
        connection: client.get_multiplexed_async_connection().await.expect("a connection"),
        delete: Arc::new(Script::new(
            "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
        )),
        tokens: Arc::default(),
    };
    compare("Redis", by_hand, leases(store)).await;
}

async fn in_zookeeper() {
    let zookeeper = ZooKeeper::alone();
    let client = zk::Client::connect(&zookeeper.host()).await.expect("a session");
    let store = ZooKeeperStore::connect(zookeeper.host(), "/locks").await.expect("a store");
    compare("ZooKeeper", ZooKeeperByHand(client), leases(store)).await;
}

async fn in_etcd() {
    let etcd = Etcd::alone();
    let mut client = Client::connect(etcd.endpoints(), None).await.expect("a client");
    let session = client.lease_grant(3600, None).await.expect("a session").id();
    let by_hand = EtcdByHand { client, session };
    let store = EtcdStore::connect(etcd.endpoints()).await.expect("a store");
    compare("etcd", by_hand, leases(store)).await;
}

fn leases<S: LeaseStore>(store: S) -> Leases<S> {
    Leases::builder(store).ttl(TTL).sweep_every(None).build().expect("good settings")
}

/// Prints a line for each number of tasks: the medians of the rates, and of the ratios of the rounds.
async fn compare(name: &str, by_hand: impl Pair, lockkit: impl Pair) {
    for tasks in TASKS {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push((rate(&by_hand, tasks).await, rate(&lockkit, tasks).await));
        }
        let hand = sorted(rounds.iter().map(|it| it.0));
        let ours = sorted(rounds.iter().map(|it| it.1));
        let ratio = sorted(rounds.iter().map(|it| it.1 / it.0));
        println!(
            "| {name} | {tasks} | {:.0} | {:.0} | {:.2} ({:.2} to {:.2}) |",
            hand[ROUNDS / 2],
            ours[ROUNDS / 2],
            ratio[ROUNDS / 2],
            ratio[0],
            ratio[ROUNDS - 1]
        );
    }
}

fn sorted(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers
}

/// Pairs a second that these tasks do together.
async fn rate<P: Pair>(pair: &P, tasks: usize) -> f64 {
    // Each key was there before.
    for task in 0..tasks {
        pair.once(format!("key:{task}")).await;
    }
    let begun = Instant::now();
    let mut working = JoinSet::new();
    for task in 0..tasks {
        let pair = pair.clone();
        working.spawn(async move {
            let mut done = 0_u32;
            while begun.elapsed() < RUN {
                pair.once(format!("key:{task}")).await;
                done += 1;
            }
            done
        });
    }
    let done: u32 = working.join_all().await.into_iter().sum();
    f64::from(done) / begun.elapsed().as_secs_f64()
}
