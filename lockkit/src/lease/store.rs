//! What a lease needs of any store, and the words in which they talk. Knows no SQL.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::time::sleep;

pub(crate) use crate::holder::LeaseInfo;
use crate::{
    error::{Error, Result},
    fence::Fence,
    key::Key,
};

/// A place that keeps leases: a pool of any supported database, or a store of your own.
///
/// The algorithms (waiting, queueing, trust, renewal, loss) live above this trait and are the same for every store.
/// A store only has to keep these promises:
///
/// - each operation is one atomic act, decided by the store's own clock;
/// - a key is granted to at most one unexpired claim, and each grant of a key has a greater fence than every
///   grant before it, for the life of the store;
/// - asking again with the token that holds the lease grants it again, with the same fence and a new expiry;
/// - a token that no longer holds the lease changes nothing;
/// - an expiry that is further away than the ttl that the lease was last granted or renewed for means that the store's
///   clock was set back. The lease is then held for that ttl from the operation that finds it so, and no longer: not free
///   at once, because its holder may have renewed it right before the step;
/// - no operation waits for another holder: what is locked at the moment is [`Acquired::Held`] or [`Answer::Busy`].
///
/// A call that takes too long is dropped half-way: after half of the ttl (between 500 ms and 5 s), a renewal after its pause.
/// It may have been carried out all the same. lockkit gives back what a dropped `lease_acquire` may have taken; the other
/// operations can be repeated.
pub trait LeaseStore: Clone + Send + Sync + 'static {
    /// Takes the lease if it is free, expired, or held by this same claim.
    fn lease_acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired>> + Send;

    /// Takes all of the leases or none. The claims are in the order of their keys, and no key is there twice.
    ///
    /// Unless a store can do better, one after the other, giving back what was taken if one of them is held.
    fn lease_acquire_all(&self, claims: &[Claim]) -> impl Future<Output = Result<AcquiredAll>> + Send {
        acquire_in_order(self, claims)
    }

    /// Reads who holds the lease now; `None` when it is free or expired. Writes nothing, unless the store's clock was set
    /// back and the expiry must be cut.
    fn lease_look(&self, key: &Key) -> impl Future<Output = Result<Option<LeaseRecord>>> + Send;

    /// Makes each of the leases that is unexpired live for at least its `ttl` from now; never shortens one, whatever the
    /// order in which renewals arrive, unless the store's clock was set back. Answers for each, in the same order;
    /// [`Answer::Done`] only if the lease does live that long.
    fn lease_renew(&self, renewals: &[Renewal]) -> impl Future<Output = Result<Vec<Answer>>> + Send;

    /// Gives an unexpired lease back. The fence is kept for the next grant.
    ///
    /// The key stays taken, by nobody, until `min_hold` after it was acquired, if that is still to come.
    fn lease_release(&self, key: &Key, token: Token, min_hold: Duration)
    -> impl Future<Output = Result<Answer>> + Send;

    /// Gives several leases back, and answers for each in the same order. Unless a store can do better, one after the other.
    fn lease_release_all(&self, releases: &[Release]) -> impl Future<Output = Result<Vec<Answer>>> + Send {
        release_in_order(self, releases)
    }

    /// Reads the leases held now whose key starts with `prefix`, in the order of their keys, `limit` at most.
    fn lease_list(&self, prefix: &str, limit: u32) -> impl Future<Output = Result<Vec<LeaseRecord>>> + Send;

    /// Forgets up to `limit` keys that nobody has held for `retention`; returns how many.
    /// A fence granted later must still be greater than any that is forgotten.
    fn lease_sweep(&self, retention: Duration, limit: u32) -> impl Future<Output = Result<u64>> + Send;

    /// Why no answer came in time, if the store knows more than that: that it had no connection left, say.
    fn unanswered(&self) -> impl Future<Output = Option<Error>> + Send {
        std::future::ready(None)
    }

    /// Ends when the lease may have been given back since this was first polled. It ends a pause between two questions, so it may
    /// end too often or too late; by default it never ends, and waiting requests only ask again.
    fn lease_freed(&self, key: &Key) -> impl Future<Output = ()> + Send {
        let _ = key;
        std::future::pending()
    }

    /// What the store can do beyond its promises, and what it needs.
    fn profile(&self) -> Profile {
        Profile::default()
    }
}

