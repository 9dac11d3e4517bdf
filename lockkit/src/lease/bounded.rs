//! Calls to a store, each with a time limit.
//!
//! The network does not report a lost packet, and sqlx waits for an answer as long as its caller does. So the
//! connection of an unanswered call is closed. A lease that an unanswered claim may have taken is released again and
//! again until the store answers or the ttl has passed.

use std::{
    future::Future,
    io::{self, ErrorKind},
    pin::{self, pin},
    time::Duration,
};

use tokio::time::{Instant, timeout};

use crate::{
    body::task::no_answer,
    lease::{
        life::state::Pin,
        store::{
            Acquired, AcquiredAll, Answer, BUSY_PAUSE, Claim, LeaseRecord, LeaseStore, Previous, Profile, Release,
            Renewal,
        },
    },
    mutex::Mutex,
    policy::check_duration,
    value::{
        error::{Error, Fault, Result, chain},
        key::Key,
    },
};

/// Upper bound of the limit of an answer about one lease.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);

/// Lower bound of the limit of an answer, however short the ttl is.
pub(crate) const LEAST: Duration = Duration::from_millis(500);

/// How long a store may take to find out why it did not answer.
const REASON_LIMIT: Duration = Duration::from_millis(1200);

/// Time limit per lease where a store acquires leases one after the other.
const EACH: Duration = Duration::from_millis(100);

/// Time limit of an answer about a lease of this ttl: half of the ttl, between 500 ms and 5 s. A later grant would
/// leave little trust. The limit also bounds how long a call waits for a connection.
pub(crate) fn limit_for(ttl: Duration) -> Duration {
    (ttl / 2).clamp(LEAST, LIMIT)
}

/// Whether the store has refused the statement because of what is in it: the table is missing, or the database cannot
/// store a character of the key. Then nothing was changed.
pub(crate) fn is_refused(err: &Error) -> bool {
    matches!(err, Error::NotMigrated { .. } | Error::InvalidKey { .. })
        || matches!(err, Error::Database { fault: Fault::Encoding, .. })
}

/// Whether the error means that no answer about the lease came, so that another attempt may help.
pub(crate) fn is_silence(err: &Error) -> bool {
    match err {
        // `Contended`: the store has one lock for all of its leases, and another transaction has it.
        Error::PoolStarved { .. } | Error::Database { fault: Fault::Contended, .. } => true,
        Error::Database { fault: Fault::Unavailable, source, .. } => {
            let mut causes = chain(&**source).filter_map(|it| it.downcast_ref::<io::Error>());
            causes.any(|it| it.kind() == ErrorKind::TimedOut)
        }
        _ => false,
    }
}

/// A store whose calls have a time limit.
///
/// A call that reaches its limit is dropped. The store may have executed it all the same, as with any lost answer.
#[derive(Debug)]
pub(crate) struct Bounded<S> {
    store: S,
    received: Mutex<Received>,
}

/// The last answer and the current outage of the store.
#[derive(Debug, Default)]
struct Received {
    last_answer: Option<Instant>,
    /// The start of the first unanswered call since the last answer. `None` if there is no such call.
    silent_since: Option<Instant>,
}

impl<S: LeaseStore> Bounded<S> {
    pub(crate) fn new(store: S) -> Self {
        Self { store, received: Mutex::default() }
    }

    /// The store without time limits.
    pub(crate) fn unbounded(&self) -> &S {
        &self.store
    }

    pub(crate) fn profile(&self) -> Profile {
        self.store.profile()
    }

    /// How long the store has not answered. `None` if it answered its last call, or if there was no call.
    pub(crate) fn unreachable_for(&self) -> Option<Duration> {
        self.received.lock().silent_since.map(|it| it.elapsed())
    }

    fn answered(&self) {
        *self.received.lock() = Received { last_answer: Some(Instant::now()), silent_since: None };
    }

    /// Records that a call made at `asked` got no answer.
    fn unanswered(&self, asked: Instant) {
        let mut received = self.received.lock();
        if received.last_answer.is_none_or(|it| it < asked) {
            received.silent_since.get_or_insert(asked);
        }
    }

    /// Returns `None` if no answer came.
    pub(crate) async fn acquire(&self, claim: &Claim) -> Result<Option<Acquired>> {
        self.answer(limit_for(claim.ttl), pin!(self.store.lease_acquire(claim))).await.transpose()
    }

