//! Where the server is: an address, or a master that Sentinel names. Opens connections and refuses unfit servers.
//!
//! After a planned failover the old master is writable for 10 to 12 s: Sentinel makes it a replica at the second INFO
//! that still says `master`, and queries it every 10 s. `ROLE` in the script does not close the gap, because the old
//! master says `master` for all that time; neither does a look at Sentinel before each claim, because the Sentinels
//! learn of a promotion up to 3 s later. So the new master waits for the old one: the quarantine is 20 s longer. With a
//! longest ttl of 2 s, the old master renewed for 11 s and the rival was granted after 23 s.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use redis::{AsyncConnectionConfig, Client, aio::MultiplexedConnection, aio::PubSub, cmd};
use tokio::time::timeout;

use crate::{error::Failure, fit::refuse_unfit};

/// How long the Sentinels may take to name the master. The client waits 1.5 s for one that does not answer, and as long
/// for the master.
#[cfg(feature = "sentinel")]
const SENTINELS: Duration = Duration::from_secs(4);

/// A Redis server as the `redis` crate describes it: made from a [`redis::Client`], or with the feature `sentinel` from
/// a `redis::sentinel::SentinelClient` for a master. Address, database, user, password and TLS are those of the client.
///
/// # Example
/// ```no_run
/// # #[cfg(feature = "sentinel")]
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// use lockkit_redis::{
///     RedisStore,
///     redis::sentinel::{SentinelClient, SentinelServerType},
/// };
///
/// let sentinels = vec!["redis://a:26379/", "redis://b:26379/", "redis://c:26379/"];
/// let master = SentinelClient::build(sentinels, "mymaster".to_owned(), None, SentinelServerType::Master)?;
/// let store = RedisStore::connect(master).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Server(Arc<Kind>);

enum Kind {
    Client(Client),
    #[cfg(feature = "sentinel")]
    Sentinel(tokio::sync::Mutex<redis::sentinel::SentinelClient>),
}

impl From<Client> for Server {
    fn from(client: Client) -> Self {
        Self(Arc::new(Kind::Client(client)))
    }
}

#[cfg(feature = "sentinel")]
impl From<redis::sentinel::SentinelClient> for Server {
    fn from(client: redis::sentinel::SentinelClient) -> Self {
        Self(Arc::new(Kind::Sentinel(client.into())))
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.address())
    }
}

/// How long a server may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// To open a connection.
    pub(crate) connect: Duration,
    /// To answer.
    pub(crate) answer: Duration,
}

impl Server {
    /// Opens a connection to a server that can keep leases. Also returns the id of the server's process.
    pub(crate) async fn connect(&self, limits: Limits) -> Result<(MultiplexedConnection, String), Failure> {
        let client = self.client().await?;
        within(limits.connect, "connecting", async {
            // The caller limits each answer.
            let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
            let mut conn = client.get_multiplexed_async_connection_with_config(&config).await?;
            let info = cmd("INFO").query_async::<String>(&mut conn).await;
            let run = refuse_unfit(info)?;
            Ok((conn, run))
        })
        .await
    }

    /// Where it is, without the user and the password.
    pub(crate) fn address(&self) -> String {
        match &*self.0 {
            Kind::Client(client) => client.get_connection_info().addr().to_string(),
            #[cfg(feature = "sentinel")]
            Kind::Sentinel(_) => "the master that Sentinel names".to_owned(),
        }
    }

    /// Whether Sentinel may name another master.
    pub(crate) fn is_behind_sentinel(&self) -> bool {
        match &*self.0 {
            Kind::Client(_) => false,
            #[cfg(feature = "sentinel")]
            Kind::Sentinel(_) => true,
        }
    }

    /// How long it may take to open a connection in all.
    pub(crate) fn patience(&self, limits: Limits) -> Duration {
        match &*self.0 {
            Kind::Client(_) => limits.connect,
            #[cfg(feature = "sentinel")]
            Kind::Sentinel(_) => limits.connect + SENTINELS,
        }
    }

    /// Opens a connection for subscriptions.
    pub(crate) async fn listen(&self, limits: Limits) -> Result<PubSub, Failure> {
        let client = self.client().await?;
        within(limits.connect, "connecting", async { Ok(client.get_async_pubsub().await?) }).await
    }

    // Without Sentinel there is nothing to wait for.
    #[cfg_attr(not(feature = "sentinel"), allow(clippy::unused_async))]
    async fn client(&self) -> Result<Client, Failure> {
        match &*self.0 {
            Kind::Client(client) => Ok(client.clone()),
            #[cfg(feature = "sentinel")]
            Kind::Sentinel(client) => {
                let naming = async { Ok(client.lock().await.async_get_client().await?) };
                within(SENTINELS, "querying the Sentinels for the master", naming).await
            }
        }
    }
}

/// Ends with an error if the server takes longer.
pub(crate) async fn within<T>(
    limit: Duration,
    doing: &'static str,
    call: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let begun = Instant::now();
    timeout(limit, call).await.unwrap_or_else(|_| Err(Failure::silent(doing, begun.elapsed())))
}
