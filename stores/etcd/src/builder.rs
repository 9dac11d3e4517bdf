//! The settings of a store, their checks, and how it is opened.

use std::{fmt, sync::Arc, time::Duration};

use etcd_client::{Client, ConnectOptions};

use crate::{error::ConnectError, layout, members::Source, store::EtcdStore};

/// The shortest time that etcd keeps a lease with its default settings.
const LEAST_SESSION: Duration = Duration::from_secs(2);

/// The longest ttl that etcd grants.
pub(crate) const LONGEST: Duration = Duration::from_secs(9_000_000_000);

/// Settings of an [`EtcdStore`], made by [`EtcdStore::builder`].
///
/// # Example
/// ```no_run
/// use std::time::Duration;
///
/// use lockkit_etcd::{EtcdStore, etcd_client::ConnectOptions};
///
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = EtcdStore::builder(["http://127.0.0.1:2379"])
///     .prefix("services/locks/")
///     .session_ttl(Duration::from_secs(5))
///     .connect_options(ConnectOptions::new().with_user("locker", "secret"))
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "settings do nothing until `connect` is awaited"]
pub struct EtcdStoreBuilder {
    cluster: Cluster,
    prefix: String,
    session_ttl: Duration,
    take_over: TakeOver,
    connect_options: ConnectOptions,
}

/// How the members of the cluster are reached.
#[derive(Clone)]
enum Cluster {
    Endpoints(Vec<String>),
    Client(Arc<Client>),
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
    /// otherwise at once. The default. Queries the status of each member; a member that answers "permission denied"
    /// counts as one with the fix, because only newer versions refuse it.
    #[default]
    ByVersion,
    /// At once.
    AtOnce,
    /// After the ttl of the lease has passed once more.
    AfterTtl,
}

impl EtcdStoreBuilder {
    /// Connects to members with these addresses.
    pub(crate) fn new(endpoints: Vec<String>) -> Self {
        Self::of(Cluster::Endpoints(endpoints))
    }

    /// Uses a client that is connected already.
    pub(crate) fn with_client(client: Client) -> Self {
        Self::of(Cluster::Client(Arc::new(client)))
    }

    fn of(cluster: Cluster) -> Self {
        Self {
            cluster,
            prefix: "lockkit/lock/".to_owned(),
            session_ttl: Duration::from_secs(10),
            take_over: TakeOver::default(),
            connect_options: ConnectOptions::new(),
        }
    }

    /// The text before the name of each lease. Defaults to `lockkit/lock/`.
    ///
    /// With the default, the lease `nightly` is the lock of `etcdctl lock lockkit/lock/nightly`. With an empty prefix
    /// it is the lock of `etcdctl lock nightly`; then no other keys of the cluster may start with the name of a lease
    /// and `/`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The shortest ttl of the etcd leases that keep the keys of this process. Defaults to 10 s; 2 s is the least,
    /// which is also the least that etcd grants. Whole seconds; a part of a second is rounded up.
    ///
    /// While the process lives, each lease ends by its own ttl. If the process dies or is stopped, its leases end with
    /// their etcd lease: after the session ttl or, where that is longer, about 1.25 times the ttl of the lease. A
    /// shorter session ttl frees the leases of dead processes sooner and sends more keep-alive messages: five in a
    /// session ttl.
    pub fn session_ttl(mut self, ttl: Duration) -> Self {
        self.session_ttl = ttl;
        self
    }

    /// When a lease is taken over whose key etcd has deleted. Defaults to [`TakeOver::ByVersion`].
    pub fn take_over(mut self, take_over: TakeOver) -> Self {
        self.take_over = take_over;
        self
    }

    /// The options of the client, such as its TLS and its user. Not used by a client that is connected already.
    ///
    /// These are overridden: the connect timeout (2 s), HTTP/2 keep-alive (every 6 s while requests are open, answered
    /// within 3 s), the requirement of a leader, and the refresh of an expired authentication token.
    pub fn connect_options(mut self, options: ConnectOptions) -> Self {
        self.connect_options = options;
        self
    }