    /// Returns `None` if no answer came. The limit grows with the number of claims, because a store may take one lease
    /// after the other.
    pub(crate) async fn acquire_all(&self, claims: &[Claim]) -> Result<Option<AcquiredAll>> {
        let each = EACH * u32::try_from(claims.len()).unwrap_or(u32::MAX);
        let limit = claims.first().map_or(LIMIT, |it| limit_for(it.ttl)).max(each);
        self.answer(limit, pin!(self.store.lease_acquire_all(claims))).await.transpose()
    }

    /// Returns `None` if no answer came before the first limit of these claims.
    pub(crate) async fn acquire_each(&self, claims: &[Claim]) -> Result<Option<Vec<Option<Acquired>>>> {
        let limit = claims.iter().map(|it| limit_for(it.ttl)).min().unwrap_or(LIMIT);
        self.answer(limit, pin!(self.store.lease_acquire_each(claims))).await.transpose()
    }

    pub(crate) async fn look(&self, key: &Key, limit: Duration) -> Result<Option<LeaseRecord>> {
        let answer = self.answer(limit, pin!(self.store.lease_look(key))).await;
        self.or_silence("looking at lease", Some(key), answer).await
    }

    pub(crate) async fn renew(&self, renewals: &[Renewal], limit: Duration) -> Result<Vec<Answer>> {
        let answer = self.answer(limit, pin!(self.store.lease_renew(renewals))).await;
        self.or_silence("renewing leases", renewals.first().map(|it| &it.key), answer).await
    }

    pub(crate) async fn release(&self, release: &Release, limit: Duration) -> Result<Answer> {
        let Release { key, token, min_hold } = release;
        let answer = self.answer(limit, pin!(self.store.lease_release(key, *token, *min_hold))).await;
        self.or_silence("releasing lease", Some(key), answer).await
    }

    /// As [`release`](Self::release), of a lease that a transaction may only have pinned if `pin` says so.
    pub(crate) async fn release_with_pin(&self, release: &Release, pin: Pin, limit: Duration) -> Result<Answer> {
        let Release { key, token, min_hold } = release;
        if pin != Pin::No || !min_hold.is_zero() {
            return self.release(release, limit).await;
        }
        let answer = self.answer(limit, pin!(self.store.lease_release_unpinned(key, *token))).await;
        self.or_silence("releasing lease", Some(key), answer).await
    }

    pub(crate) async fn release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let answer = self.answer(LIMIT, pin!(self.store.lease_release_all(releases))).await;
        self.or_silence("releasing leases", releases.first().map(|it| &it.key), answer).await
    }

    /// Releases leases that no transaction has pinned.
    pub(crate) async fn release_all_unpinned(&self, releases: &[Release], limit: Duration) -> Result<Vec<Answer>> {
        let answer = self.answer(limit, pin!(self.store.lease_release_all_unpinned(releases))).await;
        self.or_silence("releasing leases", releases.first().map(|it| &it.key), answer).await
    }

    pub(crate) async fn list(&self, prefix: &str, most: u32, limit: Duration) -> Result<Vec<LeaseRecord>> {
        let answer = self.answer(limit, pin!(self.store.lease_list(prefix, most))).await;
        self.or_silence("listing leases", None, answer).await
    }

    pub(crate) async fn expired(&self, prefix: &str, most: u32, limit: Duration) -> Result<Vec<(Key, Previous)>> {
        let answer = self.answer(limit, pin!(self.store.lease_expired(prefix, most))).await;
        self.or_silence("listing leases", None, answer).await
    }

    pub(crate) async fn sweep(&self, retention: Duration, most: u32) -> Result<u64> {
        let answer = self.answer(LIMIT, pin!(self.store.lease_sweep(retention, most))).await;
        self.or_silence("sweeping leases", None, answer).await
    }

    /// Records that no answer came, and returns the reason.
    pub(crate) async fn silence(&self, doing: &'static str, key: Option<&Key>) -> Error {
        self.unanswered(Instant::now());
        self.reason(doing, key).await
    }

    /// Why no answer came.
    async fn reason(&self, doing: &'static str, key: Option<&Key>) -> Error {
        let reason = timeout(REASON_LIMIT, self.store.unanswered()).await.ok().flatten();
        reason.unwrap_or_else(|| no_answer(doing, key))
    }

    async fn answer<T, F: Future<Output = Result<T>>>(
        &self,
        limit: Duration,
        call: pin::Pin<&mut F>,
    ) -> Option<Result<T>> {
        let asked = Instant::now();
        let answer =
            if self.store.profile().always_answers { Some(call.await) } else { timeout(limit, call).await.ok() };
        match &answer {
            None | Some(Err(Error::Database { fault: Fault::Unavailable, .. } | Error::PoolStarved { .. })) => {
                self.unanswered(asked);
            }
            Some(_) => self.answered(),
        }
        answer
    }

    async fn or_silence<T>(&self, doing: &'static str, key: Option<&Key>, answer: Option<Result<T>>) -> Result<T> {
        match answer {
            Some(answer) => answer,
            // The call has recorded the silence, from the time at which it was sent.
            None => Err(self.reason(doing, key).await),
        }
    }
}

