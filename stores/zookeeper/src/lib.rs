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
//! A node that another program uses for its data is no lock: a lease of such a key is an error that shows them, and the
//! data stay. See [`ZooKeeperStore`].
//!
//! # How long a lease lives
//!
//! A lease ends at its ttl unless it is renewed, as in every store: while the process lives, the store deletes its
//! child. If the process dies or is cut off, ZooKeeper deletes the child when the session times out. So a dead process
//! keeps a lease for the session timeout ([`ZooKeeperStoreBuilder::session_timeout`]), however short the ttl of the
//! lease is. The servers notice it up to one and a half ticks late. A new leader gives each session its whole timeout
//! again, so after a change of the leader the lease is kept for up to twice as long.
//!
//! A process trusts a lease for 3/8 of the session timeout, even if the ttl of the lease is longer
//! ([`ZooKeeperStore::trusted_for`]). A follower of ZooKeeper reports to its leader only every half tick which sessions
//! are alive. If the follower dies, the leader counts the session timeout from an earlier moment than the last answer.
//! The rest of the session timeout is room for that. It suffices if the session timeout is at least two ticks, which is
//! the servers' default minimum, if all servers have the same tick and session limits, and if no `observerMaster` is
//! between the client and the leader.
//!
//! A process that was stopped for more than a fifth of the session timeout (SIGSTOP, a paused machine) is granted
//! nothing at first: a claim is an error until the client has another connection, or for half of the session timeout.
//! Requests that wait go on afterwards. Leases that it still trusts are renewed.
//!
//! A renewal is confirmed by a write, because a server that is cut off from the others still answers reads. All
//! leases of a process that are due are renewed with one write and one read per lease, sent together.
//!
//! A lease survives the death of a leader, whose connections break at once. A leader that hangs is replaced only after
//! the servers' `syncLimit`, by default five ticks or 10 s. For leases to survive that, the session timeout must be
//! more than twice as long.
//!
//! # Fences
//!
//! The fence of a grant is the `czxid` of its child, shifted left by [`FENCE_SHIFT`] bits: each grant has 255 spare
//! fences. It rises across release, expiry, deletion of the key and changes of the leader. A fence stays below 2^62,
//! so the numbers last for 4,194,303 elections of a leader. After that, claims are refused with an error.
//!
//! A server that is restored from a backup, or a new ensemble, starts again with low numbers.
#![deny(missing_docs)]

mod builder;
mod child;
mod claim;
mod claimed;
mod claims;
mod error;
#[cfg(test)]
mod faults;
#[cfg(any(test, feature = "_fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod key;
mod layout;
mod look;
mod note;
mod pulse;
mod release;
mod remove;
mod renew;
mod session;
mod store;
mod sweep;
mod wake;
mod watch;

pub use crate::{
    builder::ZooKeeperStoreBuilder,
    child::FENCE_SHIFT,
    error::{ConnectError, NotConnected, NumbersExhausted, Unfit},
    layout::Layout,
    store::ZooKeeperStore,
};
/// The client, for [`ZooKeeperStoreBuilder::connector`] and [`ZooKeeperStoreBuilder::acls`].
pub use zookeeper_client;
