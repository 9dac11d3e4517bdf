//! The interface between leases and their stores: the operations and their types. Knows no SQL.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

pub(crate) use crate::value::holder::LeaseInfo;
use crate::value::{
    error::{Error, Result},
    fence::Fence,
    key::Key,
    token::Token,
};

/// A place that keeps leases: a pool of any supported database, or a store of your own.
///
/// The algorithms (waiting, queueing, trust, renewal, loss) live above this trait and are the same for every store. A
/// store only has to keep these promises:
///
/// - each operation is atomic and uses the store's own clock;
/// - a key is granted to at most one unexpired claim, and each grant of a key has a greater fence than every earlier
///   grant of that key, for the life of the store;
/// - a claim with the token that already holds the lease is granted again, with the same fence and an expiry at least
///   its ttl from now; it never shortens the lease;
/// - a token that no longer holds the lease changes nothing;
/// - if an expiry is further away than the ttl of the last grant or renewal, the store's clock was set back. The lease
///   is then held for exactly that ttl from the operation that detects this. It is not free at once, because its holder
///   may have renewed it right before the step;
/// - no operation waits for another holder: if a row is locked at the moment, the answer is [`Acquired::Held`] or
///   [`Answer::Busy`].
///
/// A call that reaches its time limit is dropped: after half of the ttl (between 500 ms and 5 s), a renewal after its
/// pause. The store may have executed it all the same. lockkit releases a lease that a dropped `lease_acquire` may have
/// taken. The other operations can be repeated.
pub trait LeaseStore: Clone + Send + Sync + 'static {
    /// Takes the lease if it is free, expired, or already held by this claim.
    fn lease_acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired>> + Send;

    /// Takes all of the leases or none. The claims are in the order of their keys, without duplicates: lockkit never
    /// names a key twice, and a caller of the store must not do so either.
    ///
    /// By default, takes one after the other, and releases the taken ones if one is held.
    fn lease_acquire_all(&self, claims: &[Claim]) -> impl Future<Output = Result<AcquiredAll>> + Send {
        acquire_in_order(self, claims)
    }

    /// Takes each of these leases that it can take at once. The claims are in the order of their keys, without
    /// duplicates, and with one holder. Answers for each in the same order: `None` for a claim that must be sent alone,
    /// with the same token, and that has taken nothing so far.
    ///
    /// Only called with [`Profile::batches`]. By default, takes nothing.
    fn lease_acquire_each(&self, claims: &[Claim]) -> impl Future<Output = Result<Vec<Option<Acquired>>>> + Send {
        std::future::ready(Ok(claims.iter().map(|_| None).collect()))
    }

    /// Reads the current holder of the lease. `None` if it is free or expired. Writes nothing, unless the store's clock
    /// was set back and the expiry must be cut.
    fn lease_look(&self, key: &Key) -> impl Future<Output = Result<Option<LeaseRecord>>> + Send;

    /// Extends each unexpired lease to at least its `ttl` from now. Never shortens one, in whatever order renewals
    /// arrive, unless the store's clock was set back. Answers for each in the same order: [`Answer::Done`] only if the
    /// lease does live that long.
    fn lease_renew(&self, renewals: &[Renewal]) -> impl Future<Output = Result<Vec<Answer>>> + Send;

    /// Releases an unexpired lease. The fence is kept for the next grant.
    ///
    /// If `min_hold` has not passed since the acquisition, the key stays taken, without a holder, until then.
    fn lease_release(&self, key: &Key, token: Token, min_hold: Duration)
    -> impl Future<Output = Result<Answer>> + Send;

    /// Releases an unexpired lease, as [`lease_release`](Self::lease_release) without `min_hold`. Only its holder calls
    /// this, who knows that no transaction has pinned the lease, so a store need not look for one. By default,
    /// `lease_release`.
    fn lease_release_unpinned(&self, key: &Key, token: Token) -> impl Future<Output = Result<Answer>> + Send {
        self.lease_release(key, token, Duration::ZERO)
    }

    /// Releases several leases, and answers for each in the same order. By default, one after the other.
    fn lease_release_all(&self, releases: &[Release]) -> impl Future<Output = Result<Vec<Answer>>> + Send {
        release_in_order(self, releases)
    }

    /// As [`lease_release_all`](Self::lease_release_all), of leases that no transaction has pinned, without `min_hold`.
    ///
    /// Only called with [`Profile::batches`]. By default, `lease_release_all`.
    fn lease_release_all_unpinned(&self, releases: &[Release]) -> impl Future<Output = Result<Vec<Answer>>> + Send {
        self.lease_release_all(releases)
    }

    /// Reads the currently held leases whose key starts with `prefix`, in the order of their keys, at most `limit`.
    fn lease_list(&self, prefix: &str, limit: u32) -> impl Future<Output = Result<Vec<LeaseRecord>>> + Send;

    /// Reads the leases whose key starts with `prefix` that expired without a release and were not taken since, in the
    /// order of their keys, at most `limit`. By default there are none: the store forgets a lease that expires.
    fn lease_expired(&self, prefix: &str, limit: u32) -> impl Future<Output = Result<Vec<(Key, Previous)>>> + Send {
        let _ = (prefix, limit);
        std::future::ready(Ok(Vec::new()))
    }

    /// Deletes up to `limit` keys that had no holder for `retention`, and returns how many were deleted. A later grant
    /// must still have a greater fence than any that was deleted.
    fn lease_sweep(&self, retention: Duration, limit: u32) -> impl Future<Output = Result<u64>> + Send;

    /// The reason why no answer came in time, if the store knows one, such as a pool without a free connection.
    fn unanswered(&self) -> impl Future<Output = Option<Error>> + Send {
        std::future::ready(None)
    }

    /// Completes when the lease may have been released since the first poll of this future. It only ends a pause
    /// between two attempts, so it may complete too often or too late. By default it never completes, and waiting
    /// requests only poll.
    fn lease_freed(&self, key: &Key) -> impl Future<Output = ()> + Send {
        let _ = key;
        std::future::pending()
    }

    /// The optional abilities and the limits of the store.
    fn profile(&self) -> Profile {
        Profile::default()
    }
}

