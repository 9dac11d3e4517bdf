//! The fencing token of a lease.

use std::fmt;

/// The fencing token: strictly greater for every new holder of the same key, for the life of the database.
///
/// In a database and in Redis, a fence is `greatest(previous + 1, the server's clock in microseconds)`. In ZooKeeper
/// and etcd it is made from the number that the service counts its writes with. It rises across release, expiry, theft,
/// sweeping and restarts; fences of two stores cannot be compared. After a failover that lost a grant it may not rise,
/// unless the promotion waited (`docs/operating.md`). Pass it to the resource that the lease protects. The resource
/// should refuse a fence smaller than the greatest that it has seen (M. Kleppmann, "How to do distributed locking",
/// 2016, names the technique).
///
/// ```
/// use lockkit::Fence;
///
/// let (older, newer) = (Fence::from(7), Fence::from(8));
/// assert!(older < newer);
/// assert_eq!(newer.as_i64(), 8); // to bind in a statement
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// The number. Always below 2^62.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The number as databases store it. Every fence fits.
    pub fn as_i64(self) -> i64 {
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }
}

impl From<u64> for Fence {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> Self {
        fence.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
