//! The session with ZooKeeper, on a thread of its own. Opens another one when a session has ended.

use std::{
    fmt,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{oneshot, watch},
    time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout},
};
use zookeeper_client::{Acls, Client, Connector, CreateMode, Error as Zk, MultiWriteError, SessionState};

use crate::{
    builder::shown,
    claims::Claims,
    error::{ConnectError, Failure, Unfit},
    key::escape,
    layout::Layout,
    pulse::Pulse,
    remove::Stray,
    watch::Room,
};

/// The target of all events, as that of lockkit.
pub(crate) const TARGET: &str = "lockkit";

/// Pause after a session could not be opened.
const PAUSE: Duration = Duration::from_millis(250);

/// How long the thread waits for the servers to confirm that the session is closed.
const CLOSING: Duration = Duration::from_secs(2);

/// What a session is opened with, and how nodes are named.
pub(crate) struct Settings {
    pub(crate) hosts: String,
    pub(crate) root: String,
    pub(crate) session_timeout: Duration,
    pub(crate) layout: Layout,
    pub(crate) connector: Connector,
    pub(crate) acls: Acls<'static>,
}

/// All that the clones of a store have in common.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    /// The runtime of the session's thread. All requests run there, so that dropping a call never drops a request.
    pub(crate) runtime: Handle,
    session: watch::Sender<Option<Arc<Session>>>,
    claims: Mutex<Claims>,
    pub(crate) strays: Mutex<Vec<Stray>>,
}

/// One session.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) number: u64,
    /// How long a process may trust in the session after the start of a request that a write confirmed.
    pub(crate) trusted: Duration,
    /// The longest silence on a connection.
    silence: Duration,
    pulse: Mutex<Pulse>,
    /// Room for watches.
    pub(crate) watches: Room,
}

impl Settings {
    /// The longest silence on a connection. Another server is tried after it, with most of the session timeout left.
    fn silence(&self) -> Duration {
        self.session_timeout / 3
    }

    async fn open(&self, number: u64) -> Result<Arc<Session>, Zk> {
        let connector = self.connector.clone().with_session_timeout(self.session_timeout);
        let opening = connector.with_connection_timeout(self.silence()).connect(&self.hosts);
        // The client's own limit is the session timeout.
        let mut opening = pin!(timeout(self.session_timeout * 2, opening));
        let (mut last, mut beats) = (Instant::now(), beats(self.silence()));
        let client = loop {
            tokio::select! {
                biased;
                client = &mut opening => break client.map_err(|_| Zk::Timeout)??,
                // A stop meanwhile may be after the session has begun.
                _ = beats.tick() => {
                    let now = Instant::now();
                    if now - last <= Pulse::longest(self.silence()) {
                        last = now;
                    }
                }
            }
        };
        let session = client.session_timeout();
        let silence = silence_of_client(session, self.silence());
        let (trusted, pulse) = (trusted(session, silence), Mutex::new(Pulse::new(last, session, silence)));
        Ok(Arc::new(Session { client, number, trusted, silence, pulse, watches: Room::default() }))
    }
}

/// Ticks as often as the client does, so that a stop is noticed.
fn beats(silence: Duration) -> Interval {
    let mut beats = interval((silence / 8).max(Duration::from_millis(1)));
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}

/// The longest silence as the client counts: two fifths of the session timeout if the silence set here is too long.
fn silence_of_client(session: Duration, silence: Duration) -> Duration {
    if silence > session * 3 / 5 { session * 2 / 5 } else { silence }
}

/// How long a session lives at least after a sign of life, as this process counts.
///
/// A follower reports to the leader every half tick which sessions have given a sign of life, and a session timeout
/// is two ticks at least with the servers' defaults: a quarter of the session timeout. If the follower dies before
/// its next report, the leader knows only of an earlier sign of life. A server that hangs before it reads the next one
/// is left after the longest silence, which the client checks eight times in that time: nine eighths of it.
///
/// [`Pulse`] sees to it that the process does give signs of life.
fn trusted(session: Duration, silence: Duration) -> Duration {
    let gap = silence * 9 / 8;
    session.saturating_sub(session / 4).saturating_sub(gap)
}

