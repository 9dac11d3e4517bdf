//! What the tests share: stores, plain clients, and waiting for a condition.

use std::time::Duration;

use lockkit::store::{Acquired, Claim, Grant, LeaseStore, Token};
use lockkit_redis::{RedisStore, RedisStoreBuilder};
use lockkit_store_servers::redis::Redis;
use redis::{AsyncConnectionConfig, Client, FromRedisValue, aio::MultiplexedConnection};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, sleep},
};

/// Longer than anything takes that is not stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn client(server: &Redis) -> Client {
    Client::open(server.url()).unwrap()
}

/// Settings with limits that a busy machine keeps.
pub(crate) fn builder(server: &Redis) -> RedisStoreBuilder {
    RedisStore::builder(client(server)).connect_timeout(PATIENCE).answer_timeout(PATIENCE)
}

/// A store whose leases may live for an hour, on a server that is known to be new.
pub(crate) async fn store(server: &Redis) -> RedisStore {
    declared(builder(server).longest_ttl(Duration::from_hours(1))).await
}

/// A store on a server that is known to be new.
pub(crate) async fn declared(builder: RedisStoreBuilder) -> RedisStore {
    let store = builder.connect().await.unwrap();
    store.declare_new().await.unwrap();
    store
}

/// Another client, which knows nothing of lockkit.
pub(crate) async fn plain(server: &Redis) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    client(server).get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

/// Sends a command of words.
pub(crate) async fn send<T: FromRedisValue>(conn: &mut MultiplexedConnection, words: &str) -> T {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.query_async(conn).await.unwrap()
}

pub(crate) fn claim(key: &str, ttl: Duration) -> Claim {
    Claim::new(key, Token::random(), "test", ttl)
}

/// Acquires what is free.
pub(crate) async fn take(store: &impl LeaseStore, claim: &Claim) -> Grant {
    match store.lease_acquire(claim).await.unwrap() {
        Acquired::Granted(grant) => grant,
        held @ Acquired::Held { .. } => panic!("`{}` is free, and asked for it says {held:?}", claim.key),
    }
}

pub(crate) async fn is_refused(store: &impl LeaseStore, claim: &Claim) -> bool {
    matches!(store.lease_acquire(claim).await.unwrap(), Acquired::Held { .. })
}

/// Asks again until the lease is granted or refused for good. Errors count as refusals. Returns how long it took.
pub(crate) async fn until_granted(store: &impl LeaseStore, claim: &Claim) -> (Grant, Duration) {
    let begun = Instant::now();
    loop {
        if let Ok(Acquired::Granted(grant)) = store.lease_acquire(claim).await {
            return (grant, begun.elapsed());
        }
        assert!(begun.elapsed() < PATIENCE, "`{}` is not granted after {PATIENCE:?}", claim.key);
        sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "after {PATIENCE:?} not yet: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// What the server counts for a command: its calls.
pub(crate) async fn calls(conn: &mut MultiplexedConnection, command: &str) -> u64 {
    let info: String = send(conn, "INFO commandstats").await;
    let line = info.lines().find_map(|it| it.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |it| it.split(',').next().unwrap().parse().unwrap())
}

/// The row beside a lock, as `src/lua/row.lua` describes it, of a lease with the holder `test`.
pub(crate) struct Row(pub(crate) Vec<u8>);

impl Row {
    /// Where the numbers are.
    pub(crate) const LAST: usize = 8;
    pub(crate) const USED: usize = 16;
    pub(crate) const FENCE: usize = 60;
    pub(crate) const ACQUIRED: usize = 68;
    pub(crate) const TTL: usize = 76;

    /// The row of a lease that was released.
    pub(crate) fn released(last: u64, used: u64) -> Self {
        Self([b"lockkit1".as_slice(), &last.to_le_bytes(), &used.to_le_bytes()].concat())
    }

    pub(crate) async fn of(conn: &mut MultiplexedConnection, key: &str) -> Self {
        Self(send(conn, &format!("GET lockkit:{{{key}}}")).await)
    }

    pub(crate) async fn put(&self, conn: &mut MultiplexedConnection, key: &str) {
        redis::cmd("SET").arg(format!("lockkit:{{{key}}}")).arg(&self.0).exec_async(conn).await.unwrap();
    }

    pub(crate) fn number(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    pub(crate) fn with(mut self, at: usize, number: u64) -> Self {
        self.0[at..at + 8].copy_from_slice(&number.to_le_bytes());
        self
    }
}

/// What lies between a client and a server, and can swallow all that is sent on a connection.
pub(crate) struct Network {
    pub(crate) port: u16,
    stalls: watch::Sender<()>,
}

impl Network {
    pub(crate) async fn before(server: &Redis) -> Self {
        let (listener, target) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), server.program.port);
        let (stalls, port) = (watch::Sender::new(()), listener.local_addr().unwrap().port());
        let stalled = stalls.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut stalled = stalled.subscribe();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(("127.0.0.1", target)).await.unwrap();
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        // Both connections stay open, and nobody reads them.
                        _ = stalled.changed() => std::future::pending().await,
                    }
                });
            }
        });
        Self { port, stalls }
    }

    /// From now on, the connections that are open carry nothing. New ones work.
    pub(crate) fn stalls_what_is_open(&self) {
        self.stalls.send_replace(());
    }
}