/// What a [`LeaseStore`] can do beyond its promises, and what it needs. Start from the default and set what differs:
///
/// ```
/// let mut profile = lockkit::store::Profile::default();
/// profile.sweeps = false;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Profile {
    /// The shortest ttl that the store can keep. Defaults to 50 ms; requests for less are refused.
    pub least_ttl: Duration,
    /// Whether [`lease_sweep`](LeaseStore::lease_sweep) deletes what nobody holds. Defaults to `true`; a store whose keys
    /// go by themselves has nothing to sweep.
    pub sweeps: bool,
    /// Whether the store keeps the order of waiting claims ([`Claim::queue`]). Defaults to `false`: lockkit keeps it by tickets.
    pub queues: bool,
    /// Whether every call ends by itself, because nothing stands between this process and the store that could fall silent. Such
    /// calls are never dropped. Defaults to `false`.
    pub always_answers: bool,
}

impl Default for Profile {
    fn default() -> Self {
        Self { least_ttl: Duration::from_millis(50), sweeps: true, queues: false, always_answers: false }
    }
}

/// The pause before asking again for what is locked for the moment.
pub(crate) const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Takes leases one after the other. The order is that of the keys, so two who want the same leases do not take one each
/// and refuse each other for ever.
async fn acquire_in_order<S: LeaseStore>(store: &S, claims: &[Claim]) -> Result<AcquiredAll> {
    let mut grants = Vec::with_capacity(claims.len());
    for claim in claims {
        match store.lease_acquire(claim).await? {
            Acquired::Granted(grant) => grants.push(grant),
            Acquired::Held { free_in } => {
                for taken in &claims[..grants.len()] {
                    // Another claim may have it locked for the moment.
                    while store.lease_release(&taken.key, taken.token, Duration::ZERO).await? == Answer::Busy {
                        sleep(BUSY_PAUSE).await;
                    }
                }
                return Ok(AcquiredAll::Held { key: claim.key.clone(), free_in });
            }
        }
    }
    Ok(AcquiredAll::Granted(grants))
}

async fn release_in_order<S: LeaseStore>(store: &S, releases: &[Release]) -> Result<Vec<Answer>> {
    let mut answers = Vec::with_capacity(releases.len());
    for Release { key, token, min_hold } in releases {
        answers.push(store.lease_release(key, *token, *min_hold).await?);
    }
    Ok(answers)
}

/// A wish to hold a lease: what one acquisition sends to the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Claim {
    /// The lease.
    pub key: Key,
    /// What makes this acquisition unique.
    pub token: Token,
    /// Who asks, for people to read.
    pub holder: Arc<str>,
    /// How long to hold it without a renewal.
    pub ttl: Duration,
    /// Whether the same claim, with the same token, is sent again until it is granted. A store with a queue of its own
    /// ([`Profile::queues`]) keeps its place then, until [`lease_release`](LeaseStore::lease_release) gives it up.
    pub queue: bool,
}

impl Claim {
    /// A claim that does not queue.
    pub fn new(key: impl Into<Key>, token: Token, holder: impl Into<Arc<str>>, ttl: Duration) -> Self {
        Self { key: key.into(), token, holder: holder.into(), ttl, queue: false }
    }
}

/// 128 random bits, drawn anew for every acquisition: the proof of ownership in every statement.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; 16]);

impl Token {
    /// The last in the order of tokens.
    pub(crate) const LAST: Self = Self([u8::MAX; 16]);

