//! The promises of [`LeaseStore`], each as a check that any store can be put to.
//!
//! The checks wait for leases to expire, a second or two in all; on a [`MemoryStore`](crate::testing::MemoryStore) in
//! paused time they take none. They use keys of their own, so the store may hold other leases; do not run them on one
//! that a service is using all the same, because they sweep.
//!
//! ```
//! use lockkit::testing::{MemoryStore, conformance};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
//! conformance::run(async || MemoryStore::new()).await;
//! # }
//! ```

mod checks;

use std::{fmt, future::Future, time::Duration};

use tokio::time::timeout;

pub use self::checks::PROMISES;
use crate::{
    lease::{bounded::is_silence, store::LeaseStore},
    value::error::{Error, chain},
};

/// Longer than any check takes on a store that does not wait for other holders.
const PATIENCE: Duration = Duration::from_secs(60);

/// A promise that a store does not keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The promise: one of [`PROMISES`].
    pub promise: &'static str,
    /// What the store did instead.
    pub found: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { promise, found } = self;
        write!(f, "{}: {found}", promise.replace('_', " "))
    }
}

/// Puts the store to every check, each on what `make` returns: a new store, or a handle to the same one. Returns how
/// many promises it kept.
///
/// # Panics
/// If it breaks one, with all that it breaks.
///
/// # Cancel safety
/// As [`check`].
#[track_caller]
pub fn run<S: LeaseStore>(make: impl AsyncFnMut() -> S) -> impl Future<Output = usize> {
    let caller = std::panic::Location::caller();
    async move {
        let broken = find(make).await;
        let list: Vec<_> = broken.iter().map(|it| format!("- {it}")).collect();
        assert!(broken.is_empty(), "the store at {caller} breaks promises:\n{}", list.join("\n"));
        PROMISES.len()
    }
}

/// As [`run`], and returns the promises that the store breaks. A check in which the store gave no answer is repeated
/// twice, because a busy machine may answer late.
///
/// # Cancel safety
/// As [`check`].
pub async fn find<S: LeaseStore>(mut make: impl AsyncFnMut() -> S) -> Vec<Broken> {
    let mut broken = Vec::new();
    for promise in PROMISES {
        let mut checked = once(promise, make().await).await;
        for _ in 0..2 {
            if matches!(checked, Err(Failed { is_silence: true, .. })) {
                checked = once(promise, make().await).await;
            }
        }
        if let Err(Failed { found, .. }) = checked {
            broken.push(Broken { promise, found });
        }
    }
    broken
}

/// Puts the store to one check, by the name of its promise.
///
/// # Errors
/// What the store did instead of what it promised.
///
/// # Panics
/// If there is no such promise.
///
/// # Cancel safety
/// Leases of the check may stay in the store until their ttl has passed.
pub async fn check<S: LeaseStore>(promise: &str, store: S) -> Result<(), String> {
    once(promise, store).await.map_err(|failed| failed.found)
}

async fn once<S: LeaseStore>(promise: &str, store: S) -> Check {
    let late = |_| Failed::new(format!("it was not over after {PATIENCE:?}: an operation waits"));
    timeout(PATIENCE, checks::check(promise, store)).await.map_err(late)?
}

/// What went wrong in a check.
#[derive(Debug)]
struct Failed {
    found: String,
    /// The store gave no answer.
    is_silence: bool,
}

impl Failed {
    fn new(found: String) -> Self {
        Self { found, is_silence: false }
    }
}

impl From<Error> for Failed {
    fn from(err: Error) -> Self {
        let texts: Vec<_> = chain(&err).map(ToString::to_string).collect();
        Self { found: format!("an error: {}", texts.join(": ")), is_silence: is_silence(&err) }
    }
}

type Check = Result<(), Failed>;

/// Fails the check unless this holds.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(Failed::new(format!($($text)+)));
        }
    };
}
use ensure;
