//! One etcd lease that keeps keys of this process, and how long it is known to live.
//!
//! # What a keep-alive proves
//!
//! A keep-alive message does not pass through Raft. A leader that has been replaced and does not know it yet answers
//! it too, while the new leader counts from its own election. So the answer to a keep-alive is only believed together
//! with a later answer to a linearizable request, and only if the headers of both have the same Raft term: then the
//! leader that extended the lease was still the leader after it had done so. A leader that is elected later starts
//! all leases again with their full ttl.
//!
//! # What a marker is for
//!
//! A request that was given up may still reach a member that was stopped, at any later time. To keep such a request
//! from creating a key that no process knows of, each creation of a key compares the revision of a *marker* key, one
//! for each session. A call that gives up on a creation writes the marker.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use etcd_client::{Client, Error as Etcd, GetOptions, LeaseKeepAliveStream, LeaseKeeper};
use tokio::{
    sync::Mutex as FairMutex,
    time::{Instant, timeout},
};

use crate::{error::Failure, layout, members::Members};

/// Time limit of the answer to a message on a stream that is open already.
const ANSWER: Duration = Duration::from_secs(1);

/// How often a keep-alive is repeated if the leader changes meanwhile.
const ROUNDS: usize = 4;

/// An etcd lease of this process.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: i64,
    /// The ttl that the server has granted.
    pub(crate) ttl: Duration,
    /// The key that fences late requests.
    pub(crate) marker: String,
    /// The revision of the marker, 0 if it does not exist.
    revision: AtomicI64,
    known: Mutex<Known>,
    open: FairMutex<Open>,
    ended: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    /// Until when the lease is known to live.
    until: Instant,
    /// The last keep-alive that was answered.
    kept: Option<Kept>,
    /// When the lease was last wanted.
    used: Instant,
    /// When to keep it alive again.
    due: Instant,
}

/// The answer to a keep-alive, which proves nothing by itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    sent: Instant,
    received: Instant,
    term: u64,
    ttl: Duration,
}

/// The open stream, if there is one. A call takes it out while it waits for an answer, so that an answer is never read
/// by a later call.
#[derive(Debug, Default)]
struct Open(Option<Stream>);

#[derive(Debug)]
struct Stream {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    connection: (u64, usize),
}

impl Session {
    /// Requests a lease of whole seconds.
    pub(crate) async fn grant(members: &Members, seconds: i64) -> Result<Self, Failure> {
        let sent = Instant::now();
        let granted = members.call(|client| async move { client.lease_client().grant(seconds, None).await }).await?;
        Ok(Self::new(granted.id(), seconds_of(granted.ttl()), sent))
    }

    pub(crate) fn new(id: i64, ttl: Duration, sent: Instant) -> Self {
        let known = Known { until: sent + ttl, kept: None, used: sent, due: sent + ttl / 5 };
        Self {
            id,
            ttl,
            marker: layout::marker(id),
            revision: AtomicI64::new(0),
            known: Mutex::new(known),
            open: FairMutex::default(),
            ended: AtomicBool::new(false),
        }
    }

    /// Until when the lease is known to live.
    pub(crate) fn until(&self) -> Instant {
        self.known().until
    }

