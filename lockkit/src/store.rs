//! What a lease needs of any store, and the words in which they talk. Knows no SQL.

use std::{
    fmt,
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{
    error::{HolderInfo, Result},
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
/// - no operation waits for another holder: what is locked at the moment is [`Acquired::Held`] or [`Scoped::Busy`].
///
/// lockkit never cancels `lease_acquire` half-way; the others can be repeated.
pub trait LeaseStore: Clone + Send + Sync + 'static {
    /// Takes the lease if it is free, expired, or held by this same claim.
    fn lease_acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired>> + Send;

    /// Reads who holds the lease now, without writing; `None` when it is free or expired.
    fn lease_look(&self, key: &Key) -> impl Future<Output = Result<Option<Held>>> + Send;

    /// Makes an unexpired lease live for at least `ttl` from now; never shortens it, whatever the order in which renewals
    /// arrive.
    fn lease_renew(&self, key: &Key, token: Token, ttl: Duration) -> impl Future<Output = Result<Scoped>> + Send;

    /// Gives an unexpired lease back. The fence is kept for the next grant.
    fn lease_release(&self, key: &Key, token: Token) -> impl Future<Output = Result<Scoped>> + Send;

    /// Reads the leases held now whose key starts with `prefix`, in the order of their keys, `limit` at most.
    fn lease_list(&self, prefix: &str, limit: u32) -> impl Future<Output = Result<Vec<Held>>> + Send;

    /// Forgets up to `limit` keys that nobody has held for `retention`; returns how many.
    /// A fence granted later must still be greater than any that is forgotten.
    fn lease_sweep(&self, retention: Duration, limit: u32) -> impl Future<Output = Result<u64>> + Send;
}

/// A wish to hold a lease: what one acquisition sends to the store.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The lease.
    pub key: Key,
    /// What makes this acquisition unique.
    pub token: Token,
    /// Who asks, for people to read.
    pub holder: Arc<str>,
    /// How long to hold it without a renewal.
    pub ttl: Duration,
}

/// 128 random bits, drawn anew for every acquisition: the proof of ownership in every statement.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
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

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquired {
    /// The claim holds the lease now, with this fence.
    Granted(Fence),
    /// Somebody else holds it, or is taking it at this moment.
    Held {
        /// When it will be free unless it is renewed, if the store said so.
        free_in: Option<Duration>,
        /// Who holds it, if the store said so.
        by: Option<HolderInfo>,
    },
}

/// The answer to an operation that is scoped to one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoped {
    /// Done: the token held the lease.
    Done,
    /// The token no longer holds the lease. Nothing was changed.
    Gone,
    /// The token still holds the lease, but a transaction has its row locked. Nothing was changed; ask again.
    Busy,
}

/// One held lease, as read from the store.
#[derive(Debug, Clone)]
pub struct Held {
    /// The token that holds it.
    pub token: Token,
    /// What people see of it.
    pub info: LeaseInfo,
}

/// One held lease, as shown to people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseInfo {
    /// The lease.
    pub key: Key,
    /// Who holds it: host, process id and a random part, unless the service named itself.
    pub holder: String,
    /// Its fencing token.
    pub fence: Fence,
    /// When it was acquired, by the store's clock.
    pub acquired_at: SystemTime,
    /// How long it lives without a renewal.
    pub expires_in: Duration,
    /// How often it was renewed.
    pub renewals: u64,
}
