//! Tools for tests of services that lock, and of lease stores. Needs the feature `testing`. Enable it for your tests:
//!
//! ```toml
//! [dev-dependencies]
//! lockkit = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["macros", "rt", "test-util"] }
//! ```
//!
//! | to test | use |
//! |---|---|
//! | your service when a lease is lost, stolen or slow, without a database and without waiting | [`MemoryStore`] and its [`Faults`] |
//! | that two holders never have one key at the same time | [`Oracle`] |
//! | that code runs under the lock that it needs | [`assert_locked!`](crate::assert_locked) |
//! | that a future may be dropped at any point | [`drop_at_every_await`] |
//! | that your own store keeps its promises | [`conformance`] |
//!
//! # Example
//!
//! With `start_paused`, the test's time is Tokio's: it stops while any task can run, and then jumps to the next timer.
//! Thirty seconds pass at once, in the same order in every run.
//!
//! ```
//! use std::time::Duration;
//!
//! use lockkit::{Leases, testing::MemoryStore};
//!
//! #[tokio::main(flavor = "current_thread", start_paused = true)] // in a test: #[tokio::test(start_paused = true)]
//! async fn main() -> lockkit::Result<()> {
//!     let store = MemoryStore::new();
//!     let (here, there) = (Leases::new(store.client()), Leases::new(store.client())); // as if in two processes
//!
//!     let lease = here.lease("nightly").acquire().await?;
//!     here.store().faults().partition();
//!     lease.lost().await; // after 29.7 s of this test's time
//!     let taken_over = there.lease("nightly").acquire().await?;
//!     assert!(taken_over.fence() > lease.fence());
//!     Ok(())
//! }
//! ```

mod assert;
mod cancel;
pub mod conformance;
mod faults;
mod memory;
#[cfg(test)]
mod mutants;
#[cfg(feature = "sql")]
mod nothing_left;
mod oracle;
#[cfg(test)]
pub(crate) mod scripted;
#[doc(hidden)]
pub mod simulation;

pub use self::{
    assert::{assert_locked, under},
    cancel::{DropAtEveryAwait, Drops, drop_at_every_await, drop_at_every_await_of},
    faults::{Failure, Faults, Operation},
    memory::MemoryStore,
    oracle::{Oracle, Tracked, Violation, Watched},
};
