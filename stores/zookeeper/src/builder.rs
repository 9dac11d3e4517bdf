//! The settings of a store, their checks, and how it is opened.

use std::{fmt, thread, time::Duration};

use tokio::sync::oneshot;
use zookeeper_client::{Acls, Client, Connector};

use crate::{
    error::ConnectError,
    layout::Layout,
    session::{Settings, drive},
    store::ZooKeeperStore,
};

/// The root unless another one is set.
const ROOT: &str = "/lockkit";

/// The session timeout unless another one is set.
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

/// The settings of a [`ZooKeeperStore`], made by [`ZooKeeperStore::builder`].
///
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use lockkit_zookeeper::{Layout, ZooKeeperStore, zookeeper_client::{Acls, Client}};
///
/// let store = ZooKeeperStore::builder("zk1:2181,zk2:2181,zk3:2181")
///     .root("/app/locks")
///     .layout(Layout::Kazoo)
///     .session_timeout(Duration::from_secs(15))
///     .connector(Client::connector().with_auth("digest", b"app:secret"))
///     .acls(Acls::creator_all())
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "settings do nothing until `connect` is awaited"]
pub struct ZooKeeperStoreBuilder {
    hosts: String,
    root: String,
    session_timeout: Duration,
    layout: Layout,
    connector: Connector,
    acls: Acls<'static>,
}

impl ZooKeeperStoreBuilder {
    pub(crate) fn new(hosts: impl Into<String>) -> Self {
        Self {
            hosts: hosts.into(),
            root: ROOT.to_owned(),
            session_timeout: SESSION_TIMEOUT,
            layout: Layout::default(),
            connector: Client::connector(),
            acls: Acls::anyone_all(),
        }
    }

    /// The node whose children are the nodes of the keys. It is created if it does not exist. Defaults to `/lockkit`.
    pub fn root(mut self, root: impl Into<String>) -> Self {
        self.root = root.into();
        self
    }

    /// How long ZooKeeper waits for a sign of life of this process before it frees its leases. Defaults to 10 s.
    ///
    /// The servers have limits, by default 2 and 20 of their ticks: 4 s and 40 s. They silently use the nearest
    /// timeout within them.
    pub fn session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = timeout;
        self
    }

    /// Whose names the children of the keys get. Defaults to [`Layout::Curator`].
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// The configuration of the client: authentication, TLS, SASL. Each session is opened with it. Its timeouts are
    /// replaced. Do not set `with_session` or `with_detached`: each session of the store must be new, and must end with
    /// the store. TLS and SASL are features of the crate `zookeeper-client`: switch them on in your own dependency on
    /// it.
    pub fn connector(mut self, connector: Connector) -> Self {
        self.connector = connector;
        self
    }

    /// The access rights of the nodes that the store creates. Defaults to all rights for everybody, as other clients
    /// do.
    pub fn acls(mut self, acls: Acls<'static>) -> Self {
        self.acls = acls;
        self
    }

    /// Opens a session, and creates the root if it does not exist.
    ///
    /// The session lives on a thread of its own, so it survives blocking code and the end of a Tokio runtime. It ends
    /// when the last clone of the store is dropped.
    ///
    /// # Errors
    /// [`ConnectError::InvalidOption`]; [`ConnectError::Unreachable`], after a session timeout;
    /// [`ConnectError::Unfit`] if the root cannot be created; [`ConnectError::NoThread`].
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing behind.
    pub async fn connect(self) -> Result<ZooKeeperStore, ConnectError> {
        let Self { hosts, root, session_timeout, layout, connector, acls } = self;
        if has_user(&hosts) {
            let reason = "have a `@`; set a user and password with `connector`, by `Connector::with_auth`";
            return Err(invalid("hosts", reason.to_owned()));
        }
        check_root(&root)?;
        if session_timeout < Duration::from_millis(100) || session_timeout > Duration::from_secs(24 * 60 * 60) {
            let reason = format!("is {session_timeout:?}; use 100 ms or more, and a day or less");
            return Err(invalid("session_timeout", reason));
        }
        let settings = Settings { hosts, root, session_timeout, layout, connector, acls };
        let (opened, opening) = oneshot::channel();
        let (dropped, closing) = oneshot::channel();
        thread::Builder::new()
            .name("lockkit-zookeeper".to_owned())
            .spawn(|| drive(settings, opened, closing))
            .map_err(|source| ConnectError::NoThread { source })?;
        let shared = opening.await.map_err(|_| ConnectError::NoThread {
            source: std::io::Error::other("the thread ended before the session was open"),
        })??;
        Ok(ZooKeeperStore::new(shared, dropped))
    }
}