/// Refuses a ttl that leaves no room for its margin and a few renewals, or that is too long for the store.
pub(super) fn check_ttl<S: LeaseStore>(store: &Bounded<S>, ttl: Duration) -> Result<()> {
    check_duration("ttl", ttl)?;
    let Profile { least_ttl: least, longest_ttl: longest, .. } = store.profile();
    let reason = match longest {
        _ if ttl < least => format!("is {ttl:?}, too short to be renewed in time; use {least:?} or more"),
        Some(longest) if ttl > longest => format!("is {ttl:?}, longer than the store allows; use {longest:?} or less"),
        _ => return Ok(()),
    };
    Err(Error::InvalidOption { option: "ttl", reason })
}

/// Pause before a release without an answer is retried.
pub(super) fn retry_pause(ttl: Duration) -> Duration {
    (ttl / 10).clamp(BUSY_PAUSE, Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use crate::{
        Leases,
        testing::{Failure, MemoryStore, Operation},
    };

    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_answer_may_take_half_of_the_ttl_within_limits() {
        let limits = [SECOND / 10, 4 * SECOND, 60 * SECOND].map(limit_for);
        assert_eq!(limits, [SECOND / 2, 2 * SECOND, 5 * SECOND]);
    }

    #[test]
    fn a_release_is_repeated_after_a_tenth_of_the_ttl_within_limits() {
        let pauses = [SECOND / 20, 4 * SECOND, 60 * SECOND].map(retry_pause);
        assert_eq!(pauses, [SECOND / 100, SECOND * 2 / 5, SECOND]);
    }

    #[test]
    fn a_claim_that_waited_for_all_of_the_store_or_for_an_answer_was_not_answered() {
        let error =
            |fault| Error::database("acquiring lease", None, fault, io::Error::from(ErrorKind::ConnectionReset));
        assert!(is_silence(&error(Fault::Contended)) && is_silence(&no_answer("acquiring lease", None)));
        assert!(!is_silence(&error(Fault::Unavailable)) && !is_silence(&error(Fault::Deadlock)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_begins_with_the_first_unanswered_call_since_the_last_answer() {
        let (store, key) = (Bounded::new(MemoryStore::new()), Key::from("k"));
        let look = async || store.look(&key, LIMIT).await.is_ok();
        assert_eq!(store.unreachable_for(), None);

        store.unbounded().faults().script(Operation::Look, [Failure::Silent]);
        let later = async {
            sleep(SECOND).await;
            look().await
        };
        assert_eq!(tokio::join!(look(), later), (false, true));
        assert_eq!(store.unreachable_for(), None, "a later call was answered");

        store.unbounded().faults().script(Operation::Look, [Failure::Silent; 2]);
        assert!(!look().await && !look().await);
        assert_eq!(store.unreachable_for(), Some(2 * LIMIT));
        assert!(look().await);
        assert_eq!(store.unreachable_for(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn many_claims_together_have_the_time_of_one_after_the_other() {
        let leases = Leases::builder(MemoryStore::new()).ttl(60 * SECOND).wait(Duration::ZERO).build().unwrap();
        for (keys, latency, in_time) in [(100, 9, true), (100, 11, false), (2, 6, false)] {
            leases.store().faults().script(Operation::Acquire, [Failure::Slow(latency * SECOND)]);
            let keys: Vec<_> = (0..keys).map(|it| format!("{latency}-{it}")).collect();
            assert_eq!(leases.all(keys).try_acquire().await.is_ok(), in_time, "{latency} s");
        }
    }
}
