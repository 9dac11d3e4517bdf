//! The members of the cluster, one client for each: which one is queried, and what happens when it does not answer.

use std::{
    future::{Future, pending},
    io::{self, ErrorKind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, Error as Etcd};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep, timeout},
};

use crate::error::{Failure, code, has_old_token, refused};

/// Time limit of a call: for all attempts together.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Time limit of the first attempts, if there is another member.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);

/// Pause after all members were queried without success. Doubles, up to ten times as long.
const PAUSE: Duration = Duration::from_millis(50);

/// A call that is dropped after this time counts as not answered by its member.
const SLOW: Duration = Duration::from_millis(200);

/// Where clients come from.
#[derive(Clone)]
pub(crate) enum Source {
    Endpoints(Vec<String>, Box<ConnectOptions>),
    Client(Arc<Client>),
}

/// One client for each member. They live on the runtime on which they were made.
pub(crate) struct Members {
    source: Source,
    /// Tells these clients from those of another runtime.
    id: u64,
    clients: Vec<OnceCell<Arc<Client>>>,
    /// The member that is queried. It changes when a call fails.
    at: AtomicUsize,
    ended: Arc<AtomicBool>,
    last_failure: Mutex<Option<(Instant, String)>>,
}

impl Members {
    /// Must be called on a Tokio runtime.
    pub(crate) fn new(source: Source) -> Self {
        let number = match &source {
            Source::Endpoints(endpoints, _) => endpoints.len(),
            Source::Client(_) => 1,
        };
        let ended = Arc::new(AtomicBool::new(false));
        // Its task is dropped when the runtime ends, and with it the connections of the clients.
        let sentinel = Sentinel(ended.clone());
        tokio::spawn(async move {
            let _sentinel = sentinel;
            pending::<()>().await;
        });
        Self {
            source,
            id: fastrand::u64(..),
            clients: (0..number).map(|_| OnceCell::new()).collect(),
            at: AtomicUsize::new(0),
            ended,
            last_failure: Mutex::default(),
        }
    }

    /// Whether the runtime of the clients has ended.
    pub(crate) fn have_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The connection over which the next request goes.
    pub(crate) fn connection(&self) -> (u64, usize) {
        (self.id, self.at())
    }

    /// The member that is queried now.
    pub(crate) fn at(&self) -> usize {
        self.at.load(Ordering::Relaxed)
    }

    /// Why an attempt failed in the last seconds.
    pub(crate) fn last_failure(&self) -> Option<String> {
        let last = self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.filter(|(at, _)| at.elapsed() < PATIENCE * 2).map(|(_, why)| why)
    }

    /// Sends a request until a member answers, for at most [`PATIENCE`]. A request may be executed more than once.
    pub(crate) async fn call<T, Fut>(&self, request: impl Fn(Arc<Client>) -> Fut) -> Result<T, Failure>
    where
        Fut: Future<Output = Result<T, Etcd>>,
    {
        self.call_counted(request).await.map(|(answer, _)| answer)
    }

    /// As [`call`](Self::call). Also returns whether this is the answer to the only attempt, so that no other one can
    /// be executed later.
    pub(crate) async fn call_counted<T, Fut>(&self, request: impl Fn(Arc<Client>) -> Fut) -> Result<(T, bool), Failure>
    where
        Fut: Future<Output = Result<T, Etcd>>,
    {
        let (started, members) = (Instant::now(), self.clients.len());
        let (mut attempts, mut pause) = (0_usize, PAUSE);
        loop {
            let left = PATIENCE.saturating_sub(started.elapsed());
            let round = u32::try_from(attempts / members).unwrap_or(u32::MAX).min(3);
            let limit = if members == 1 { left } else { (FIRST_ATTEMPT * (1 << round)).min(left) };
            let attempt = self.attempt();
            let answer = timeout(limit, async { request(self.client(attempt.at).await?).await }).await;
            let failure = match answer {
                Ok(Ok(answer)) => {
                    attempt.settle();
                    return Ok((answer, attempts == 0));
                }
                Ok(Err(err)) if has_old_token(&err) => {
                    if let Ok(client) = self.client(attempt.at).await {
                        // If it fails, so does the next attempt.
                        drop(timeout(limit, client.refresh_token()).await);
                    }
                    err.to_string()
                }
                Ok(Err(err)) => match refused(err, attempts == 0) {
                    Ok(refused) => {
                        attempt.settle();
                        return Err(refused);
                    }
                    Err(err) => err.to_string(),
                },
                Err(_) => format!("no answer within {limit:?}"),
            };
            attempt.fail(&failure);
            attempts += 1;
            if started.elapsed() + pause >= PATIENCE {
                return Err(Failure::Silent(io::Error::new(ErrorKind::TimedOut, failure)));
            }
            if attempts.is_multiple_of(members) {
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE * 10);
            }
        }
    }

    /// The versions of the members that answer. `None` for one that refuses this user: only versions newer than
    /// the fix of [`lost`](crate::lost) require the role `root`.
    pub(crate) async fn versions(&self) -> Vec<Option<String>> {
        let mut versions = Vec::new();
        for at in 0..self.clients.len() {
            let status = async { self.client(at).await?.maintenance_client().status().await };
            match timeout(FIRST_ATTEMPT, status).await {
                Ok(Ok(status)) => versions.push(Some(status.version().to_owned())),
                Ok(Err(Etcd::GRpcStatus(status))) if status.code() as i32 == code::PERMISSION_DENIED => {
                    versions.push(None);
                }
                _ => {}
            }
        }
        versions
    }

    /// The client of the member that is queried now.
    pub(crate) async fn current(&self) -> Result<Arc<Client>, Etcd> {
        self.client(self.at()).await
    }

    /// Queries another member from now on.
    pub(crate) fn leave(&self, at: usize) {
        let next = (at + 1) % self.clients.len();
        let _ = self.at.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(crate) fn attempt(&self) -> Attempt<'_> {
        Attempt { members: self, at: self.at(), begun: Instant::now(), settled: false }
    }

    async fn client(&self, at: usize) -> Result<Arc<Client>, Etcd> {
        let connect = async || match &self.source {
            Source::Client(client) => Ok(client.clone()),
            Source::Endpoints(endpoints, options) => {
                Client::connect([&endpoints[at]], Some(ConnectOptions::clone(options))).await.map(Arc::new)
            }
        };
        self.clients[at].get_or_try_init(connect).await.cloned()
    }
}

/// One attempt at one member. If it fails, or is dropped after [`SLOW`], another member is queried next.
pub(crate) struct Attempt<'m> {
    members: &'m Members,
    pub(crate) at: usize,
    begun: Instant,
    settled: bool,
}

impl Attempt<'_> {
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }

    fn fail(mut self, why: &str) {
        self.settled = true;
        *self.members.last_failure.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), why.to_owned()));
        self.members.leave(self.at);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.settled && self.begun.elapsed() >= SLOW {
            self.members.leave(self.at);
        }
    }
}

struct Sentinel(Arc<AtomicBool>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