/// The optional abilities and the limits of a [`LeaseStore`]. Start from the default and set the fields that differ:
///
/// ```
/// let mut profile = lockkit::store::Profile::default();
/// profile.sweeps = false;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is an ability of its own")]
pub struct Profile {
    /// The shortest ttl that the store supports. Defaults to 50 ms. Requests for a shorter ttl are refused.
    pub least_ttl: Duration,
    /// The longest ttl that the store supports. Defaults to `None`, no limit. Requests for a longer ttl are refused.
    pub longest_ttl: Option<Duration>,
    /// Whether [`lease_sweep`](LeaseStore::lease_sweep) deletes unused keys. Defaults to `true`. A store that expires
    /// its keys itself has nothing to sweep.
    pub sweeps: bool,
    /// Whether the store keeps the order of waiting claims ([`Claim::queue`]). Defaults to `false`: lockkit keeps the
    /// order with tickets.
    pub queues: bool,
    /// The name of the store's fences for [`Lease::guard`](crate::Lease::guard), unless the service sets its own
    /// ([`LeasesBuilder::fence_domain`](crate::lease::LeasesBuilder::fence_domain)). 1 to 64 bytes. Defaults to
    /// `lockkit`.
    pub fence_domain: &'static str,
    /// Whether claims that arrive together are sent as one [`lease_acquire_each`](LeaseStore::lease_acquire_each), and
    /// releases as one [`lease_release_all_unpinned`](LeaseStore::lease_release_all_unpinned). Set it where one such
    /// call costs the store less than a call for each. Defaults to `false`.
    pub batches: bool,
    /// Whether every call completes on its own, because no network or other process is involved. Such calls have no
    /// time limit. Defaults to `false`.
    pub always_answers: bool,
    /// Whether lockkit may keep other leases beside the one that is asked for: tickets of waiting requests, permits,
    /// readers and writers. [`lease_list`](LeaseStore::lease_list) must then show every lease whose grant was answered
    /// before the list was asked for, and fences of different keys must come from one clock. Defaults to `true`.
    /// Without it, waiting requests only poll, and semaphores, readers and writers, fair requests and requests for any
    /// of several keys are refused.
    pub side_leases: bool,
    /// Whether the store counts the renewals of a lease. Defaults to `true`. Without it, [`LeaseInfo::renewals`] is
    /// always 0.
    pub counts_renewals: bool,
    /// Whether a write that the store has acknowledged is visible to every client at once. Defaults to `true`. Set it
    /// to `false` where clients may read from a lagging node of a cluster. A lease is then never handed over inside a
    /// process ([`LeasesBuilder::hand_over`](crate::lease::LeasesBuilder::hand_over)), because the next holder could
    /// read data from before the last commit.
    pub shows_writes_at_once: bool,
    /// The number of characters of the longest key that the store can keep. Defaults to 255, the limit of [`Key`].
    pub longest_key: usize,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            least_ttl: Duration::from_millis(50),
            longest_ttl: None,
            sweeps: true,
            queues: false,
            batches: false,
            fence_domain: "lockkit",
            always_answers: false,
            side_leases: true,
            counts_renewals: true,
            shows_writes_at_once: true,
            longest_key: Key::MAX_BYTES,
        }
    }
}