    /// Connects to the cluster. A client that is connected already sends nothing here.
    ///
    /// # Errors
    /// [`ConnectError::InvalidOption`]; [`ConnectError::Unreachable`] if no member answers within 5 s.
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing behind.
    pub async fn connect(self) -> Result<EtcdStore, ConnectError> {
        self.check()?;
        let connect_options = self.client_options();
        let Self { cluster, prefix, session_ttl, take_over, connect_options: _ } = self;
        let endpoints = match cluster {
            Cluster::Endpoints(endpoints) => endpoints,
            Cluster::Client(client) => {
                return Ok(EtcdStore::new(Source::Client(client), prefix, session_ttl, take_over));
            }
        };
        let servers = addresses(&endpoints);
        let source = Source::Endpoints(endpoints, Box::new(connect_options));
        let store = EtcdStore::new(source, prefix, session_ttl, take_over);
        match store.reach().await {
            Ok(()) => Ok(store),
            Err(err) => Err(ConnectError::Unreachable { servers, source: err.into() }),
        }
    }

    fn check(&self) -> Result<(), ConnectError> {
        let Self { cluster, prefix, session_ttl, take_over: _, connect_options: _ } = self;
        let invalid = |option, reason| Err(ConnectError::InvalidOption { option, reason });
        if matches!(cluster, Cluster::Endpoints(endpoints) if endpoints.is_empty()) {
            let reason = "are none; name at least one member of the cluster, such as `http://127.0.0.1:2379`";
            return invalid("endpoints", reason.to_owned());
        }
        if *session_ttl < LEAST_SESSION || *session_ttl > LONGEST {
            let reason = format!("is {session_ttl:?}; use 2 s or more, the least that etcd grants, and at most 9e9 s");
            return invalid("session_ttl", reason);
        }
        if layout::is_reserved(prefix) {
            let own = "lockkit keeps its own keys below `lockkit/last/` and `lockkit/session/`";
            return invalid("prefix", format!("is `{prefix}`; use another one, because {own}"));
        }
        Ok(())
    }

    /// The client's options with what a lock needs.
    fn client_options(&self) -> ConnectOptions {
        // etcd closes connections that are pinged more than once in 5 s, or while no request is open.
        self.connect_options
            .clone()
            .with_connect_timeout(Duration::from_secs(2))
            .with_keep_alive(Duration::from_secs(6), Duration::from_secs(3))
            .with_keep_alive_while_idle(false)
            .with_require_leader(true)
            .with_auto_token_refresh(true)
    }
}

impl fmt::Debug for EtcdStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options of the client may have a password.
        let Self { cluster, prefix, session_ttl, take_over, connect_options: _ } = self;
        let endpoints = match cluster {
            Cluster::Endpoints(endpoints) => addresses(endpoints),
            Cluster::Client(_) => "(those of the client)".to_owned(),
        };
        f.debug_struct("EtcdStoreBuilder")
            .field("endpoints", &endpoints)
            .field("prefix", prefix)
            .field("session_ttl", session_ttl)
            .field("take_over", take_over)
            .finish_non_exhaustive()
    }
}

/// The addresses, without user names and passwords.
pub(crate) fn addresses(endpoints: &[String]) -> String {
    endpoints.iter().map(|it| without_user(it)).collect::<Vec<_>>().join(", ")
}

/// The address without a user name and password.
fn without_user(endpoint: &str) -> String {
    // Without a scheme, the first `://` may be in the password.
    let scheme = endpoint.split_once("://").filter(|(it, _)| it.bytes().all(|it| it.is_ascii_alphabetic()));
    let (scheme, rest) = scheme.unwrap_or(("", endpoint));
    // A password may have any character, also those that end an authority.
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let (host, _) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if scheme.is_empty() { host.to_owned() } else { format!("{scheme}://{host}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_user_and_password() {
        for (endpoint, shown) in [
            ("http://app:pass@etcd1:2379/x", "http://etcd1:2379"),
            ("https://app:p@ss/w?rd#@etcd1:2379", "https://etcd1:2379"),
            ("app:pass://word@etcd1:2379", "etcd1:2379"),
            ("http://[::1]:2379", "http://[::1]:2379"),
            ("etcd1:2379", "etcd1:2379"),
        ] {
            assert_eq!(without_user(endpoint), shown, "{endpoint}");
        }
    }

    #[test]
    fn the_session_ttl_is_one_that_etcd_grants() {
        let check = |ttl| EtcdStoreBuilder::new(vec!["http://etcd1:2379".to_owned()]).session_ttl(ttl).check();
        let instant = Duration::from_nanos(1);
        for ttl in [LEAST_SESSION, Duration::from_secs(10), LONGEST] {
            assert!(check(ttl).is_ok(), "{ttl:?}");
        }
        for ttl in [LEAST_SESSION.saturating_sub(instant), LONGEST + instant] {
            assert!(check(ttl).is_err(), "{ttl:?}");
        }
    }
}
