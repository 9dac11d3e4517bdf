//! Leases of [lockkit] in Redis or Valkey.
//!
//! [`RedisStore`] keeps leases in one server, or in the master that Sentinel names. [`Quorum`] keeps them in a majority
//! of several independent servers. Both are a [`LeaseStore`](lockkit::LeaseStore): requests, waiting, renewal and loss
//! are those of [`lockkit::Leases`].
//!
//! ```no_run
//! use lockkit::Leases;
//! use lockkit_redis::{RedisStore, redis::Client};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::connect(Client::open("redis://localhost/")?).await?;
//! let leases = Leases::new(store);
//! leases.lease("nightly").run(|_| async { Ok::<_, lockkit::Error>(()) }).await?;
//! # Ok(()) }
//! ```
//!
//! # Which one should you use?
//!
//! | | survives | use another when |
//! |---|---|---|
//! | [`RedisStore`], one server | nothing: no leases while the server is down | its downtime must not stop the service |
//! | [`RedisStore`] with Sentinel | the master: a pause of its failover, one longest ttl and 20 s | the pause is too long |
//! | [`Quorum`] | less than half of the servers, without a pause; no [repair](Quorum) of held leases | you need semaphores, readers and writers, or `fair` |
//!
//! A stale holder must not write. A transaction in PostgreSQL, MySQL, MariaDB or SQLite that begins with
//! `Lease::guard`, of lockkit's features for these databases, refuses one. Give [`Lease::fence`] to other resources
//! that the lease protects, and let them refuse a lower one. The domain of the fences is `redis`, and `redis-quorum`
//! for a quorum.
//!
//! # What is in Redis
//!
//! The lock of the key `name` is the string `name`. Its value is the token of its holder, and it expires with the
//! lease. So clients that lock with `SET name … NX PX …` and leases exclude each other. [`Layout::Redisson`] writes the
//! lock as Redisson does. The server's other data share the names: give keys a prefix of their own.
//!
//! A value that lockkit did not write is never overwritten, neither at the name of a lease nor at those of lockkit's
//! own data below. If the name has a value of another type, requests, [`Leases::show`] and [`Leases::steal`] fail and
//! say what is there; [`Leases::list`] and the sweep pass it over. A string is a lock of another client.
//! [`Leases::steal`] frees it only if it has an expiry, because a value without one may be data. Of its value, at most
//! the first 8 characters are shown.
//!
//! Beside the lock is its row, the string `lockkit:{name}` with the fence and the holder. It outlives the lease. The
//! sorted sets `lockkit:names` and `lockkit:times` find keys, the hash `lockkit:epoch` says what the server remembers,
//! and the string `lockkit:open` says for a second that it was checked. [`Leases::list`] shows the leases that lockkit
//! granted. [`Leases::show`] and [`Leases::steal`] also know locks of other clients.
//!
//! **Fences** are the greatest of the server's clock in microseconds and the last fence of the key plus one. Each grant
//! has 127 spare fences ([`Grant::spare_fences`](lockkit::store::Grant::spare_fences)). With up to 7,800 grants a
//! second of one key, its fences stay below the clock, so that they also rise across a loss of the memory.
//!
//! **One round trip** for each operation, even for 500 renewals: each is one script. A list looks at 1,000 names in
//! one.
//!
//! # When the server forgets
//!
//! A server forgets leases in a restart without an append-only file that is written at once, in a failover to a replica
//! that lagged behind, and by `FLUSHALL`. Their holders get no message. So a server grants nothing for the longest ttl
//! ([`RedisStoreBuilder::longest_ttl`], 1 minute by default) after each restart, promotion and flush: the quarantine.
//! By its end, the forgotten holders have renewed in vain, or their leases have expired. Leases that the server still
//! has can be renewed and released in the meantime. [`Leases::list`], and [`Leases::show`] of a lease that the server
//! does not have, fail in the quarantine: a writer that sees no readers would enter beside a forgotten one. The holder
//! in [`Error::Contended`] is then [`Holder::Unknown`], whose text says how long the quarantine lasts. A [`Quorum`] has
//! no readers and writers, and its servers answer.
//!
//! An acquisition checks the server, unless one did so within the last second. `lockkit:open` says that, and a server
//! loses it in a flush, or when it copies the data of another one; it does not count after a restart. One change is not
//! noticed: a server that follows another one without copying its data, and is promoted again, all within this second.
//!
//! A new server looks like one that forgot. Call [`RedisStore::declare_new`] once, when it is set up, or wait for the
//! quarantine to end.
//!
//! The quarantine is as long as the longest ttl that any client uses. Each client sends the server its own at each
//! acquisition, and learns the longest. A client that prolongs it may be too late, if the first client after the loss
//! has a shorter one and never met the other. Set the same `longest_ttl` in all processes. `min_hold` is forgotten with
//! the lease.
//!
//! **Two masters.** A planned failover by Sentinel (`SENTINEL FAILOVER`) leaves the old master writable for 10 to 12 s
//! after its successor is promoted, and its `ROLE` is `master` until then. So behind Sentinel the quarantine is the
//! longest ttl plus 20 s, and no shorter one is accepted. With several replicas, Sentinel switches only after they
//! follow the new master: add 10 s for each replica after the first with [`RedisStoreBuilder::quarantine`].
//!
//! A master that became a replica refuses renewals at once, also on connections that stayed open, and acquisitions from
//! the next check of the server. With `replica-read-only no`, which is not the default, it accepts writes, and so may
//! grant leases for one second more. The 20 s behind Sentinel include it. Without Sentinel, add to the quarantine the
//! time from the promotion of the new master to the demotion of the old one, and with that setting 1 s more.
//!
//! A master that is cut off from its replicas and from Sentinel goes on renewing while its replica is promoted, and
//! only its own settings can end that. Set `min-replicas-to-write 1` on the servers, and `min-replicas-max-lag` to at
//! most 10. Without Sentinel, also set [`RedisStoreBuilder::quarantine`] to the longest ttl plus `min-replicas-max-lag`
//! plus 2 s, because Redis counts the lag in whole seconds.
//!
//! **Eviction.** A server that may evict a lock is refused. Each new connection looks at its `maxmemory-policy`, and
//! one acquisition each second; so does one that finds a lock gone before its time. If the server has evicted keys
//! since, the quarantine begins. A server that is set to evict, and before the next look evicts a lock together with
//! the row beside it, or a lock of another client, is not detected.
//!
//! **Two databases that are exchanged.** `SWAPDB` takes the locks and the records of the server away with the data. If
//! the other database has no data of lockkit, the server looks like a new one, and the quarantine begins. If it has
//! them, such as after a second `SWAPDB`, this is not noticed, and leases that were granted in between may have two
//! holders. Keep leases in a database that is not exchanged, or stop all processes for the longest ttl.
//!
//! **A full server.** At its `maxmemory`, a server that evicts nothing grants no lease: requests of free leases fail
//! with its error, `OOM`. Everything else goes on, because it only changes or deletes values: renewals, repeated claims
//! of a lease that is held, releases, also with `min_hold`, lists and the sweep.
//!
//! # Clocks
//!
//! Leases expire by the server's clock. If it is set back, the next operation that meets a lease cuts its expiry to the
//! ttl of its last grant or renewal. A lock of another client lives longer by the step. If the clock is set forward,
//! leases expire early, and a lease may have two holders. In a [`Quorum`] this takes a majority of servers that
//! forgot the lease early or do not have it. If a clock is set back and the memory is lost, the next fence is lower by
//! the step.
//!
//! # Servers that do not answer
//!
//! Every call ends within [`connect_timeout`](RedisStoreBuilder::connect_timeout) and
//! [`answer_timeout`](RedisStoreBuilder::answer_timeout), 1 s each by default. A connection that broke or did not
//! answer is replaced. While requests wait, one more connection is subscribed to releases. It is closed one second
//! after the last waiter. Without it, waiters poll.
//!
//! One thread of the process (`lockkit-redis`) drives the connections of all stores. So they depend on none of your
//! runtimes: a runtime that is not driven, or has ended, delays no calls on others.
//!
//! # Rights
//!
//! A user of Redis needs the keys and the channels of the leases and `lockkit:*`, scripts (`EVAL`, `EVALSHA`), `INFO`,
//! `PUBLISH`, `SUBSCRIBE`, `PING`, and the commands in the scripts. `~* &* +@all -@dangerous -@admin +info` is enough.
//!
//! # Limits
//!
//! Redis 5 or later, or Valkey. A node of a Redis Cluster is refused, alone and in a [`Quorum`], because the keys of
//! one lease are in several slots. Use a server that is in no cluster, or a `Quorum` of such servers.
//!
//! # Features
//!
//! | feature | what it brings |
//! |---|---|
//! | `sentinel` | [`Server`] from a `redis::sentinel::SentinelClient` |
//! | `tls-rustls`, `tls-rustls-webpki-roots`, `tls-native-tls` | `rediss://` addresses |
//!
//! [`Lease::fence`]: lockkit::Lease::fence
//! [`Error::Contended`]: lockkit::Error::Contended
//! [`Holder::Unknown`]: lockkit::Holder::Unknown
//! [`Leases::list`]: lockkit::Leases::list
//! [`Leases::show`]: lockkit::Leases::show
//! [`Leases::steal`]: lockkit::Leases::steal
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod answer;
mod builder;
mod claim;
mod connection;
mod error;
mod fit;
#[cfg(any(test, feature = "_fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod layout;
mod look;
mod node;
mod quorum;
mod release;
mod renew;
mod runtime;
mod script;
mod server;
mod store;
mod sweep;
mod wake;

pub use redis;

pub use crate::{
    builder::RedisStoreBuilder, error::ConnectError, fit::Unfit, layout::Layout, quorum::Quorum, server::Server,
    store::RedisStore,
};
