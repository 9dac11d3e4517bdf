//! Leases: locks with an expiry, a fencing token and an owner check, for work that outlives a transaction.
//!
//! One lease of one process goes through these states:
//!
//! ```text
//!            granted                 renewed in time
//!   asking ───────────▶ held, trusted ◀────────────┐
//!     │ │                │   │  └──────────────────┘
//!     │ └── contended    │   └── not renewed, stolen, or the store says gone ──▶ lost
//!     └──── dropped      └────── release, commit, drop ───────────────────────▶ released
//! ```
//!
//! Both are final. `life/table.md`, in the source, has the table of all states; a commit that was in flight when
//! the trust ended may still succeed, and then the lease was released.
//!
//! If a request is dropped while a query is in flight, a separate task still receives the answer and releases a granted
//! lease.

mod batch;
pub(crate) mod bounded;
pub(crate) mod builder;
mod close;
pub(crate) mod ending;
pub(crate) mod held;
#[cfg(any(feature = "sql", feature = "testing"))]
pub(crate) mod in_transaction;
pub(crate) mod inner;
pub(crate) mod leases;
pub(crate) mod leftovers;
pub(crate) mod life;
pub(crate) mod queue;
pub(crate) mod request;
pub(crate) mod store;

pub use self::{
    builder::LeasesBuilder,
    close::Health,
    request::{ReadWrite, Yields},
};