impl fmt::Debug for ZooKeeperStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hosts, root, session_timeout, layout, connector: _, acls: _ } = self;
        f.debug_struct("ZooKeeperStoreBuilder")
            .field("hosts", &shown(hosts))
            .field("root", root)
            .field("session_timeout", session_timeout)
            .field("layout", layout)
            .finish_non_exhaustive()
    }
}

/// The addresses, unless they may have a user name or password. The `@` of a chroot looks the same.
pub(crate) fn shown(hosts: &str) -> &str {
    if hosts.contains('@') { "(not shown: with a `@`)" } else { hosts }
}

/// Whether an address has a user name or password before its host. `connect` refuses it, and it is never printed.
pub(crate) fn has_user(hosts: &str) -> bool {
    let mut hosts = hosts.split(',').map(|it| it.split_once("://").map_or(it, |(_, rest)| rest));
    // The chroot may have a `@`.
    hosts.any(|it| it.split('/').next().is_some_and(|it| it.contains('@')))
}

pub(crate) fn check_root(root: &str) -> Result<(), ConnectError> {
    let reason = if root == "/" {
        "is the root of ZooKeeper and has nodes of its own; use a node below it, as in `/locks`"
    } else if !root.starts_with('/') {
        "does not start with `/`; use a path such as `/locks`"
    } else if root.ends_with('/') {
        "ends with `/`; leave that out"
    } else if root[1..].split('/').any(|it| matches!(it, "" | "." | "..")) {
        "has a part that is empty, `.` or `..`; leave that out"
    } else if root.chars().any(|it| it.is_control() || it > '\u{d7ff}') {
        "has a character that ZooKeeper refuses; use others"
    } else if root == "/zookeeper" || root.starts_with("/zookeeper/") {
        "is reserved by ZooKeeper; use another path"
    } else {
        return Ok(());
    };
    Err(invalid("root", format!("is `{root}`, which {reason}")))
}

fn invalid(option: &'static str, reason: String) -> ConnectError {
    ConnectError::InvalidOption { option, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_in_an_address_is_found_and_a_chroot_is_none() {
        for user in ["app:secret@zk1:2181", "zk1,app@zk2/x", "tcp+tls://app:secret@zk1"] {
            assert!(has_user(user), "{user}");
        }
        for none in ["zk1:2181,zk2:2181/a@b", "tcp://zk1", "[::1]:2181"] {
            assert!(!has_user(none), "{none}");
        }
    }

    #[test]
    fn a_root_is_a_path_below_the_root_of_zookeeper() {
        for good in ["/locks", "/a/b", "/zookeeper-locks", "/\u{d7ff}"] {
            assert!(check_root(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "locks", "/locks/", "/a//b", "/a/./b", "/..", "/\u{7}", "/\u{e000}", "/zookeeper/x"] {
            assert!(check_root(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_shown_unless_they_may_have_a_password() {
        assert_eq!(shown("zk1:2181,zk2:2181/app"), "zk1:2181,zk2:2181/app");
        assert_eq!(shown("app:secret@zk1"), "(not shown: with a `@`)");
    }

    #[tokio::test]
    async fn a_session_timeout_is_from_100_ms_to_a_day() {
        let connect = |timeout| ZooKeeperStore::builder("no port:0").session_timeout(timeout).connect();
        let (instant, day) = (Duration::from_millis(1), Duration::from_hours(24));
        for good in [Duration::from_millis(100), Duration::from_secs(100), day.saturating_sub(instant), day] {
            let refused = connect(good).await.expect_err("the address is none");
            assert!(matches!(refused, ConnectError::Unreachable { .. }), "{good:?}: {refused:?}");
        }
        for bad in [Duration::ZERO, Duration::from_millis(99), day + instant, day * 2] {
            let refused = connect(bad).await.expect_err("it cannot work");
            assert!(matches!(refused, ConnectError::InvalidOption { .. }), "{bad:?}: {refused:?}");
        }
    }
}
