//! How a store is set up.

use std::{fmt, time::Duration};

use etcd_client::ConnectOptions;

use crate::layout;

/// The shortest time that etcd keeps a lease with its default settings.
const LEAST_SESSION: Duration = Duration::from_secs(2);

/// The longest ttl that etcd grants.
pub(crate) const LONGEST: Duration = Duration::from_secs(9_000_000_000);

/// Settings of an [`EtcdStore`](crate::EtcdStore).
///
/// ```
/// use std::time::Duration;
/// use lockkit_etcd::{Options, etcd_client::ConnectOptions};
///
/// let options = Options::new()
///     .prefix("services/locks/")
///     .session_ttl(Duration::from_secs(5))
///     .client(ConnectOptions::new().with_user("locker", "secret"));
/// # let _ = options;
/// ```
#[derive(Clone)]
pub struct Options {
    pub(crate) prefix: String,
    pub(crate) session_ttl: Duration,
    pub(crate) take_over: TakeOver,
    pub(crate) client: ConnectOptions,
}

/// When a lease is taken over whose key etcd has deleted, while its holder did not say that it is over.
///
/// Such a holder is dead, stopped or cut off. Its trust has ended before its etcd lease did. But members of etcd before
/// 3.4.31 and 3.5.13 can revoke the leases of living holders, after they were the leader, were stopped and went on
/// ([etcd#15247](https://github.com/etcd-io/etcd/issues/15247)). Such a holder trusts its lease until its next renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TakeOver {
    /// After the ttl of the lease has passed once more, if any member that answers at the first use has such a version;
    /// otherwise at once. The default. Asks each member for its status; a member that answers "permission denied" counts
    /// as one with the fix, because only newer versions refuse it.
    #[default]
    ByVersion,
    /// At once.
    AtOnce,
    /// After the ttl of the lease has passed once more.
    AfterTtl,
}

impl Options {
    /// The defaults: the prefix `lockkit/lock/`, a session ttl of 10 s, no TLS and no user.
    pub fn new() -> Self {
        Self {
            prefix: "lockkit/lock/".to_owned(),
            session_ttl: Duration::from_secs(10),
            take_over: TakeOver::default(),
            client: ConnectOptions::new(),
        }
    }

    /// Sets the text before the name of each lease. Defaults to `lockkit/lock/`.
    ///
    /// With the default, the lease `nightly` is the lock of `etcdctl lock lockkit/lock/nightly`. With an empty prefix
    /// it is the lock of `etcdctl lock nightly`; then no other keys of the cluster may start with the name of a lease
    /// and `/`.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the shortest ttl of the etcd leases that keep the keys of this process. Defaults to 10 s; 2 s is the least,
    /// which is also the least that etcd grants. Whole seconds; a part of a second is rounded up.
    ///
    /// While the process lives, each lease ends by its own ttl. If the process dies or is stopped, its leases end with
    /// their etcd lease: after the session ttl or, where that is longer, about 1.25 times the ttl of the lease. A shorter
    /// session ttl frees the leases of dead processes sooner and sends more keep-alive messages: five in a session
    /// ttl.
    #[must_use]
    pub fn session_ttl(mut self, ttl: Duration) -> Self {
        self.session_ttl = ttl;
        self
    }

    /// Sets when a lease is taken over whose key etcd has deleted. Defaults to [`TakeOver::ByVersion`].
    #[must_use]
    pub fn take_over(mut self, take_over: TakeOver) -> Self {
        self.take_over = take_over;
        self
    }

    /// Sets the options of the client, such as its TLS and its user.
    ///
    /// [`EtcdStore::connect`](crate::EtcdStore::connect) overrides these: the connect timeout (2 s), HTTP/2 keep-alive
    /// (every 6 s while requests are open, answered within 3 s), the requirement of a leader, and the refresh of an
    /// expired authentication token.
    #[must_use]
    pub fn client(mut self, options: ConnectOptions) -> Self {
        self.client = options;
        self
    }

    pub(crate) fn check(&self) -> Result<(), SetupError> {
        let Self { prefix, session_ttl, take_over: _, client: _ } = self;
        if *session_ttl < LEAST_SESSION || *session_ttl > LONGEST {
            return Err(SetupError::SessionTtl { ttl: *session_ttl });
        }
        if layout::is_reserved(prefix) {
            return Err(SetupError::Prefix { prefix: prefix.clone() });
        }
        Ok(())
    }

    /// The client's options with what a lock needs.
    pub(crate) fn connect(&self) -> ConnectOptions {
        // etcd closes connections that are pinged more than once in 5 s, or while no request is open.
        self.client
            .clone()
            .with_connect_timeout(Duration::from_secs(2))
            .with_keep_alive(Duration::from_secs(6), Duration::from_secs(3))
            .with_keep_alive_while_idle(false)
            .with_require_leader(true)
            .with_auto_token_refresh(true)
    }
}

/// Without the options of the client, which may have a password.
impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefix, session_ttl, take_over, client: _ } = self;
        f.debug_struct("Options")
            .field("prefix", prefix)
            .field("session_ttl", session_ttl)
            .field("take_over", take_over)
            .finish_non_exhaustive()
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// Why an [`EtcdStore`](crate::EtcdStore) could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The session ttl is out of range.
    #[error("`session_ttl` is {ttl:?}: use 2 s or more, which is the least that etcd grants, and at most 9e9 s")]
    #[non_exhaustive]
    SessionTtl {
        /// The session ttl.
        ttl: Duration,
    },
    /// The prefix is one below which lockkit keeps its own keys.
    #[error(
        "`prefix` is `{prefix}`: lockkit keeps its own keys below `lockkit/last/` and `lockkit/session/`; use another one"
    )]
    #[non_exhaustive]
    Prefix {
        /// The prefix.
        prefix: String,
    },
    /// There are no endpoints.
    #[error("no endpoints: name at least one member of the cluster, such as `http://127.0.0.1:2379`")]
    NoEndpoints,
    /// No member of the cluster accepted a request.
    #[error("etcd could not be reached at {endpoints}: check the addresses, TLS (`https://`) and the user")]
    #[non_exhaustive]
    Unreachable {
        /// The endpoints, without user names and passwords.
        endpoints: String,
        /// What the client said.
        source: lockkit::Error,
    },
}
