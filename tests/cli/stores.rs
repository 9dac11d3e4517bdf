//! Leases that are not in a database.

use std::{future::Future, sync::Arc, time::Duration};

use lockkit::{LeaseStore, Leases};
use lockkit_etcd::{EtcdStore, etcd_client};
use lockkit_redis::{RedisStore, redis::Client};
use lockkit_store_servers::{Program, etcd::Etcd, redis::Redis, zookeeper::ZooKeeper};
use lockkit_zookeeper::ZooKeeperStore;
use rustix::process::Signal;
use support::Proxy;
use tempfile::tempdir;
use tokio::{join, time::sleep};

use crate::{
    exit_code,
    life::{ENDINGS, Place, Running, fall_silent, lose_each, print},
    lockkit, now, output, send, there_is,
};

/// A server of a store.
trait Server: Sized + Send + Sync + 'static {
    type Store: LeaseStore;

    const NAME: &'static str;

    /// Of the lease of a command.
    const TTL: Duration = Duration::from_secs(4);

    /// Starts it, without leases.
    fn start() -> impl Future<Output = Self> + Send;

    fn url(&self) -> String;

    fn program(&self) -> &Program;

    fn connect(&self) -> impl Future<Output = Self::Store> + Send;

    /// How many requests hold a lease or a place in its queue.
    fn requests(&self, leases: &Leases<Self::Store>) -> impl Future<Output = u64> + Send;
}

impl Server for Redis {
    type Store = RedisStore;

    const NAME: &'static str = "Redis";

    async fn start() -> Self {
        let server = Self::start();
        server.connect().await.declare_new().await.expect("say that it is new");
        server
    }

    fn url(&self) -> String {
        self.url()
    }

    fn program(&self) -> &Program {
        &self.program
    }

    async fn connect(&self) -> RedisStore {
        RedisStore::connect(Client::open(self.url()).expect("a URL")).await.expect("connect")
    }

    async fn requests(&self, leases: &Leases<RedisStore>) -> u64 {
        // A place is a lease of its own.
        leases.list("").await.expect("list").len() as u64
    }
}

impl Server for ZooKeeper {
    type Store = ZooKeeperStore;

    const NAME: &'static str = "ZooKeeper";

    /// A lease is trusted for a third of it. The rest is for the servers.
    const TTL: Duration = Duration::from_secs(8);

    async fn start() -> Self {
        Self::alone()
    }

    fn url(&self) -> String {
        format!("zookeeper://{}/locks", self.host())
    }

    fn program(&self) -> &Program {
        &self.program
    }

    async fn connect(&self) -> ZooKeeperStore {
        ZooKeeperStore::connect(self.host(), "/locks").await.expect("connect")
    }

    async fn requests(&self, _: &Leases<ZooKeeperStore>) -> u64 {
        self.number("zk_ephemerals_count")
    }
}

impl Server for Etcd {
    type Store = EtcdStore;

    const NAME: &'static str = "etcd";

    async fn start() -> Self {
        Self::alone()
    }

    fn url(&self) -> String {
        self.endpoints().join(",").replace("http://", "etcd://")
    }

    fn program(&self) -> &Program {
        &self.members[0]
    }

    async fn connect(&self) -> EtcdStore {
        EtcdStore::connect(self.endpoints()).await.expect("connect")
    }

    async fn requests(&self, _: &Leases<EtcdStore>) -> u64 {
        let mut client = etcd_client::Client::connect(self.endpoints(), None).await.expect("connect");
        let all = etcd_client::GetOptions::new().with_prefix().with_count_only();
        let counted = client.get("lockkit/lock/", Some(all)).await.expect("count");
        counted.count().try_into().expect("a count")
    }
}

/// A store, and what it says of its leases.
struct Seen<S: Server> {
    on: Vec<String>,
    leases: Leases<S::Store>,
}

impl<S: Server> Seen<S> {
    async fn of(server: &S) -> Self {
        let leases = Leases::builder(server.connect().await).sweep_every(None).build().expect("the defaults");
        Self { on: on(&server.url()), leases }
    }
}

impl<S: Server> Place for Seen<S> {
    const TTL: Duration = S::TTL;

    fn on(&self) -> Vec<String> {
        self.on.clone()
    }