/// Pause before another attempt at a row that is locked at the moment.
pub(crate) const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Takes leases one after the other. The order of the keys keeps two callers that want the same leases from taking one
/// each and refusing each other for ever.
async fn acquire_in_order<S: LeaseStore>(store: &S, claims: &[Claim]) -> Result<AcquiredAll> {
    let mut grants = Vec::with_capacity(claims.len());
    for claim in claims {
        match store.lease_acquire(claim).await {
            Ok(Acquired::Granted(grant)) => grants.push(grant),
            Ok(Acquired::Held { free_in }) => {
                release_granted(store, &claims[..grants.len()]).await?;
                return Ok(AcquiredAll::Held { key: claim.key.clone(), free_in });
            }
            Err(err) => {
                // The error of the claim is what the caller needs.
                drop(release_granted(store, &claims[..grants.len()]).await);
                return Err(err);
            }
        }
    }
    Ok(AcquiredAll::Granted(grants))
}

/// Releases what was granted a moment ago. Another claim may have it locked for the moment.
async fn release_granted<S: LeaseStore>(store: &S, granted: &[Claim]) -> Result<()> {
    for Claim { key, token, .. } in granted {
        while store.lease_release(key, *token, Duration::ZERO).await? == Answer::Busy {
            sleep(BUSY_PAUSE).await;
        }
    }
    Ok(())
}

async fn release_in_order<S: LeaseStore>(store: &S, releases: &[Release]) -> Result<Vec<Answer>> {
    let mut answers = Vec::with_capacity(releases.len());
    for Release { key, token, min_hold } in releases {
        answers.push(store.lease_release(key, *token, *min_hold).await?);
    }
    Ok(answers)
}

/// A claim to a lease, as one acquisition sends it to the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Claim {
    /// The lease.
    pub key: Key,
    /// The token of this acquisition. Unique.
    pub token: Token,
    /// Display name of the claimant. Never compared to decide who holds a lease.
    pub holder: Arc<str>,
    /// How long the lease lives without a renewal.
    pub ttl: Duration,
    /// Whether the same claim, with the same token, is sent again until it is granted. A store with its own queue
    /// ([`Profile::queues`]) then keeps the claim's place until [`lease_release`](LeaseStore::lease_release) gives it
    /// up.
    ///
    /// The place must end with the process of the claim at the latest: a release that the store does not hear is
    /// repeated for the ttl of the claim and no longer. A claim that does not queue must be refused while others do.
    pub queue: bool,
}

impl Claim {
    /// A claim that does not queue.
    pub fn new(key: impl Into<Key>, token: Token, holder: impl Into<Arc<str>>, ttl: Duration) -> Self {
        Self { key: key.into(), token, holder: holder.into(), ttl, queue: false }
    }
}

/// A request to extend a lease.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Renewal {
    /// The lease.
    pub key: Key,
    /// The acquisition that holds it.
    pub token: Token,
    /// The new ttl, from now.
    pub ttl: Duration,
}

impl Renewal {
    /// A request to extend the lease of this acquisition to `ttl` from now.
    pub fn new(key: impl Into<Key>, token: Token, ttl: Duration) -> Self {
        Self { key: key.into(), token, ttl }
    }
}

/// A request to release a lease.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Release {
    /// The lease.
    pub key: Key,
    /// The acquisition that holds it.
    pub token: Token,
    /// The minimum time that the key stays taken, counted from its acquisition.
    pub min_hold: Duration,
}

impl Release {
    /// A request to release the lease of this acquisition.
    pub fn new(key: impl Into<Key>, token: Token, min_hold: Duration) -> Self {
        Self { key: key.into(), token, min_hold }
    }
}

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    /// The claim now holds the lease.
    Granted(Grant),
    /// Another claim holds the lease, or is taking it at this moment.
    Held {
        /// The time after which the lease is free unless it is renewed. `None` if unknown.
        free_in: Option<Duration>,
    },
}

impl Acquired {
    /// The same answer to a claim that was sent at this time.
    pub(crate) fn sent(self, at: Instant) -> Self {
        match self {
            Self::Granted(grant) => Self::Granted(grant.sent(at)),
            held @ Self::Held { .. } => held,
        }
    }
}