impl Shared {
    /// The current session. Waits until there is one.
    pub(crate) async fn session(&self) -> Arc<Session> {
        let mut sessions = self.session.subscribe();
        let session = sessions.wait_for(Option::is_some).await.ok().and_then(|it| it.clone());
        match session {
            Some(session) => session,
            // Cannot happen: `self` owns the sender.
            None => std::future::pending().await,
        }
    }

    /// The current session, if there is one.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        self.session.borrow().clone()
    }

    /// The session with this number, if it has not ended.
    pub(crate) fn session_of(&self, number: u64) -> Option<Arc<Session>> {
        self.current().filter(|it| it.number == number)
    }

    /// The path of the node of this key.
    pub(crate) fn dir(&self, key: &str) -> String {
        format!("{}/{}", self.settings.root, escape(key))
    }

    pub(crate) fn claims(&self) -> MutexGuard<'_, Claims> {
        lock(&self.claims)
    }

    /// Ends everything that belonged to the session.
    pub(crate) fn end_session(&self) {
        let Some(session) = self.session.send_replace(None) else { return };
        let ended = self.claims().end_all(session.trusted);
        lock(&self.strays).extend(ended);
    }

    async fn open(self: &Arc<Self>, number: u64) {
        let hosts = shown(&self.settings.hosts);
        let mut warned = false;
        loop {
            match self.settings.open(number).await {
                Ok(session) => {
                    if warned {
                        tracing::info!(target: TARGET, hosts, "ZooKeeper is reached again");
                    }
                    self.session.send_replace(Some(session));
                    self.remove_strays();
                    return;
                }
                Err(err) => {
                    if !std::mem::replace(&mut warned, true) {
                        let error = &err as &dyn std::error::Error;
                        tracing::warn!(target: TARGET, hosts, error, "no session with ZooKeeper");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Why no answer may have come, if that is known.
    pub(crate) fn silence_reason(&self) -> Option<Failure> {
        let reason = match self.current() {
            None => "the session has ended, and no new one could be opened so far".to_owned(),
            Some(session) => match session.client.state() {
                SessionState::SyncConnected => return None,
                state => format!("the session is {state}"),
            },
        };
        Some(Failure::Silence(reason))
    }
}

impl Session {
    pub(crate) fn pulse(&self) -> MutexGuard<'_, Pulse> {
        lock(&self.pulse)
    }

    /// Writes something that changes nothing. An answer proves that the session was alive when this was called: the
    /// leader had a quorum then, and this session was not expired. Reads sent after it see all that was written
    /// before.
    pub(crate) fn prove(&self, root: &str) -> impl Future<Output = Result<(), Zk>> + Send + use<'_> {
        let mut writer = self.client.new_multi_writer();
        let added = writer.add_check_version(root, -1);
        let commit = writer.commit();
        async move {
            added?;
            proven(commit.await.map(drop))
        }
    }
}

/// Whether the answer to the check of the root's version proves the session.
fn proven(answer: Result<(), MultiWriteError>) -> Result<(), Zk> {
    match answer {
        // Refused after the leader had found the session alive, for example because the root was deleted.
        Ok(()) | Err(MultiWriteError::OperationFailed { source: Zk::NoNode | Zk::NoAuth | Zk::BadVersion, .. }) => {
            Ok(())
        }
        // The leader reports the expiry of a session as the failure of an operation, too.
        Err(MultiWriteError::OperationFailed { source, .. } | MultiWriteError::RequestFailed { source }) => Err(source),
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let session = self.current().map(|it| it.client.session_id());
        f.debug_struct("Shared").field("root", &self.settings.root).field("session", &session).finish_non_exhaustive()
    }
}

/// The body of the session's thread. It ends when the last clone of the store is dropped.
pub(crate) fn drive(
    settings: Settings,
    opened: oneshot::Sender<Result<Arc<Shared>, ConnectError>>,
    closing: oneshot::Receiver<()>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime,
        Err(source) => return drop(opened.send(Err(ConnectError::NoThread { source }))),
    };
    runtime.block_on(async {
        match open_first(settings).await {
            Ok(shared) => {
                if opened.send(Ok(shared.clone())).is_ok() {
                    serve(&shared, closing).await;
                }
                close(shared).await;
            }
            Err(err) => drop(opened.send(Err(err))),
        }
    });
}

pub(crate) async fn open_first(settings: Settings) -> Result<Arc<Shared>, ConnectError> {
    let Settings { hosts, root, acls, .. } = &settings;
    let unreachable = |err: Zk| ConnectError::Unreachable { servers: shown(hosts).to_owned(), source: err.into() };
    let session = settings.open(0).await.map_err(unreachable)?;
    // Creating a node that exists is refused without the right to create it.
    let there = session.client.check_stat(root).await;
    if !matches!(there, Ok(Some(_)))
        && let Err(source) = session.client.mkdir(root, &CreateMode::Persistent.with_acls(*acls)).await
    {
        return Err(Unfit::Root { root: root.clone(), source }.into());
    }
    Ok(Arc::new(Shared {
        settings,
        runtime: Handle::current(),
        session: watch::Sender::new(Some(session)),
        claims: Mutex::default(),
        strays: Mutex::default(),
    }))
}

/// Opens another session whenever one ends.
async fn serve(shared: &Arc<Shared>, mut closing: oneshot::Receiver<()>) {
    for number in 1.. {
        let Some(session) = shared.current() else { return };
        let state = tokio::select! {
            state = ends(&session) => state,
            _ = &mut closing => return,
        };
        drop(session);
        let hosts = shown(&shared.settings.hosts);
        tracing::warn!(target: TARGET, hosts, %state, "the session with ZooKeeper has ended");
        shared.end_session();
        tokio::select! {
            () = shared.open(number) => {}
            _ = &mut closing => return,
        }
    }
}

/// Waits until the session ends, and notes meanwhile that this thread runs.
async fn ends(session: &Session) -> SessionState {
    let mut states = session.client.state_watcher();
    let mut beats = beats(session.silence);
    let mut state = states.state();
    let mut left = None;
    while !state.is_terminated() {
        state = tokio::select! {
            state = states.changed() => state,
            _ = beats.tick() => states.state(),
        };
        let now = Instant::now();
        let mut pulse = session.pulse();
        pulse.beat(now);
        if state == SessionState::SyncConnected {
            left.take().into_iter().for_each(|since| pulse.reconnected(since));
        } else {
            left.get_or_insert(now);
        }
    }
    state
}

/// Closes the session, so that ZooKeeper frees what is left at once.
async fn close(shared: Arc<Shared>) {
    let Some(session) = shared.session.send_replace(None) else { return };
    shared.claims().end_all(Duration::ZERO);
    let mut states = session.client.state_watcher();
    drop((session, shared));
    let closed = async { while !states.changed().await.is_terminated() {} };
    // Otherwise the session times out.
    drop(timeout(CLOSING, closed).await);
}

/// The store and the session with this number, if neither has ended.
pub(crate) fn in_session(shared: &Weak<Shared>, number: u64) -> Option<(Arc<Shared>, Arc<Session>)> {
    let shared = shared.upgrade()?;
    let session = shared.session_of(number)?;
    Some((shared, session))
}

/// Ignores poisoning: no code panics while it holds one of these locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use lockkit::{
        Error, Fault, LeaseStore,
        store::{Acquired, Claim, Token},
    };
    use lockkit_store_servers::zookeeper::ZooKeeper;

    use super::*;
    use crate::{
        ZooKeeperStore,
        faults::{Outcome, Request, SESSION, inside, inside_behind_proxy, is_deleted, own_root, session},
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_check_that_an_expired_session_sent_proves_nothing() {
        let refused = |source| proven(Err(MultiWriteError::OperationFailed { index: 0, source }));
        for ordered in [Zk::NoNode, Zk::NoAuth] {
            assert!(refused(ordered).is_ok());
        }
        for unproven in [Zk::SessionExpired, Zk::SessionMoved, Zk::ConnectionLoss] {
            assert!(refused(unproven).is_err());
        }
    }

    #[test]
    fn trust_leaves_room_for_a_report_that_was_lost() {
        let seconds = Duration::from_secs;
        assert_eq!(trusted(seconds(24), seconds(8)), seconds(9));
        // The server has cut the session timeout, so the client uses its own silence.
        assert_eq!(silence_of_client(seconds(20), seconds(20)), seconds(8));
        assert_eq!(trusted(seconds(20), seconds(8)), seconds(6));
        assert_eq!(silence_of_client(seconds(24), seconds(8)), seconds(8));
        // The client's own limit for the one that is set.
        assert_eq!(silence_of_client(seconds(20), seconds(12)), seconds(12));
        // The server has raised it.
        assert!(trusted(seconds(4), Duration::from_millis(300)) > Duration::from_millis(2600));
    }

    #[tokio::test]
    async fn a_process_that_was_stopped_is_granted_nothing_until_the_leader_knows_that_it_lives() {
        let server = ZooKeeper::alone();
        let store =
            ZooKeeperStore::builder(server.host()).session_timeout(SECOND * 4).connect().await.expect("a session");
        // Shorter than the silence after which the client would leave its connection.
        let stop = store.session_timeout().expect("a session") * 3 / 10;
        let (began, begins) = oneshot::channel();
        store.runtime().spawn(async move {
            began.send(()).expect("the test waits");
            std::thread::sleep(stop);
        });
        begins.await.expect("the thread runs");
        let claim = Claim::new("k", Token::random(), "stopped", SECOND * 10);
        let refused = store.lease_acquire(&claim).await;
        assert!(matches!(refused, Err(Error::Database { fault: Fault::Unavailable, .. })), "{refused:?}");
        while !matches!(store.lease_acquire(&claim).await, Ok(Acquired::Granted(_))) {
            sleep(SECOND / 10).await;
        }
    }

    #[tokio::test]
    async fn a_connection_is_left_after_a_third_of_the_session_timeout() {
        let shared = inside(&own_root()).await;
        assert_eq!(shared.settings.silence(), SESSION / 3);
        assert_eq!(session(&shared).silence, SESSION / 3);
    }

    #[tokio::test]
    async fn the_reason_of_a_silence_is_known_if_there_is_no_session() {
        let shared = inside(&own_root()).await;
        assert!(shared.silence_reason().is_none());
        let ended = session(&shared);
        shared.end_session();
        assert!(shared.silence_reason().is_some());
        drop(ended);
    }

    #[tokio::test]
    async fn a_stop_counts_no_longer_when_the_session_has_another_connection() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let session = session(&shared);
        let watching = tokio::spawn({
            let session = session.clone();
            async move { ends(&session).await }
        });
        // Until it has seen that there is a connection.
        sleep(SECOND / 10).await;
        let now = Instant::now();
        let before = now.checked_sub(SECOND * 60).expect("the machine has run for longer");
        let mut stopped = Pulse::new(before, SECOND * 4000, SECOND * 80);
        assert!(stopped.stopped(now).is_some());
        *session.pulse() = stopped;
        proxy.plan(&[(Request::Exists, Outcome::Lost)]);
        session.client.check_stat("/").await.expect_err("the connection breaks");
        while session.pulse().stopped(Instant::now()).is_some() {
            sleep(SECOND / 10).await;
        }
        watching.abort();
    }

    #[tokio::test]
    async fn a_session_ends_with_its_store() {
        let (root, other) = (own_root(), inside(&own_root()).await);
        let builder = ZooKeeperStore::builder(ZooKeeper::shared()).root(&root).session_timeout(SESSION);
        let store = builder.connect().await.expect("a session");
        let claim = Claim::new("k", Token::random(), "closed", SESSION);
        let granted = store.lease_acquire(&claim).await;
        assert!(matches!(granted, Ok(Acquired::Granted(_))), "{granted:?}");
        let children = session(&other).client.list_children(&store.path("k")).await.expect("the children");
        let child = format!("{}/{}", store.path("k"), children[0]);
        drop(store);
        is_deleted(&other, &child).await;
    }
}
