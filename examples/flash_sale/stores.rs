//! The systems beside the database that leases can live in, chosen by a URL.

use std::time::Duration;

use anyhow::{Result, bail};
use lockkit::store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, Renewal, Token};
use lockkit::{Error, Key};

/// A store of any kind that the demo was built with.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    #[cfg(feature = "redis")]
    Redis(lockkit_redis::RedisStore),
    #[cfg(feature = "zookeeper")]
    ZooKeeper(lockkit_zookeeper::ZooKeeperStore),
    #[cfg(feature = "etcd")]
    Etcd(lockkit_etcd::EtcdStore),
}

impl Store {
    /// Connects to `redis://host:port`, `zk://host:port,host:port/root` or `etcd://host:port,host:port`.
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        match scheme {
            #[cfg(feature = "redis")]
            "redis" | "rediss" => {
                let store = lockkit_redis::RedisStore::connect(redis::Client::open(url)?).await?;
                // It is the demo's own. A service does this once, when the server is new.
                store.declare_new().await?;
                Ok(Self::Redis(store))
            }
            #[cfg(feature = "zookeeper")]
            "zk" | "zookeeper" => {
                let (hosts, root) = rest.split_once('/').unwrap_or((rest, "locks"));
                let store = lockkit_zookeeper::ZooKeeperStore::builder(hosts).root(format!("/{root}"));
                // The shortest that servers grant by default.
                Ok(Self::ZooKeeper(store.session_timeout(Duration::from_secs(4)).connect().await?))
            }
            #[cfg(feature = "etcd")]
            "etcd" => {
                let store = lockkit_etcd::EtcdStore::builder(rest.split(','));
                Ok(Self::Etcd(store.session_ttl(Duration::from_secs(2)).connect().await?))
            }
            _ => bail!(
                "the store must be a URL with redis://, zk:// or etcd://, and the demo built with it: `--features \
                 redis`, `zookeeper` or `etcd` after `-p flash_sale`; not `{scheme}://{rest}`"
            ),
        }
    }
}

/// Calls the method of the store that it is.
macro_rules! of {
    ($self:ident.$method:ident($($argument:expr),*) $($wait:tt)*) => {
        match $self {
            #[cfg(feature = "redis")]
            Self::Redis(store) => store.$method($($argument),*) $($wait)*,
            #[cfg(feature = "zookeeper")]
            Self::ZooKeeper(store) => store.$method($($argument),*) $($wait)*,
            #[cfg(feature = "etcd")]
            Self::Etcd(store) => store.$method($($argument),*) $($wait)*,
        }
    };
}

impl LeaseStore for Store {
    async fn lease_acquire(&self, claim: &Claim) -> lockkit::Result<Acquired> {
        of!(self.lease_acquire(claim).await)
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> lockkit::Result<AcquiredAll> {
        of!(self.lease_acquire_all(claims).await)
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> lockkit::Result<Vec<Option<Acquired>>> {
        of!(self.lease_acquire_each(claims).await)
    }

    async fn lease_look(&self, key: &Key) -> lockkit::Result<Option<LeaseRecord>> {
        of!(self.lease_look(key).await)
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> lockkit::Result<Vec<Answer>> {
        of!(self.lease_renew(renewals).await)
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> lockkit::Result<Answer> {
        of!(self.lease_release(key, token, min_hold).await)
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> lockkit::Result<Answer> {
        of!(self.lease_release_unpinned(key, token).await)
    }

    async fn lease_release_all(&self, releases: &[Release]) -> lockkit::Result<Vec<Answer>> {
        of!(self.lease_release_all(releases).await)
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> lockkit::Result<Vec<Answer>> {
        of!(self.lease_release_all_unpinned(releases).await)
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> lockkit::Result<Vec<LeaseRecord>> {
        of!(self.lease_list(prefix, limit).await)
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> lockkit::Result<u64> {
        of!(self.lease_sweep(retention, limit).await)
    }

    async fn unanswered(&self) -> Option<Error> {
        of!(self.unanswered().await)
    }

    async fn lease_freed(&self, key: &Key) {
        of!(self.lease_freed(key).await);
    }

    fn profile(&self) -> Profile {
        of!(self.profile())
    }
}
