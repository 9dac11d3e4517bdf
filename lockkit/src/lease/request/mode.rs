//! The kinds of requests.

use crate::value::key::Key;

/// Maximum number of permits of one key.
pub(super) const MAX_PERMITS: u32 = 10_000;

/// Maximum number of keys of which a request takes any. A waiting request is notified of releases of each of them.
pub(super) const MAX_CANDIDATES: usize = 1_000;

/// The leases that are requested under the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lease) enum Mode {
    /// The lease of the key itself.
    Exclusive,
    /// The leases of these keys, which are sorted and unique. The request's key is the combination of them.
    All(Vec<Key>),
    /// The lease of one of these keys, the first that is free. They are unique, in the order of preference.
    Any(Vec<Key>),
    /// One permit of a semaphore with this many permits.
    Permit(u32),
    /// Several permits together.
    Permits {
        /// The number of permits of the semaphore.
        of: u32,
        /// The number of requested permits.
        take: u32,
    },
    /// `take` was called on a request that is not for a semaphore.
    NoPermits,
    /// A read lease. Other readers may hold the key too.
    Read,
    /// The write lease. No reader and no other writer holds the key.
    Write,
}

impl Mode {
    /// Whether what one caller gets may leave something for the next one.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Any(_) | Self::Permit(_) | Self::Permits { .. } | Self::Read)
    }
}
