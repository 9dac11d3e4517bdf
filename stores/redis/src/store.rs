//! Leases in one Redis server.

use std::{sync::Arc, time::Duration};

use lockkit::{
    Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};

use crate::{
    builder::RedisStoreBuilder,
    claim::{Taken, all, grant},
    error::ConnectError,
    node::Node,
    server::Server,
};

/// The shortest ttl.
pub(crate) const LEAST_TTL: Duration = Duration::from_millis(50);

/// The longest ttl and quarantine that can be set: so long that times stay exact in the scripts.
pub(crate) const LONGEST: Duration = Duration::from_hours(24 * 365);

/// Leases in one Redis or Valkey server, or in the master that Sentinel names.
///
/// Clones share one connection. See the [crate](crate) for what it promises, and when.
///
/// # Example
/// ```no_run
/// use std::time::Duration;
///
/// use lockkit::Leases;
/// use lockkit_redis::{RedisStore, redis::Client};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect(Client::open("redis://localhost/")?).await?;
/// let leases = Leases::new(store);
/// let lease = leases.lease("nightly").ttl(Duration::from_secs(30)).acquire().await?;
/// // … long work, as long as lease.is_trusted() …
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RedisStore(pub(crate) Arc<Node>);

impl RedisStore {
    /// Connects with the defaults of [`RedisStoreBuilder`].
    ///
    /// # Errors
    /// Those of [`RedisStoreBuilder::connect`].
    ///
    /// # Cancel safety
    /// A drop closes the connection.
    pub async fn connect(server: impl Into<Server>) -> Result<Self, ConnectError> {
        Self::builder(server).connect().await
    }

    /// A builder for a store with your own settings.
    pub fn builder(server: impl Into<Server>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(server.into())
    }

    /// Declares that this server holds all leases that it ever granted, and so ends its
    /// [quarantine](crate#when-the-server-forgets).
    ///
    /// Call it by hand or from a set-up script, once for a new server. A service must not call it at each start: it
    /// would also end the quarantine of a server that has just lost its memory.
    ///
    /// ```no_run
    /// # async fn f(client: lockkit_redis::redis::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// // In the program that sets up a new server, not in the service.
    /// lockkit_redis::RedisStore::connect(client).await?.declare_new().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// It also shortens later quarantines to that of this store, if a client that is no more had a longer one.
    /// Otherwise the server remembers the longest. Stop the other clients first: a client that lives sends the server
    /// the longest quarantine that it knows again.
    ///
    /// # Errors
    /// [`lockkit::Error::Database`].
    ///
    /// # Cancel safety
    /// After a drop the quarantine may or may not have ended. Repeat the call.
    pub async fn declare_new(&self) -> Result<()> {
        self.0.quarantine(true).await.map(drop).map_err(|it| it.while_doing("declaring a server new", None))
    }

    /// How long this server grants nothing yet, because it may have forgotten leases. Zero if it grants.
    ///
    /// # Errors
    /// [`lockkit::Error::Database`].
    ///
    /// # Cancel safety
    /// Reads only.
    pub async fn quarantined_for(&self) -> Result<Duration> {
        self.0.quarantine(false).await.map_err(|it| it.while_doing("reading the quarantine", None))
    }
}

impl LeaseStore for RedisStore {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let claims = std::slice::from_ref(claim);
        let taken = self.0.acquire(claims).await.map_err(|it| it.while_doing("acquiring lease", &claim.key))?;
        Ok(match taken {
            Taken::Granted(mut given) => {
                let given = given.pop().expect("BUG: the node answers each claim");
                Acquired::Granted(grant(given, claim, self.0.terms.longest_ttl))
            }
            Taken::Held { free_in, .. } => Acquired::Held { free_in },
        })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let first = claims.first().map(|it| &it.key);
        let taken = self.0.acquire(claims).await.map_err(|it| it.while_doing("acquiring leases", first))?;
        Ok(all(taken, claims, self.0.terms.longest_ttl))
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        let first = claims.first().map(|it| &it.key);
        self.0.acquire_each(claims).await.map_err(|it| it.while_doing("acquiring leases", first))
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        let seen = self.0.look(key, true).await.map_err(|it| it.while_doing("looking at lease", key))?;
        Ok(seen.map(|it| it.record))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let first = renewals.first().map(|it| &it.key);
        self.0.renew(renewals).await.map_err(|it| it.while_doing("renewing leases", first))
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answers = self.lease_release_all(&[Release::new(key, token, min_hold)]).await?;
        Ok(answers.first().copied().expect("BUG: the node answers each release"))
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let first = releases.first().map(|it| &it.key);
        self.0.release(releases).await.map_err(|it| it.while_doing("releasing lease", first))
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let first = releases.first().map(|it| &it.key);
        self.0.release_each(releases).await.map_err(|it| it.while_doing("releasing leases", first))
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        let seen = self.0.list(prefix, limit, true).await.map_err(|it| it.while_doing("listing leases", None))?;
        Ok(seen.into_iter().map(|it| it.record).collect())
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.0.sweep(retention, limit).await.map_err(|it| it.while_doing("sweeping leases", None))
    }

    fn lease_freed(&self, key: &Key) -> impl Future<Output = ()> + Send {
        self.0.subscriptions.freed(self.0.terms.layout.channel(key))
    }

    fn profile(&self) -> Profile {
        let mut profile = profile(self.0.terms.longest_ttl);
        profile.batches = true;
        profile
    }
}

pub(crate) fn profile(longest_ttl: Duration) -> Profile {
    let mut profile = Profile::default();
    profile.least_ttl = LEAST_TTL;
    profile.longest_ttl = Some(longest_ttl);
    profile.fence_domain = "redis";
    profile
}
