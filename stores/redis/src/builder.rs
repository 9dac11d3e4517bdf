//! The settings of a store, their checks, and how it is opened.

use std::{sync::Arc, time::Duration};

use crate::{
    error::ConnectError,
    layout::Layout,
    node::{Node, Terms},
    server::{Limits, Server},
    store::RedisStore,
};

/// How long a planned failover leaves the old master writable, at most: Sentinel makes it a replica at the second INFO
/// after the switch, 8 s or more after the first, and queries it every 10 s. Seen: 10 to 12 s.
const FAILOVER: Duration = Duration::from_secs(20);

/// Settings of a [`RedisStore`], made by [`RedisStore::builder`].
///
/// # Example
/// ```no_run
/// use std::time::Duration;
///
/// use lockkit_redis::{Layout, RedisStore, redis::Client};
///
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder(Client::open("redis://localhost/")?)
///     .layout(Layout::Redisson)
///     .longest_ttl(Duration::from_secs(30))
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "settings do nothing until `connect` is awaited"]
pub struct RedisStoreBuilder {
    server: Server,
    layout: Layout,
    longest_ttl: Duration,
    quarantine: Option<Duration>,
    limits: Limits,
}

impl RedisStoreBuilder {
    pub(crate) fn new(server: Server) -> Self {
        let limits = Limits { connect: Duration::from_secs(1), answer: Duration::from_secs(1) };
        Self { server, layout: Layout::default(), longest_ttl: Duration::from_mins(1), quarantine: None, limits }
    }

    /// How locks are written. Defaults to [`Layout::Token`].
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// The longest ttl of a lease, and so the length of the [quarantine](crate#when-the-server-forgets). Defaults to
    /// 1 minute. Requests for a longer ttl are refused.
    ///
    /// Set the same in all processes. A process whose value is shorter learns the longest from the server at each
    /// acquisition. It does not know it if its first acquisition follows the loss of the memory.
    pub fn longest_ttl(mut self, ttl: Duration) -> Self {
        self.longest_ttl = ttl;
        self
    }

    /// The length of the [quarantine](crate#when-the-server-forgets). Defaults to [`longest_ttl`](Self::longest_ttl),
    /// and to 20 s more behind Sentinel, because a planned failover leaves the old master writable for so long. It may
    /// not be shorter.
    ///
    /// With replicas and without Sentinel, add the time for which an old master may go on beside its successor:
    /// `min-replicas-max-lag` plus 2 s, if it is cut off from its replicas.
    pub fn quarantine(mut self, quarantine: Duration) -> Self {
        self.quarantine = Some(quarantine);
        self
    }

    /// Grants leases at once, even if the server has just lost its memory. After a restart without an append-only file,
    /// a failover or `FLUSHALL`, a lease may then have two holders for up to its ttl. Set it in all processes or in
    /// none.
    pub fn without_quarantine(self) -> Self {
        self.quarantine(Duration::ZERO)
    }

