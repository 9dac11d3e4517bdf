//! Leases of [lockkit] in ZooKeeper: [`ZooKeeperStore`] is a [`LeaseStore`](lockkit::LeaseStore) for
//! [`Leases`](lockkit::Leases).
//!
//! ```no_run
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use lockkit::Leases;
//! use lockkit_zookeeper::ZooKeeperStore;
//!
//! let leases = Leases::new(ZooKeeperStore::connect("zk1:2181,zk2:2181,zk3:2181", "/locks").await?);
//! let lease = leases.lease("nightly").acquire().await?;
//! println!("fence {}", lease.fence());
//! lease.release().await?;
//! # Ok(()) }
//! ```
//!
//! # Layout
//!
//! The lease `nightly` is the node `/locks/nightly`. Each claim is an ephemeral sequential child of it, and the child
//! with the lowest number holds the lease. This is the lock recipe of ZooKeeper, so a lease and a lock of another
//! client on the same path exclude each other, and wait for each other in one queue: an `InterProcessMutex` of
//! Curator with [`Layout::Curator`], a `Lock` of kazoo with [`Layout::Kazoo`].
//!
//! The characters `/` and `%` of a key, and those that ZooKeeper refuses (private use, and above U+FFFF, such as
//! emoji), are written as `%` and two hexadecimal digits per byte.
//!
//! # How long a lease lives
//!
//! A lease ends at its ttl unless it is renewed, as in every store: while the process lives, the store deletes its
//! child. If the process dies or is cut off, ZooKeeper deletes the child when the session times out. So a dead
//! process keeps a lease for up to the session timeout ([`ZooKeeperBuilder::session_timeout`]), however short the ttl
//! of the lease is.
//!
//! A process trusts a lease for less than the session timeout, even if the ttl of the lease is longer: for 5/8 of it
//! with the default ratio of timeouts. A follower of ZooKeeper tells its leader only every half tick which sessions
//! are alive. If it dies, the leader counts the session timeout from an earlier moment than the last answer. The
//! trust leaves room for that. A renewal is confirmed by a write, because a server that is cut off from the others
//! still answers reads.
//!
//! # Fences
//!
//! The fence of a grant is the `czxid` of its child, shifted left by [`FENCE_SHIFT`] bits: each grant has 255 spare
//! fences. It rises across release, expiry, deletion of the key and changes of the leader. A fence stays below 2^62,
//! so the numbers last for 4,194,303 elections of a leader. After that, claims are refused with an error.
//!
//! A server that is restored from a backup, or a new ensemble, starts again with low numbers.
#![deny(missing_docs)]

mod acquire;
mod builder;
mod child;
mod error;
mod key;
mod layout;
mod link;
mod looking;
mod mine;
mod note;
mod queue;
mod release;
mod remove;
mod renew;
mod store;
mod sweep;

pub use crate::{
    builder::ZooKeeperBuilder,
    child::FENCE_SHIFT,
    error::{ConnectError, NotConnected, NumbersExhausted},
    layout::Layout,
    store::ZooKeeperStore,
};
/// The client, for [`ZooKeeperBuilder::connector`] and [`ZooKeeperBuilder::acls`].
pub use zookeeper_client;