/// The answer to several claims at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcquiredAll {
    /// The claims now hold their leases. One grant per claim, in the same order.
    Granted(Vec<Grant>),
    /// Another claim holds one of the leases. Nothing was taken, or the taken leases were released.
    Held {
        /// The key of the held lease.
        key: Key,
        /// The time after which that lease is free unless it is renewed. `None` if unknown.
        free_in: Option<Duration>,
    },
}

/// A granted lease.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// Its fencing token.
    pub fence: Fence,
    /// How many fences above [`fence`](Self::fence) also belong to this grant. No other grant of the key gets these or
    /// lower fences. Defaults to 0.
    pub spare_fences: u64,
    /// The previous holder, if it let the lease expire instead of releasing it.
    pub previous: Option<Previous>,
    /// The longest time that the store keeps the lease without a renewal, whatever ttl is asked for. `None` for no
    /// limit.
    pub ttl: Option<Duration>,
    /// When the claim was sent, if the store had to wait before, for example for a connection of a full pool. `None`
    /// for the moment at which the store was called. The holder trusts the lease for its ttl from then.
    pub sent: Option<std::time::Instant>,
}

impl Grant {
    /// From when the lease is trusted, if the store was called at `called` and has answered.
    pub(crate) fn since(&self, called: Instant) -> Instant {
        self.sent.map_or(called, |it| Instant::from(it).clamp(called, Instant::now()))
    }

    /// The same grant, of a claim that was sent at this time.
    pub(crate) fn sent(mut self, at: Instant) -> Self {
        self.sent = Some(at.into_std());
        self
    }

    /// The same grant, taken over from a holder that let the lease expire.
    #[must_use]
    pub fn after(mut self, previous: impl Into<Option<Previous>>) -> Self {
        self.previous = previous.into();
        self
    }
}

impl From<Fence> for Grant {
    /// The grant of a free lease.
    fn from(fence: Fence) -> Self {
        Self { fence, spare_fences: 0, previous: None, ttl: None, sent: None }
    }
}

/// The previous holder of a lease that expired. It died, hung or was cut off, and may have left work half done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Previous {
    /// The name of the holder: host, process id and a random part, unless the service set its own.
    pub holder: String,
    /// Its fencing token.
    pub fence: Fence,
    /// How long ago the lease had expired.
    pub expired_for: Duration,
}

impl Previous {
    /// Describes the previous holder.
    pub fn new(holder: impl Into<String>, fence: Fence, expired_for: Duration) -> Self {
        Self { holder: holder.into(), fence, expired_for }
    }
}

/// The answer to an operation on the lease of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done. The token held the lease.
    Done,
    /// The token no longer holds the lease. Nothing was changed.
    Gone,
    /// The token still holds the lease, but a transaction has its row locked. Nothing was changed. Ask again.
    Busy,
}

/// One held lease, as read from the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LeaseRecord {
    /// The token of the holder.
    pub token: Token,
    /// The public description of the lease.
    pub info: LeaseInfo,
}

impl LeaseRecord {
    /// The record of a held lease.
    pub fn new(token: Token, info: LeaseInfo) -> Self {
        Self { token, info }
    }
}

/// In an implementation of [`LeaseStore`] for a test: these operations are those of the field `store`.
#[cfg(test)]
macro_rules! pass_on {
    ($($operation:ident),+ $(,)?) => { $($crate::lease::store::pass_on!(@ $operation);)+ };
    (@ lease_acquire) => {
        async fn lease_acquire(
            &self,
            claim: &$crate::lease::store::Claim,
        ) -> $crate::Result<$crate::lease::store::Acquired> {
            self.store.lease_acquire(claim).await
        }
    };
    (@ lease_look) => {
        async fn lease_look(
            &self,
            key: &$crate::Key,
        ) -> $crate::Result<Option<$crate::lease::store::LeaseRecord>> {
            self.store.lease_look(key).await
        }
    };
    (@ lease_renew) => {
        async fn lease_renew(
            &self,
            renewals: &[$crate::lease::store::Renewal],
        ) -> $crate::Result<Vec<$crate::lease::store::Answer>> {
            self.store.lease_renew(renewals).await
        }
    };
    (@ lease_release) => {
        async fn lease_release(
            &self,
            key: &$crate::Key,
            token: $crate::value::token::Token,
            min_hold: std::time::Duration,
        ) -> $crate::Result<$crate::lease::store::Answer> {
            self.store.lease_release(key, token, min_hold).await
        }
    };
    (@ lease_list) => {
        async fn lease_list(
            &self,
            prefix: &str,
            limit: u32,
        ) -> $crate::Result<Vec<$crate::lease::store::LeaseRecord>> {
            self.store.lease_list(prefix, limit).await
        }
    };
    (@ lease_sweep) => {
        async fn lease_sweep(&self, retention: std::time::Duration, limit: u32) -> $crate::Result<u64> {
            self.store.lease_sweep(retention, limit).await
        }
    };
}

