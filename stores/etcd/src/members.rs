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

#[cfg(test)]
pub(crate) mod tests {
    use lockkit_store_servers::{etcd::Etcd as Server, free_port};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        time::advance,
    };
    use tonic::{Code, Status};

    use super::*;

    const INSTANT: Duration = Duration::from_millis(1);

    /// Members whose clients connect to nothing before they are used.
    fn members(number: usize) -> Members {
        at(vec!["http://127.0.0.1:1".to_owned(); number])
    }

    fn at(endpoints: Vec<String>) -> Members {
        Members::new(Source::Endpoints(endpoints, Box::default()))
    }

    fn passing() -> Etcd {
        Etcd::WatchError("it may pass".to_owned())
    }

    /// Calls with an answer for each attempt, from when it begins. Returns what was called: the member and the time in
    /// milliseconds.
    async fn attempts<Fut>(
        members: &Members,
        answer: impl Fn(usize) -> Fut,
    ) -> (Vec<(usize, u128)>, Result<((), bool), Failure>)
    where
        Fut: Future<Output = Result<(), Etcd>>,
    {
        let (begun, made) = (Instant::now(), Mutex::new(Vec::new()));
        let answer = members
            .call_counted(|_| {
                let mut made = made.lock().expect("no panic");
                made.push((members.at(), begun.elapsed().as_millis()));
                answer(made.len())
            })
            .await;
        (made.into_inner().expect("no panic"), answer)
    }

    #[tokio::test(start_paused = true)]
    async fn silent_members_are_asked_in_turn_and_longer_in_each_round() {
        let begun = Instant::now();
        let (made, answer) = attempts(&members(2), |_| pending()).await;
        assert_eq!(made, [(0, 0), (1, 1000), (0, 2050), (1, 4050)]);
        assert!(matches!(answer, Err(Failure::Silent(_))), "{answer:?}");
        assert_eq!(begun.elapsed(), PATIENCE);
        // The only one has all the time.
        let (made, _) = attempts(&members(1), |_| pending()).await;
        assert_eq!(made, [(0, 0)]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_pauses_between_failures_double_up_to_half_a_second() {
        let (made, answer) = attempts(&members(1), |_| async { Err(passing()) }).await;
        let times: Vec<_> = made.iter().map(|(_, time)| *time).collect();
        assert_eq!(times[..5], [0, 50, 150, 350, 750]);
        assert_eq!(times[5..], [1250, 1750, 2250, 2750, 3250, 3750, 4250, 4750]);
        assert!(matches!(answer, Err(Failure::Silent(_))), "{answer:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_the_only_one_if_no_attempt_failed_before() {
        for failures in [0, 1, 2] {
            let fails = |attempt| attempt <= failures;
            let (made, answer) =
                attempts(&members(2), async |it| if fails(it) { Err(passing()) } else { Ok(()) }).await;
            assert_eq!(made.len(), failures + 1);
            assert_eq!(answer.expect("an answer").1, failures == 0);
            let final_one = || Etcd::InvalidArgs("it does not pass".to_owned());
            let refusal = async |it| Err(if fails(it) { passing() } else { final_one() });
            let (_, refused) = attempts(&members(2), refusal).await;
            assert!(matches!(refused, Err(Failure::Refused { only, .. }) if only == (failures == 0)), "{refused:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_with_an_old_token_is_sent_again() {
        let old = || Etcd::GRpcStatus(Status::new(Code::InvalidArgument, "etcdserver: revision of auth store is old"));
        let (_, answer) = attempts(&members(1), async |it| if it == 1 { Err(old()) } else { Ok(()) }).await;
        assert!(!answer.expect("the second is answered").1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_left_if_it_fails_and_not_if_it_is_slow() {
        let members = members(2);
        let (made, _) = attempts(&members, async |_| {
            sleep(SLOW * 2).await;
            Ok(())
        })
        .await;
        assert_eq!((made, members.at()), (vec![(0, 0)], 0));
        let (made, _) = attempts(&members, async |it| if it == 1 { Err(passing()) } else { Ok(()) }).await;
        assert_eq!((made, members.at()), (vec![(0, 0), (1, 0)], 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_left_by_a_call_that_is_dropped_after_a_while() {
        let members = members(2);
        for (after, settles, next) in [(SLOW.saturating_sub(INSTANT), false, 0), (SLOW, true, 0), (SLOW, false, 1)] {
            let attempt = members.attempt();
            advance(after).await;
            if settles {
                attempt.settle();
            } else {
                drop(attempt);
            }
            assert_eq!(members.at(), next, "after {after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_told_for_as_long_as_two_calls_last() {
        let members = members(1);
        assert_eq!(members.last_failure(), None);
        let (_, answer) = attempts(&members, async |it| if it == 1 { Err(passing()) } else { Ok(()) }).await;
        answer.expect("the second is answered");
        let told = members.last_failure();
        assert!(told.is_some_and(|it| it.contains("it may pass")));
        advance((PATIENCE * 2).saturating_sub(PAUSE + INSTANT)).await;
        assert!(members.last_failure().is_some());
        advance(INSTANT).await;
        assert_eq!(members.last_failure(), None);
    }

    #[tokio::test]
    async fn a_connection_is_of_one_member_on_one_runtime() {
        let [here, there] = [(); 2].map(|()| members(2));
        let first = here.connection();
        assert_ne!(first, there.connection());
        here.leave(0);
        assert_ne!(first, here.connection());
        here.leave(1);
        assert_eq!(first, here.connection());
    }

    #[tokio::test]
    async fn the_versions_are_those_of_the_members_that_answer() {
        let server = Server::alone();
        let silent = format!("http://127.0.0.1:{}", free_port());
        let members = at([server.endpoints(), vec![silent]].concat());
        let client = members.current().await.expect("a client");
        let status = client.maintenance_client().status().await.expect("it answers");
        assert_eq!(members.versions().await, [Some(status.version().to_owned())]);
    }

    #[tokio::test]
    async fn a_member_that_refuses_to_tell_its_version_is_one_of_those_that_answer() {
        let members = at(vec![refusing(Code::PermissionDenied).await, refusing(Code::Unavailable).await]);
        assert_eq!(members.versions().await, [None]);
    }

    /// The address of a server that answers each request with this code, in the least of HTTP/2 that it takes.
    pub(crate) async fn refusing(code: Code) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let (settings, acknowledged) = ([0, 0, 0, 4, 0, 0, 0, 0, 0], [0, 0, 0, 4, 1, 0, 0, 0, 0]);
            // `:status: 200`, `content-type: application/grpc`, `grpc-status: <code>`
            let mut fields = b"\x88\x0f\x10\x10application/grpc\x00\x0bgrpc-status".to_vec();
            let code = (code as i32).to_string();
            fields.push(u8::try_from(code.len()).expect("short"));
            fields.extend(code.bytes());
            stream.read_exact(&mut [0; 24]).await.expect("the greeting of the client");
            stream.write_all(&settings).await.expect("it reads");
            let mut head = [0; 9];
            // Until the client closes the connection.
            while stream.read_exact(&mut head).await.is_ok() {
                let mut body = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                stream.read_exact(&mut body).await.expect("the rest of a frame");
                let answer = match head[3] {
                    1 => {
                        // The whole answer to this stream.
                        let start = [0, 0, u8::try_from(fields.len()).expect("short"), 1, 5];
                        [&start, &head[5..], &fields].concat()
                    }
                    4 if head[4] == 0 => acknowledged.to_vec(),
                    _ => continue,
                };
                stream.write_all(&answer).await.expect("it reads");
            }
        });
        format!("http://{address}")
    }
}