    /// How long it may take to open a connection. Defaults to 1 s. Sentinels may take up to 4 s more to name the
    /// master.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.limits.connect = limit;
        self
    }

    /// How long the server may take to answer. Defaults to 1 s. A connection without an answer for so long is replaced.
    pub fn answer_timeout(mut self, limit: Duration) -> Self {
        self.limits.answer = limit;
        self
    }

    /// Connects to the server and checks that it can keep leases.
    ///
    /// # Errors
    /// [`ConnectError::InvalidOption`]; [`ConnectError::Unreachable`]; [`ConnectError::Unfit`] for a server that may
    /// evict locks, a replica, a node of a cluster, a server that is too old, or a user who may not run INFO;
    /// [`ConnectError::NoThread`].
    ///
    /// # Cancel safety
    /// A drop closes the connection.
    pub async fn connect(self) -> Result<RedisStore, ConnectError> {
        let servers = self.address();
        let node = self.node()?;
        node.open().await.map_err(|err| ConnectError::new(err, servers))?;
        Ok(RedisStore(Arc::new(node)))
    }

    /// The address of the server, without the user and the password.
    pub(crate) fn address(&self) -> String {
        self.server.address()
    }

    /// Checks the settings. Does not connect.
    pub(crate) fn node(self) -> Result<Node, ConnectError> {
        let Self { server, layout, longest_ttl, quarantine, limits } = self;
        let invalid = |option, reason| Err(ConnectError::InvalidOption { option, reason });
        let least = longest_ttl + if server.is_behind_sentinel() { FAILOVER } else { Duration::ZERO };
        let quarantine = quarantine.unwrap_or(least);
        if longest_ttl < crate::store::LEAST_TTL {
            return invalid("longest_ttl", format!("is {longest_ttl:?}; use {:?} or more", crate::store::LEAST_TTL));
        }
        if longest_ttl > crate::store::LONGEST {
            return invalid("longest_ttl", format!("is {longest_ttl:?}; use {:?} or less", crate::store::LONGEST));
        }
        if quarantine > crate::store::LONGEST {
            return invalid("quarantine", format!("is {quarantine:?}; use {:?} or less", crate::store::LONGEST));
        }
        if !quarantine.is_zero() && quarantine < least {
            let why = if server.is_behind_sentinel() {
                ", and the 20s for which Sentinel may leave an old master writable"
            } else {
                ""
            };
            let reason = format!("is {quarantine:?}; use {least:?} or more: the longest ttl of {longest_ttl:?}{why}");
            return invalid("quarantine", reason);
        }
        if limits.connect.is_zero() || limits.answer.is_zero() {
            return invalid(
                "connect_timeout",
                "or `answer_timeout` is zero; use some milliseconds at least".to_owned(),
            );
        }
        Ok(Node::new(server, Terms { layout, longest_ttl, quarantine, limits }))
    }
}

#[cfg(test)]
mod tests {
    use redis::Client;

    use super::*;
    use crate::store::{LEAST_TTL, LONGEST};

    const MOMENT: Duration = Duration::from_millis(1);

    /// The setting that is refused.
    fn refused(set: impl FnOnce(RedisStoreBuilder) -> RedisStoreBuilder) -> Option<&'static str> {
        let client = Client::open("redis://localhost/").expect("it is an address");
        match set(RedisStoreBuilder::new(client.into())).node() {
            Ok(_) => None,
            Err(ConnectError::InvalidOption { option, .. }) => Some(option),
            Err(err) => panic!("{err:?}"),
        }
    }

    #[test]
    fn each_setting_has_its_limits() {
        assert_eq!(LONGEST, Duration::from_hours(365 * 24), "as the documents say");
        for ttl in [LEAST_TTL, LONGEST] {
            assert_eq!(refused(|it| it.longest_ttl(ttl)), None, "{ttl:?}");
        }
        for ttl in [LEAST_TTL.saturating_sub(MOMENT), LONGEST + MOMENT] {
            assert_eq!(refused(|it| it.longest_ttl(ttl)), Some("longest_ttl"), "{ttl:?}");
        }
        let minute = Duration::from_mins(1);
        for quarantine in [Duration::ZERO, minute, LONGEST] {
            assert_eq!(refused(|it| it.longest_ttl(minute).quarantine(quarantine)), None, "{quarantine:?}");
        }
        for quarantine in [MOMENT, minute.saturating_sub(MOMENT), LONGEST + MOMENT] {
            let refused = refused(|it| it.longest_ttl(minute).quarantine(quarantine));
            assert_eq!(refused, Some("quarantine"), "{quarantine:?}");
        }
        assert_eq!(refused(|it| it.connect_timeout(Duration::ZERO)), Some("connect_timeout"));
        assert_eq!(refused(|it| it.answer_timeout(Duration::ZERO)), Some("connect_timeout"));
    }

    #[test]
    fn a_store_without_quarantine_learns_none() {
        let client = Client::open("redis://localhost/").expect("it is an address");
        let quarantine_of = |quarantine| {
            let builder = RedisStoreBuilder::new(client.clone().into()).longest_ttl(LEAST_TTL).quarantine(quarantine);
            let node = builder.node().expect("it is valid");
            node.learn(90_000);
            node.quarantine.into_inner()
        };
        assert_eq!((quarantine_of(Duration::ZERO), quarantine_of(LEAST_TTL)), (0, 90_000));
    }
}