#[cfg(test)]
pub(crate) use pass_on;

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::timeout;

    use crate::{
        Leases,
        testing::scripted::{Call, Scripted},
    };

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn leases(profile: Profile) -> Leases<Scripted> {
        Leases::builder(Scripted::new(profile)).wait(60 * SECOND).build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_a_transaction_may_have_pinned_or_that_stays_taken_is_not_released_the_cheap_way() {
        let leases = leases(Profile::default());
        let cheap = || leases.store().calls(Call::ReleaseUnpinned);
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(cheap(), 1);
        drop(leases.lease("k").acquire().await.unwrap());
        sleep(SECOND).await;
        assert_eq!(cheap(), 2);

        leases.lease("stays").min_hold(SECOND).acquire().await.unwrap().release().await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        lease.verify_by(async { Ok(true) }).await.unwrap();
        lease.release().await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        assert!(timeout(SECOND, lease.verify_by(pending())).await.is_err(), "the transaction does not answer");
        drop(lease);
        sleep(SECOND).await;
        assert_eq!(cheap(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ttl_beyond_the_limits_of_the_store_is_refused() {
        let limits = Profile { least_ttl: SECOND, longest_ttl: Some(60 * SECOND), ..Profile::default() };
        let leases = leases(limits);
        let lease = leases.lease("k").acquire().await.unwrap();
        for (ttl, fits) in [(1, true), (60, true), (61, false)] {
            let (extended, acquired) =
                (lease.extend(ttl * SECOND).await, leases.lease("l").ttl(ttl * SECOND).acquire().await);
            for refused in [extended.err(), acquired.err()] {
                assert_eq!(refused.is_none(), fits, "{ttl} s: {refused:?}");
                assert!(fits || matches!(refused, Some(Error::InvalidOption { option: "ttl", .. })), "{refused:?}");
            }
        }
        assert!(lease.extend(SECOND / 2).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_shows_writes_late_grants_each_holder_itself() {
        let leases = leases(Profile { shows_writes_at_once: false, ..Profile::default() });
        let first = leases.lease("k").acquire().await.unwrap();
        let next = tokio::spawn(leases.lease("k").acquire());
        sleep(SECOND).await;
        let handed_over = first.fence().get() + 1;
        drop(first);
        assert!(next.await.unwrap().unwrap().fence().get() > handed_over, "a fence of the store's clock");
    }

    #[tokio::test(start_paused = true)]
    async fn what_needs_further_leases_is_refused_by_a_store_that_keeps_one_for_each_key() {
        let leases = leases(Profile { side_leases: false, ..Profile::default() });
        let request = |option| match option {
            "any" => leases.any(["k", "l"]),
            "semaphore" => leases.semaphore("k", 1),
            "rw" => leases.rw("k").read(),
            "fair" => leases.lease("k").fair(),
            _ => leases.lease("k"),
        };
        for option in ["any", "semaphore", "rw", "fair"] {
            let err = request(option).acquire().await.unwrap_err();
            assert!(matches!(err, Error::InvalidOption { option: refused, .. } if refused == option), "{err:?}");
        }
        let held = request("lease").acquire().await.unwrap();
        // The request takes no ticket, however long it waits.
        request("lease").wait(SECOND).acquire().await.unwrap_err();
        assert_eq!(leases.list("k/").await.unwrap(), []);
        drop(held);
        drop(leases.all(["k", "l"]).acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_leases_none_is_kept_when_one_of_them_is_held() {
        let leases = leases(Profile::default());
        let held = leases.lease("c").acquire().await.unwrap();
        assert!(leases.all(["a", "b", "c"]).try_acquire().await.unwrap().is_none());
        let keys: Vec<_> = leases.list("").await.unwrap().into_iter().map(|it| it.key).collect();
        assert_eq!(keys, ["c"]);
        drop(held);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_releases_one_lease_after_the_other_has_none_after_a_close() {
        let leases = leases(Profile::default());
        let _held = (leases.lease("a").acquire().await.unwrap(), leases.lease("b").acquire().await.unwrap());
        leases.close().await.unwrap();
        assert_eq!(leases.list("").await.unwrap(), []);
    }
}
