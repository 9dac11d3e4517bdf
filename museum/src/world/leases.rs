//! Leases of lockkit: in memory or in Redis, on Tokio's clock, and in a database whose clock is moved.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use anyhow::Result;
use lockkit::{
    Error, Fault, Key, LeaseStore, Leases,
    store::{Acquired, Answer, Claim, LeaseRecord, Profile, Renewal, Token},
    testing::MemoryStore,
};
use lockkit_redis::RedisStore;
use sqlx::Pool;
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

use super::{Link, Place, Sql};
use crate::stage::View;

/// A store of leases.
#[derive(Debug, Clone)]
pub(crate) struct LeaseWorld {
    store: Store,
    ttl: Duration,
}

#[derive(Debug, Clone)]
enum Store {
    Memory(MemoryStore),
    Redis(Link, RedisStore),
}

impl LeaseWorld {
    /// Without leases yet; each will have this ttl.
    pub(crate) async fn open(place: &Place, ttl: Duration) -> Result<Self> {
        let Some(url) = place.redis() else {
            return Ok(Self { store: Store::Memory(MemoryStore::new()), ttl });
        };
        // Of a server that has lost its memory, leases could be granted twice. This one has had none before.
        let builder = RedisStore::builder(redis::Client::open(url)?).without_quarantine();
        let link = Link::open(url).await?;
        let store = link.on_time(|_conn| Ok(REAL_TIME.block_on(builder.connect())?)).await?;
        Ok(Self { store: Store::Redis(link, store), ttl })
    }

    /// The leases of one process, with its own network to the store.
    pub(crate) fn process(&self, name: &str) -> Result<Leases<Client>> {
        let client = Client { store: self.store.clone(), is_cut: Arc::new(watch::Sender::new(false)) };
        Ok(Leases::builder(client).ttl(self.ttl).holder(name).build()?)
    }

    /// For a stage: the holder of the lease.
    pub(crate) async fn view(self, key: &'static str) -> Result<View> {
        holder(&self.process("watcher")?, key).await
    }
}

/// What waits for a server on Tokio's real clock, while that of the run is paused.
static REAL_TIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a process may start a thread")
});

/// The way of one process to the store.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    store: Store,
    is_cut: Arc<watch::Sender<bool>>,
}

impl Client {
    /// Nothing that the process sends arrives, until [`heal`](Self::heal): it is killed or paused, or its network
    /// fails.
    pub(crate) fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    /// What the process has sent arrives now.
    pub(crate) fn heal(&self) {
        self.is_cut.send_replace(false);
    }

    async fn is_connected(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.is_cut.subscribe().wait_for(|it| !it).await;
    }
}

/// Calls the store with arguments of its own, when the way there is free.
macro_rules! call {
    ($client:ident, $store:ident => $call:expr) => {{
        $client.is_connected().await;
        match &$client.store {
            Store::Memory($store) => $call.await,
            Store::Redis(link, $store) => {
                let $store = $store.clone();
                let answer = link.on_time(move |_conn| Ok(REAL_TIME.block_on($call))).await;
                let lost = |err| Error::database("talking to Redis", None, Fault::Unavailable, err);
                answer.map_err(lost)?
            }
        }
    }};
}

impl LeaseStore for Client {
    async fn lease_acquire(&self, claim: &Claim) -> lockkit::Result<Acquired> {
        let claim = claim.clone();
        call!(self, store => store.lease_acquire(&claim))
    }

    async fn lease_look(&self, key: &Key) -> lockkit::Result<Option<LeaseRecord>> {
        let key = key.clone();
        call!(self, store => store.lease_look(&key))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> lockkit::Result<Vec<Answer>> {
        let renewals = renewals.to_vec();
        call!(self, store => store.lease_renew(&renewals))
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> lockkit::Result<Answer> {
        let key = key.clone();
        call!(self, store => store.lease_release(&key, token, min_hold))
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> lockkit::Result<Vec<LeaseRecord>> {
        let prefix = prefix.to_owned();
        call!(self, store => store.lease_list(&prefix, limit))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> lockkit::Result<u64> {
        call!(self, store => store.lease_sweep(retention, limit))
    }

    fn profile(&self) -> Profile {
        let mut profile = match &self.store {
            Store::Memory(store) => store.profile(),
            Store::Redis(_, store) => store.profile(),
        };
        profile.batches = false;
        profile
    }
}

/// Who has the lease.
pub(crate) async fn holder<S: LeaseStore>(leases: &Leases<S>, key: &str) -> Result<View> {
    Ok(leases.show(key).await?.map_or_else(|| "free".to_owned(), |it| it.holder).into())
}

/// Lets time pass for the leases of a database. None is renewed meanwhile, as if all processes were stopped.
pub(crate) async fn shift_leases<DB: Sql>(pool: &Pool<DB>, time: Duration) -> Result<()> {
    let mut conn = pool.acquire().await?;
    // Without leases there is nothing to write, and so no wait for a recipe that has the database locked.
    if DB::number(&mut conn, "SELECT count(*) FROM lockkit_lease").await? == 0 {
        return Ok(());
    }
    let micros = time.as_micros();
    let shift =
        format!("UPDATE lockkit_lease SET expires_us = expires_us - {micros}, acquired_us = acquired_us - {micros}");
    DB::execute(&mut conn, &shift).await?;
    Ok(())
}