    /// When the last look was sent that found the lease: ZooKeeper and etcd do not say when the session of another
    /// process ends.
    async fn expiry(&self, key: &str) -> i128 {
        let look = async || (now(), self.leases.show(key).await.expect("look").map(|it| it.fence));
        let (mut last, held) = look().await;
        assert!(held.is_some(), "it is held");
        loop {
            let (sent, found) = look().await;
            if found != held {
                return last;
            }
            last = sent;
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The options that name this store.
fn on(url: &str) -> Vec<String> {
    ["--no-dotenv", "--store", url].map(str::to_owned).to_vec()
}

/// Makes a test of each behaviour on each store.
macro_rules! on_every_store {
    ($($(#[$attribute:meta])* async fn $name:ident<$server:ident>($of:ident: $type:ty) $body:block)*) => {
        $($(#[$attribute])* async fn $name<$server: Server>($of: $type) $body)*
        on_every_store! { @on redis Redis $($name)* }
        on_every_store! { @on zookeeper ZooKeeper $($name)* }
        on_every_store! { @on etcd Etcd $($name)* }
    };
    (@on $module:ident $server:ident $($name:ident)*) => {
        mod $module {
            $(#[tokio::test]
            async fn $name() {
                super::$name(<super::$server as super::Server>::start().await).await;
            })*
        }
    };
}

on_every_store! {
    async fn a_command_ends_before_another_process_can_have_its_lease<S>(server: S) {
        let seen = Arc::new(Seen::of(&server).await);
        let proxy = Proxy::start(&server.url());
        let through_proxy = on(proxy.url());
        let silence = async || {
            proxy.stall(true);
            proxy
        };
        let silent = fall_silent(seen.clone(), &through_proxy, silence);
        let (mut margins, of_silence) = join!(lose_each(async || seen.clone()), silent);
        margins.extend(of_silence);
        print(S::NAME, margins);
        let listed = output(lockkit(&seen.on(), &["ls"])).await;
        assert_eq!((listed.status.code(), listed.stdout.len()), (Some(0), 0), "{listed:?}");
    }

    async fn a_command_ends_while_its_store_is_stopped<S>(server: S) {
        let on = on(&server.url());
        let mut running = Running::start(&on, S::TTL, "outage", ENDINGS[0]).await;
        server.program().stop();
        running.is_ended_by_lockkit().await;
        // Longer than the lease had left.
        sleep(S::TTL).await;
        server.program().go_on();
        running.is_followed_without_overlap(&on).await;
    }

    async fn a_signal_ends_the_wait_and_the_command_never_starts<S>(server: S) {
        let seen = Seen::of(&server).await;
        let folder = tempdir().expect("a folder");
        let [held, ran] = ["held", "ran"].map(|it| folder.path().join(it));
        let script = format!("touch {}; exec sleep 600", held.display());
        let mut holder = lockkit(&seen.on, &["run", "nightly", "--", "sh", "-c", &script]).spawn().expect("start");
        there_is(&held).await;
        let touch = ["--", "touch", &ran.display().to_string()];
        let wait = [&["run", "nightly", "--wait", "forever"], &touch[..]].concat();
        let mut waiting = lockkit(&seen.on, &wait).spawn().expect("start");
        while server.requests(&seen.leases).await < 2 {
            sleep(Duration::from_millis(10)).await;
        }
        send(&waiting, Signal::TERM);
        assert_eq!(exit_code(&mut waiting).await, Some(128 + 15));
        assert_eq!(server.requests(&seen.leases).await, 1, "it has left the queue");
        send(&holder, Signal::TERM);
        assert_eq!(exit_code(&mut holder).await, Some(128 + 15));
        assert!(!ran.exists(), "the command has not run");
        let next = [&["run", "nightly", "--nonblock"], &touch[..]].concat();
        assert!(output(lockkit(&seen.on, &next)).await.status.success(), "the lease is free");
    }
}

#[tokio::test]
async fn an_empty_redis_grants_no_lease_until_it_is_said_to_be_new() {
    let server = Redis::start();
    let on = on(&server.url());
    let run = ["run", "nightly", "--nonblock", "--busy-exit", "0", "--", "true"];
    let refused = output(lockkit(&on, &run)).await;
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), said.contains("may have forgotten leases")), (Some(69), true), "{said}");
    server.connect().await.declare_new().await.expect("say that it is new");
    assert!(output(lockkit(&on, &run)).await.status.success());
}

#[tokio::test]
async fn a_list_that_fails_in_redis_names_the_cause() {
    let server = Redis::start();
    let client = Client::open(server.url()).expect("a URL");
    let mut conn = client.get_multiplexed_async_connection().await.expect("connect");
    let mut set = lockkit_redis::redis::cmd("SET");
    set.arg("lockkit:names").arg("no set").query_async::<()>(&mut conn).await.expect("write");
    let refused = output(lockkit(&on(&server.url()), &["ls"])).await;
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("while listing leases: `lockkit:names` has a value of the type string"), "{said}");
}
