//! The store: its calls, each with a time limit, executed on the thread of the session.

use std::{future::ready, sync::Arc, time::Duration};

use lockkit::{
    Error, Key, LeaseStore, Result,
    store::{Acquired, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};
use tokio::{sync::oneshot, time::timeout};

use crate::{
    builder::{ZooKeeperStoreBuilder, shown},
    claimed::Task,
    error::{ConnectError, Failure},
    session::Shared,
};

/// The longest time that a call waits for its answer. lockkit's own limits are shorter.
const ANSWER: Duration = Duration::from_secs(10);

/// Shorter leases would end by the latency of an ensemble's disks.
const LEAST_TTL: Duration = Duration::from_millis(100);

/// Leases in ZooKeeper. Clones share one session.
///
/// The order of waiting requests is that of ZooKeeper's queue, among all processes and clients: every request is as
/// [`fair`](lockkit::LeaseRequest::fair). A request that only tries is refused while others wait.
///
/// `min_hold` lasts while the session lives: if the process ends earlier, the key is free.
///
/// The note of the holder that an heir gets as [`previous`](lockkit::Lease::previous) is sent before the lease is
/// returned, and its answer is not awaited. It is lost if the connection breaks at this moment.
///
/// Of a lease of another process, the number of renewals is not known, and `expires_in` is its ttl: only a renewal that
/// changes the ttl writes something that others can read.
///
/// A key's node is persistent. It is deleted by the sweep when it was not used for the retention. A lock of kazoo or
/// Curator does not count as use. A node that another lock client created (its data are empty, or an IP address) is
/// used as it is: lockkit writes no data into it, never deletes it, and its holders have no
/// [`previous`](lockkit::Lease::previous). A node with any other data belongs to another program: a lease of that key
/// is an error that shows them.
///
/// # Example
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use lockkit::Leases;
/// use lockkit_zookeeper::ZooKeeperStore;
///
/// let leases = Leases::new(ZooKeeperStore::connect("127.0.0.1:2181", "/locks").await?);
/// let report = leases.lease("nightly").run(|lease| async move { Ok::<_, lockkit::Error>(lease.fence()) }).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ZooKeeperStore {
    shared: Arc<Shared>,
    _open: Arc<oneshot::Sender<()>>,
}

impl ZooKeeperStore {
    /// Opens a store on these servers, such as `zk1:2181,zk2:2181`, with the nodes of its keys below `root`. The
    /// other settings are those of [`builder`](Self::builder).
    ///
    /// # Errors
    /// As [`ZooKeeperStoreBuilder::connect`].
    ///
    /// # Cancel safety
    /// As [`ZooKeeperStoreBuilder::connect`].
    pub async fn connect(hosts: impl Into<String>, root: impl Into<String>) -> Result<Self, ConnectError> {
        Self::builder(hosts).root(root).connect().await
    }

    /// The settings of a store on these servers. A path after the last address is the chroot of the session, as in
    /// `zk1:2181,zk2:2181/app`.
    pub fn builder(hosts: impl Into<String>) -> ZooKeeperStoreBuilder {
        ZooKeeperStoreBuilder::new(hosts)
    }

    /// The runtime of the session's thread.
    #[cfg(test)]
    pub(crate) fn runtime(&self) -> tokio::runtime::Handle {
        self.shared.runtime.clone()
    }

    pub(crate) fn new(shared: Arc<Shared>, open: oneshot::Sender<()>) -> Self {
        Self { shared, _open: Arc::new(open) }
    }

    /// The session timeout that the servers have granted: how long a dead process keeps its leases. `None` while
    /// there is no session.
    pub fn session_timeout(&self) -> Option<Duration> {
        Some(self.shared.current()?.client.session_timeout())
    }

    /// How long a lease of this store is trusted without a renewal, whatever its ttl. `None` while there is no
    /// session.
    pub fn trusted_for(&self) -> Option<Duration> {
        Some(self.shared.current()?.trusted)
    }

    /// The id of the current session, as the servers log it. `None` while there is no session.
    pub fn session_id(&self) -> Option<i64> {
        Some(self.shared.current()?.client.session_id().0)
    }

    /// The path of the node of this key, for other clients that lock the same thing.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = lockkit_zookeeper::ZooKeeperStore::connect("127.0.0.1:2181", "/locks").await?;
    /// assert_eq!(store.path("orders/42"), "/locks/orders%2f42");
    /// # Ok(()) }
    /// ```
    pub fn path(&self, key: &str) -> String {
        self.shared.dir(key)
    }

    /// Runs the call on the session's thread, as soon as it is ready. Dropping the result does not stop it then: each
    /// call leaves nothing half done.
    async fn call<T: Send + 'static>(
        &self,
        doing: &'static str,
        key: Option<&Key>,
        ready: impl Future<Output = ()> + Send,
        call: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T> {
        let answer = async {
            ready.await;
            self.shared.runtime.spawn(call).await
        };
        let answer = timeout(ANSWER, answer).await;
        self.answer(doing, key, answer.map(|it| it.unwrap_or_else(|_| Err(closed()))).ok())
    }

