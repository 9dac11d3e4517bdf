//! Leases whose keys etcd has deleted, and how long their holders may still trust them.
//!
//! A member of etcd before 3.4.31 and 3.5.13 that was the leader, was stopped and goes on, may revoke leases that
//! are kept alive at the new leader (<https://github.com/etcd-io/etcd/issues/15247>). The holder learns of it with its
//! next renewal. So on such a cluster a lease whose key is gone, and whose holder did not say that it is over, is taken
//! only after its ttl has passed once more.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::Key;
use tokio::time::Instant;

/// How many leases are remembered before old ones are forgotten.
const MANY: usize = 1024;

/// How long a lease is remembered that no caller wants.
const OLD: Duration = Duration::from_secs(3600);

/// The leases that this process has seen without their keys.
#[derive(Debug, Default)]
pub(crate) struct Lost(Mutex<HashMap<Key, Seen>>);

/// A record of a holder whose key is gone.
#[derive(Debug, Clone, Copy)]
struct Seen {
    revision: i64,
    first: Instant,
    ttl: Duration,
}

impl Seen {
    fn left(&self) -> Duration {
        self.ttl.saturating_sub(self.first.elapsed())
    }
}

impl Lost {
    /// Notes that the key of the last holder is gone, and returns how long the holder may still trust its lease.
    pub(crate) fn seen(&self, key: &Key, revision: i64, ttl: Duration) -> Duration {
        let mut lost = self.lost();
        if lost.len() >= MANY {
            lost.retain(|_, it| it.first.elapsed() < OLD);
        }
        let new = Seen { revision, first: Instant::now(), ttl };
        let seen = lost.entry(key.clone()).or_insert(new);
        if seen.revision != revision {
            *seen = new;
        }
        seen.left()
    }

    /// How long to wait for the lease. Zero if nothing is known.
    pub(crate) fn left(&self, key: &Key) -> Duration {
        self.lost().get(key).map_or(Duration::ZERO, Seen::left)
    }

    /// The lease was taken.
    pub(crate) fn forget(&self, key: &Key) {
        self.lost().remove(key);
    }

    fn lost(&self) -> MutexGuard<'_, HashMap<Key, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this version of etcd, such as `3.5.13`, has the fix.
pub(crate) fn is_fixed(version: &str) -> bool {
    let mut numbers = version.split(['.', '-', '+']).map(|it| it.parse::<u32>().ok());
    let mut number = || numbers.next().flatten();
    match (number(), number(), number()) {
        (Some(3), Some(4), Some(patch)) => patch >= 31,
        (Some(3), Some(5), Some(patch)) => patch >= 13,
        (Some(major), Some(minor), Some(_)) => (major, minor) >= (3, 6),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_the_fix_are_known() {
        for fixed in ["3.4.31", "3.5.13", "3.5.21", "3.6.0", "3.6.0-rc.1", "4.0.0"] {
            assert!(is_fixed(fixed), "{fixed}");
        }
        for broken in ["3.3.27", "3.4.23", "3.4.30", "3.5.12", "3.5", "", "unknown"] {
            assert!(!is_fixed(broken), "{broken}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_holder_is_waited_for_anew() {
        let (lost, key, ttl) = (Lost::default(), Key::from("k"), Duration::from_secs(5));
        assert_eq!(lost.seen(&key, 1, ttl), ttl);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(lost.seen(&key, 1, ttl), Duration::from_secs(2));
        assert_eq!(lost.seen(&key, 2, ttl), ttl);
        assert_eq!(lost.left(&key), ttl);
        lost.forget(&key);
        assert_eq!(lost.left(&key), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn of_many_leases_the_old_ones_are_forgotten() {
        let (lost, ttl) = (Lost::default(), Duration::from_secs(5));
        let seen = |name: usize| lost.seen(&Key::from(format!("k{name}")), 1, ttl);
        (1..MANY).for_each(|name| {
            seen(name);
        });
        tokio::time::advance(OLD).await;
        seen(MANY);
        assert_eq!(lost.lost().len(), MANY);
        seen(0);
        assert_eq!(lost.lost().len(), 2, "the last two");
    }
}