    /// Whether the lease is gone. Its keys are gone with it.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn marker_revision(&self) -> i64 {
        self.revision.load(Ordering::Relaxed)
    }

    pub(crate) fn set_marker_revision(&self, revision: i64) {
        self.revision.store(revision, Ordering::Relaxed);
    }

    /// Notes that the lease is wanted.
    pub(crate) fn touch(&self) {
        self.known().used = Instant::now();
    }

    pub(crate) fn unused_for(&self) -> Duration {
        self.known().used.elapsed()
    }

    /// When to keep the lease alive next.
    pub(crate) fn due(&self) -> Instant {
        self.known().due
    }

    pub(crate) fn set_due(&self, due: Instant) {
        self.known().due = due;
    }

    /// Sends one keep-alive, unless another call has sent one after `since`.
    pub(crate) async fn keep_alive(&self, members: &Members, since: Instant) -> Result<Kept, Failure> {
        let mut slot = self.open.lock().await;
        if let Some(kept) = self.known().kept.filter(|it| it.sent >= since) {
            return Ok(kept);
        }
        let mut open = slot.0.take().filter(|it| it.connection == members.connection());
        if let Some(stream) = &mut open {
            let attempt = members.attempt();
            if let Ok(Ok(kept)) = timeout(ANSWER, stream.keep_alive()).await {
                attempt.settle();
                slot.0 = open;
                return self.note(kept);
            }
        }
        let connection = members.connection();
        let open = |client: Arc<Client>| async move {
            // The client keeps the header of the first answer to itself, so a second message is sent.
            let (keeper, answers) = client.lease_client().keep_alive(self.id).await?;
            let mut stream = Stream { keeper, answers, connection };
            let kept = stream.keep_alive().await?;
            Ok((stream, kept))
        };
        let (stream, kept) = members.call(open).await?;
        slot.0 = Some(stream);
        self.note(kept)
    }

    fn note(&self, kept: Kept) -> Result<Kept, Failure> {
        if kept.ttl.is_zero() {
            return Err(Failure::NoLease);
        }
        self.known().kept = Some(kept);
        Ok(kept)
    }

    /// Believes a keep-alive that was answered before a linearizable request was sent at `sent`, if both answers have
    /// the same term.
    pub(crate) fn prove(&self, kept: Kept, sent: Instant, term: u64) -> bool {
        let is_proof = term != 0 && term == kept.term && kept.received <= sent;
        if is_proof {
            let mut known = self.known();
            known.until = known.until.max(kept.sent + kept.ttl);
        }
        is_proof
    }

    /// Extends the lease to its full ttl from now, and proves it.
    pub(crate) async fn extend(&self, members: &Members) -> Result<(), Failure> {
        let mut since = Instant::now();
        for _ in 0..ROUNDS {
            let kept = self.keep_alive(members, since).await?;
            let sent = Instant::now();
            let read = |client: Arc<Client>| async move {
                client.kv_client().get(&*self.marker, Some(GetOptions::new().with_count_only())).await
            };
            let answer = members.call(read).await?;
            if self.prove(kept, sent, answer.header().map_or(0, etcd_client::ResponseHeader::raft_term)) {
                return Ok(());
            }
            since = Instant::now();
        }
        Err(leader_changes())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cluster elects one leader after the other.
pub(crate) fn leader_changes() -> Failure {
    let what = "the leader of etcd changed during each keep-alive";
    Failure::Silent(std::io::Error::new(std::io::ErrorKind::TimedOut, what))
}

impl Stream {
    async fn keep_alive(&mut self) -> Result<Kept, Etcd> {
        let sent = Instant::now();
        self.keeper.keep_alive().await.map_err(|_| closed())?;
        let answer = self.answers.message().await?.ok_or_else(closed)?;
        let term = answer.header().map_or(0, etcd_client::ResponseHeader::raft_term);
        Ok(Kept { sent, received: Instant::now(), term, ttl: seconds_of(answer.ttl()) })
    }
}

fn closed() -> Etcd {
    Etcd::WatchError("the stream of keep-alives was closed".to_owned())
}

fn seconds_of(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_keep_alive_is_believed_with_a_later_answer_of_the_same_term_only() {
        const TTL: Duration = Duration::from_secs(10);
        let sent = Instant::now();
        let session = Session::new(1, TTL, sent);
        tokio::time::advance(Duration::from_secs(4)).await;
        let kept = Kept { sent: Instant::now(), received: Instant::now() + Duration::from_secs(1), term: 7, ttl: TTL };
        let (early, later) = (Instant::now(), kept.received + Duration::from_secs(1));
        for (read, term) in [(later, 8), (later, 6), (later, 0), (early, 7)] {
            assert!(!session.prove(kept, read, term), "{term}");
            assert_eq!(session.until(), sent + TTL);
        }
        assert!(session.prove(kept, later, 7));
        assert_eq!(session.until(), kept.sent + TTL, "from when it was sent");
        let older = Kept { sent, ..kept };
        assert!(session.prove(older, later, 7));
        assert_eq!(session.until(), kept.sent + TTL, "never shorter");
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_knows_since_when_nobody_wanted_it_and_that_it_has_ended() {
        let session = Session::new(1, Duration::from_secs(10), Instant::now());
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(session.unused_for(), Duration::from_secs(7));
        session.touch();
        assert_eq!(session.unused_for(), Duration::ZERO);
        assert!(!session.has_ended());
        session.end();
        assert!(session.has_ended());
    }
}
