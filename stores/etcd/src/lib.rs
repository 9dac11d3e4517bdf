//! Leases of [lockkit] in etcd 3.4 and later.
//!
//! The same `Leases` as in a database, with waiting, queues, fencing tokens, renewal in the background, semaphores,
//! readers and writers. [`EtcdStore`] is the store.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use lockkit::Leases;
//! use lockkit_etcd::EtcdStore;
//!
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! let store = EtcdStore::connect(["http://127.0.0.1:2379"]).await?;
//! let leases = Leases::builder(store).ttl(Duration::from_secs(30)).build()?;
//! let lease = leases.lease("nightly").acquire().await?;
//! // … work, and give `lease.fence()` to what it protects …
//! lease.release().await?;
//! # Ok(()) }
//! ```
//!
//! Building needs `protoc` and its standard files (Debian: `protobuf-compiler` and `libprotobuf-dev`). For TLS, add
//! `etcd-client` to your own dependencies with one of its TLS features, and pass
//! [`ConnectOptions`](etcd_client::ConnectOptions) to [`EtcdStoreBuilder::connect_options`].
//!
//! # The layout
//!
//! | key | what it is |
//! |---|---|
//! | `lockkit/lock/nightly/<32 hex digits>` | a claim to the lease `nightly`; the oldest holds it |
//! | `lockkit/last/lockkit/lock/nightly` | the last holder, until it releases the lease |
//! | `lockkit/session/<etcd lease>` | written when a request was given up, so that it has no effect if it arrives later |
//!
//! It is the layout of `concurrency.Mutex` of etcd's Go client, so `etcdctl lock lockkit/lock/nightly` and Go services
//! share the lease. [`EtcdStoreBuilder::prefix`] sets the first part. In names, `/` becomes `%2f` and `%` becomes
//! `%25`.
//!
//! A waiting request has a claim of its own, so waiting processes are served in the order in which they came, together
//! with those that use `concurrency.Mutex`. `try_acquire` is refused while others wait. Each waiting process watches
//! only the claim before its own.
//!
//! A key of another program below the name of a lease is no claim: the lease is an error that shows the key, and the
//! key stays. So are other values at the keys below `lockkit/last/`.
//!
//! # Fences
//!
//! A fence is the revision at which the claim's key was created, shifted left by 8 bits. It rises across release,
//! expiry, restarts and changes of the leader. 255 more fences belong to each grant
//! ([`Grant::spare_fences`](lockkit::store::Grant::spare_fences)).
//! A cluster that is restored from a snapshot counts from an earlier revision again, unless it is restored with
//! `--bump-revision` (etcd 3.6).
//!
//! # How long a lease lives
//!
//! The claims of a process are on etcd leases of the process (one for each ttl in use), which the store keeps alive
//! five times in their ttl.
//!
//! - While the process lives, it deletes the key of a lease that was not renewed within its own ttl.
//! - If the process dies or is stopped, the key is deleted after [`EtcdStoreBuilder::session_ttl`] or 1.25 times the
//!   ttl of the lease, whichever is longer. Rounding up to two digits makes that up to 1.36 times for ttls over 80 s,
//!   and whole seconds make it longer for short ones.
//! - A renewal counts only if the leader of etcd that extended the etcd lease was still the leader afterwards: the
//!   store compares the Raft terms of the answers. Without a quorum there are no renewals, and the holder stops
//!   trusting its lease at the end of its ttl.
//! - After a change of the leader, etcd starts all leases again with their full ttl. So a dead holder's lease can live
//!   up to twice as long with one change, and longer with each more.
//!
//! etcd before 3.4.31 and 3.5.13 can revoke leases that are kept alive. The store waits for the ttl once more on such a
//! cluster: see [`TakeOver`].
//!
//! # What it costs
//!
//! Acquiring, releasing or reading a lease is one request; a renewal is a keep-alive and a read, for up to 120 leases
//! at once; up to 40 leases are acquired or released with one request. A release with a minimum hold is four requests:
//! two at once, and two when the time is over. A waiting process reads about five times a second, in case that its
//! watch is lost.
//!
//! # Limits
//!
//! - A cluster whose database is full takes no claims. `acquire` then fails at once with
//!   [`Fault::Unavailable`](lockkit::Fault) and says so. Leases that are held are renewed and released.
//! - `Lease::verify` and `Lease::commit` need a database transaction and are not available.
//! - etcd has no clock that clients can read. Times of other processes' leases come from their clocks, and are for
//!   display: `acquired_at`, `held_for` and [`Previous::expired_for`](lockkit::store::Previous::expired_for), which
//!   does not know of renewals. How often another process has renewed its lease is unknown.
//! - A user needs read and write permission for the prefix and for `lockkit/`.
//!
//! [lockkit]: https://docs.rs/lockkit
#![deny(missing_docs)]

mod builder;
mod claim;
mod claim_all;
mod claimed;
mod claims;
mod error;
#[cfg(any(test, feature = "_fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod keeper;
mod layout;
mod look;
mod lost;
mod members;
mod release;
mod renew;
mod session;
mod sessions;
mod store;
mod sweep;
mod wake;

pub use etcd_client;

pub use crate::{
    builder::{EtcdStoreBuilder, TakeOver},
    error::ConnectError,
    store::EtcdStore,
};
