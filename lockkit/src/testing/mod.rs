//! Tools to test services that lock, and stores of leases. With the feature `testing` only; switch it on for your tests:
//!
//! ```toml
//! [dev-dependencies]
//! lockkit = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["macros", "rt", "test-util"] }
//! ```
//!
//! | you want to know | use |
//! |---|---|
//! | what your service does when a lease is lost, stolen or slow, without a database and without waiting | [`MemoryStore`] and its [`Faults`] |
//! | whether two ever held one key at a time | [`Oracle`] |
//! | whether code runs under the lock that it needs | [`assert_locked!`](crate::assert_locked) |
//! | whether a future may be dropped at any point | [`drop_at_every_await`] |
//! | whether a store of your own keeps its promises | [`conformance`] |
//!
//! # Example
//!
//! With `start_paused` the time of the test is Tokio's: it stands still while anything can run, and then jumps to the
//! next timer. Thirty seconds pass at once, in the same order every time.
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

pub use self::{
    assert::{assert_locked, under},
    cancel::{DropAtEveryAwait, Drops, drop_at_every_await, drop_at_every_await_of},
    faults::{Failure, Faults, Operation},
    memory::MemoryStore,
    oracle::{Oracle, Tracked, Violation, Watched},
};