    /// A token that no other acquisition has.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system's random numbers are always there");
        Self(bytes)
    }

    /// The token that a store kept.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A token of nobody's, for a key that stays taken after its release: eight zero bytes, then random ones.
    pub fn nobody() -> Self {
        let Self(mut bytes) = Self::random();
        bytes[..8].fill(0);
        Self(bytes)
    }

    /// Whether this is a token of nobody's.
    pub fn is_nobody(&self) -> bool {
        self.0[..8] == [0; 8]
    }

    /// The bytes for a store to keep.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

/// A wish to hold a lease for longer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Renewal {
    /// The lease.
    pub key: Key,
    /// The acquisition that holds it.
    pub token: Token,
    /// How long it is to live from now.
    pub ttl: Duration,
}

impl Renewal {
    /// A wish to hold the lease of this acquisition for `ttl` from now.
    pub fn new(key: impl Into<Key>, token: Token, ttl: Duration) -> Self {
        Self { key: key.into(), token, ttl }
    }
}

/// A wish to give a lease back.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Release {
    /// The lease.
    pub key: Key,
    /// The acquisition that holds it.
    pub token: Token,
    /// How long the key stays taken at least, counted from when it was acquired.
    pub min_hold: Duration,
}

impl Release {
    /// A wish to give back the lease of this acquisition.
    pub fn new(key: impl Into<Key>, token: Token, min_hold: Duration) -> Self {
        Self { key: key.into(), token, min_hold }
    }
}

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    /// The claim holds the lease now.
    Granted(Grant),
    /// Somebody else holds it, or is taking it at this moment.
    Held {
        /// When it will be free unless it is renewed, if the store said so.
        free_in: Option<Duration>,
    },
}

/// The answer to several claims at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcquiredAll {
    /// The claims hold their leases now: one grant for each claim, in the same order.
    Granted(Vec<Grant>),
    /// One of them is held by somebody else. Nothing was taken, or it was given back.
    Held {
        /// Which one.
        key: Key,
        /// When it will be free unless it is renewed, if the store said so.
        free_in: Option<Duration>,
    },
}

/// A lease that was granted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// Its fencing token.
    pub fence: Fence,
    /// How many fences above [`fence`](Self::fence) belong to this grant too: no other grant of the key gets them or lower ones.
    /// Defaults to 0.
    pub spare_fences: u64,
    /// The holder before, if it let the lease expire instead of giving it back.
    pub previous: Option<Previous>,
    /// How long the lease lives without a renewal, where that is less than the claim asked for. `None` for what it asked for.
    pub ttl: Option<Duration>,
}

impl Grant {
    /// The same lease, taken over from a holder that let it expire.
    #[must_use]
    pub fn after(mut self, previous: impl Into<Option<Previous>>) -> Self {
        self.previous = previous.into();
        self
    }
}

impl From<Fence> for Grant {
    /// A lease that was free.
    fn from(fence: Fence) -> Self {
        Self { fence, spare_fences: 0, previous: None, ttl: None }
    }
}

/// Whom a lease was taken over from: a holder that died, hung or was cut off, and may have left work half done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Previous {
    /// Who held it: host, process id and a random part, unless the service named itself.
    pub holder: String,
    /// Its fencing token.
    pub fence: Fence,
    /// How long the lease had been expired.
    pub expired_for: Duration,
}

impl Previous {
    /// The holder before.
    pub fn new(holder: impl Into<String>, fence: Fence, expired_for: Duration) -> Self {
        Self { holder: holder.into(), fence, expired_for }
    }
}

/// The answer to an operation that is scoped to one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done: the token held the lease.
    Done,
    /// The token no longer holds the lease. Nothing was changed.
    Gone,
    /// The token still holds the lease, but a transaction has its row locked. Nothing was changed; ask again.
    Busy,
}

/// One held lease, as read from the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LeaseRecord {
    /// The token that holds it.
    pub token: Token,
    /// What people see of it.
    pub info: LeaseInfo,
}

impl LeaseRecord {
    /// A held lease.
    pub fn new(token: Token, info: LeaseInfo) -> Self {
        Self { token, info }
    }
}