    /// Waits for a session, so that calls without one leave no task behind.
    async fn connected(&self) {
        drop(self.shared.session().await);
    }

    /// As `connected`. A lease of this process has a session of its own.
    async fn releasable(&self, token: Token) {
        let is_own = self.shared.claims().get(token).is_some();
        if !is_own {
            self.connected().await;
        }
    }

    fn answer<T>(&self, doing: &'static str, key: Option<&Key>, answer: Option<Result<T, Failure>>) -> Result<T> {
        let silence = || {
            let unknown = || Failure::Silence(format!("no answer in {ANSWER:?}"));
            Err(self.shared.silence_reason().unwrap_or_else(unknown))
        };
        answer.unwrap_or_else(silence).map_err(|it| it.while_doing(doing, key, shown(&self.shared.settings.hosts)))
    }
}

impl LeaseStore for ZooKeeperStore {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let (answering, answered) = oneshot::channel();
        self.shared.runtime.spawn(self.shared.clone().acquire(claim.clone(), answering));
        let answer = timeout(ANSWER, answered).await;
        let answer = answer.map(|it| it.unwrap_or_else(|_| Err(closed()))).ok();
        self.answer("acquiring lease", Some(&claim.key), answer)
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        self.call("looking at lease", Some(key), self.connected(), self.shared.clone().look(key.clone())).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let key = renewals.first().map(|it| &it.key);
        self.call("renewing leases", key, ready(()), self.shared.clone().renew(renewals.to_vec())).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let release = self.shared.clone().release(key.clone(), token, min_hold);
        self.call("releasing lease", Some(key), self.releasable(token), release).await
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let release = |it: &Release| self.shared.clone().release(it.key.clone(), it.token, it.min_hold);
        let answers = async {
            for it in releases {
                self.releasable(it.token).await;
            }
            let releasing: Vec<_> = releases.iter().map(|it| self.shared.runtime.spawn(release(it))).collect();
            let mut answers = Vec::with_capacity(releasing.len());
            for release in releasing {
                answers.push(release.await.unwrap_or_else(|_| Err(closed()))?);
            }
            Ok(answers)
        };
        let key = releases.first().map(|it| &it.key);
        self.answer("releasing leases", key, timeout(ANSWER, answers).await.ok())
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        self.call("listing leases", None, self.connected(), self.shared.clone().list(prefix.to_owned(), limit as usize))
            .await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.call("sweeping leases", None, self.connected(), self.shared.clone().sweep(retention, limit.into())).await
    }

    async fn unanswered(&self) -> Option<Error> {
        let connected = || Failure::Silence("a server keeps the connection, and does not answer in time".to_owned());
        let failure = self.shared.silence_reason().unwrap_or_else(connected);
        Some(failure.while_doing("reaching ZooKeeper", None, shown(&self.shared.settings.hosts)))
    }

    async fn lease_freed(&self, key: &Key) {
        let watching = self.shared.runtime.spawn(self.shared.clone().freed(key.clone()));
        let _watch = Task::of(&watching);
        if watching.await.is_err() {
            // The store is being closed.
            std::future::pending::<()>().await;
        }
    }

    fn profile(&self) -> Profile {
        let mut profile = Profile::default();
        (profile.least_ttl, profile.queues, profile.fence_domain) = (LEAST_TTL, true, "zookeeper");
        profile
    }
}

fn closed() -> Failure {
    Failure::Silence("the store is closed".to_owned())
}

#[cfg(test)]
mod tests {
    use lockkit::Fault;
    use tokio::runtime::Handle;

    use super::*;
    use crate::faults::{inside, own_root};

    /// A store without a session, on the runtime of the test.
    async fn store() -> ZooKeeperStore {
        let (open, _) = oneshot::channel();
        ZooKeeperStore::new(inside(&own_root()).await, open)
    }

    #[tokio::test]
    async fn a_call_without_a_session_leaves_no_task_behind() {
        let store = store().await;
        let session = store.shared.current().expect("a session");
        store.shared.end_session();
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let (before, key, moment) = (tasks(), Key::from("k"), Duration::from_millis(20));
        timeout(moment, store.lease_look(&key)).await.expect_err("it waits for a session");
        assert_eq!(tasks(), before);
        let another = Token::random();
        timeout(moment, store.lease_release(&key, another, Duration::ZERO)).await.expect_err("it waits for a session");
        assert_eq!(tasks(), before);
        drop(session);
    }

    #[tokio::test]
    async fn why_no_answer_came_is_known_with_a_session_and_without() {
        let store = store().await;
        for _ in 0..2 {
            let known = store.unanswered().await;
            assert!(matches!(known, Some(Error::Database { fault: Fault::Unavailable, .. })), "{known:?}");
            store.shared.end_session();
        }
    }
}
