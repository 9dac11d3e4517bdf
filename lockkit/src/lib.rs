//! Row locks, named locks, leases with fencing tokens and optimistic versions, in the database that your service
//! already has: PostgreSQL, MySQL/MariaDB or SQLite, through [sqlx].
//!
//! # Which kind should you use?
//!
//! | | holds | for how long | use it when | use another when |
//! |---|---|---|---|---|
//! | [`RowLock`] | your own rows, `FOR UPDATE` | one transaction | the rows exist: read, check, write | the work calls other services |
//! | [`NamedLock`] | a name | one transaction | there is no row yet ("at most three orders per user") | the work outlives a transaction |
//! | [`Leases`] | a row with owner, expiry and fence | its ttl, renewed | work spans transactions or services; jobs | the work is one short transaction |
//! | [`SessionLock`] | a name, on its own connection | until released or cut off | a leader, freed at once by a crash | on SQLite; behind a pooler; for rows |
//! | [`VersionedStruct`], [`VersionedRow`], [`OrConflict`] | nothing | – | conflicts are rare, reads dominate | the row is hot |
//! | [`Stock`] | one of the rows of a divided counter | one statement, or your transaction | one very hot counter | the counter cannot be divided |
//!
#![cfg_attr(
    feature = "macros",
    doc = "Each is also one attribute on an `async fn`: [`#[with_lock]`](macro@with_lock). Versions are one line on a \
           struct: [`#[derive(Versioned)]`](derive@Versioned) gives it `load` and `save`.\n"
)]
//! # What to rely on
//!
//! - **A stale holder cannot commit.** [`Lease::commit`] makes a transaction conditional on still holding the lease,
//!   in the same atomic act. The work of a holder that was stopped, slow or cut off is rolled back.
//! - **Fencing tokens** ([`Fence`]) rise for ever, for resources outside the database.
//! - **Commit before release**, by construction.
//! - **Cancellation leaves nothing behind**: dropping any future of this crate at any await point leaves no lock past
//!   its bound, no open transaction and no broken connection.
//! - **Waiting for a lease holds no connection**, and one process sends one query per key, however many
//!   tasks wait.
//! - **A row lock that would scan the table is refused** before it is taken.
//! - **Uncommitted versions never escape**: after a rollback, a stale save cannot overwrite the work of another writer
//!   that reached the same number.
//!
//! What no lock can promise: that a process outside the database stops acting the instant its lease ends. Give such
//! resources the fence and let them refuse older ones.
//!
//! # Telemetry
//!
//! By [`tracing`](https://docs.rs/tracing), with the target `lockkit`:
//!
//! - the spans `lockkit.acquire` and `lockkit.hold` (`strategy`, `key`);
//! - the events `acquired`, `contended` (`waited`), `renewed` (`leases`, `took`), `released` (`fence`, `held`),
//!   `committed`, `retrying` (`attempt`, `pause`, `error`) and `swept` (`keys`);
//! - the warning `lost` (`fence`, `held`, `reason`), once for each lease or session lock;
//! - one warning for each outage in which renewals fail, or in which a process cannot wait to
//!   [lead](LeaseRequest::lead);
//! - a warning for two bodies of one process that acquire two leases in opposite orders (`key`, `other`);
//! - a warning for a row lock that scans its table or names a view, with [`PlanCheck::Warn`];
//! - at the first [`begin`] on a MySQL or MariaDB server, a warning for a node of a Galera cluster, for a member of a
//!   replication group with several primaries, and for a binary log of statements.
//!
//! By [`metrics`](https://docs.rs/metrics), with the feature `metrics`:
//!
//! - the counters `lockkit_acquired_total`, `lockkit_contended_total`, `lockkit_lost_total` and
//!   `lockkit_handed_on_total` (a lease was handed over inside this process), the gauges `lockkit_held` (leases and
//!   session locks that callers have) and `lockkit_waiting`, and the histograms `lockkit_wait_seconds` and
//!   `lockkit_hold_seconds`. Their labels are `strategy` and `prefix`: the part of the key before the first `:` or `/`,
//!   empty for a key without one;
//! - the counters `lockkit_retried_total` and `lockkit_pool_starved_total`, without labels;
//! - the histogram `lockkit_renew_seconds` of the statements that renew leases, with the label `outcome`: `answered` or
//!   `failed`.
//!
//! The repository has a dashboard for Grafana and alerts for Prometheus, in `dashboards`.
//!
//! # Features
//!
//! | feature | what it brings |
//! |---|---|
//! | `postgres`, `mysql` (also MariaDB), `sqlite` | locks in that database. None is on by default. No TLS is chosen; switch it on in sqlx |
//! | `sqlite-unbundled` | as `sqlite`, linked with the system's library |
//! | `sql` | what the databases have in common; each of them switches it on. Without it, leases work over other stores |
//! | `idempotent` | answers that are stored once, with the work |
//! | `shedlock` | ShedLock's table as a [store](store::ShedLockTable) of leases |
//! | `macros` (default) | the attribute and the derive |
//! | `metrics` | counters, gauges and histograms |
//! | `testing` | tools to test services that lock, in `lockkit::testing` |
#![deny(missing_docs)]
// What only one database or the tests use is compiled with all features or not at all. Dead code is what nothing uses
// when everything is compiled.
#![cfg_attr(
    not(all(
        feature = "postgres",
        feature = "mysql",
        feature = "sqlite",
        feature = "idempotent",
        feature = "shedlock",
        feature = "testing"
    )),
    allow(dead_code)
)]
#![cfg_attr(docsrs, feature(doc_cfg))]
// For shuttle (see below), neither the unit tests nor the documentation are built.
#![cfg(not(all(shuttle, any(doc, test))))]

mod body;
mod fifo;
pub mod lease;
// In `sim/threads`, shuttle decides the order of the threads.
#[cfg_attr(shuttle, path = "../../sim/threads/mutex.rs")]
mod mutex;
mod observe;
mod policy;
mod retry;
#[cfg(feature = "sql")]
// Without a database nothing implements the operations.
#[cfg_attr(
    not(any(feature = "mysql", feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled")),
    allow(dead_code, unused_imports, unused_macros, unused_variables)
)]
mod sql;
mod value;

#[cfg(feature = "testing")]
pub mod testing;

#[doc(hidden)]
#[path = "macro_support/mod.rs"]
pub mod __private;

/// Properties of what others wrote, for `fuzz/`.
#[cfg(any(test, feature = "_fuzz"))]
#[doc(hidden)]
pub mod fuzz {
    #[cfg(feature = "idempotent")]
    pub use crate::sql::idempotent::check_answer;
    #[cfg(feature = "sql")]
    pub use crate::sql::{check_lease_row, check_prefix, ident::check_identifier};
    pub use crate::{__private::check_template, value::key::check_key};
}

/// What the author of a store needs: [`LeaseStore`], and the words in which leases and stores talk.
pub mod store {
    #[cfg(feature = "shedlock")]
    pub use crate::sql::shedlock::ShedLockTable;
    pub use crate::{
        lease::store::{
            Acquired, AcquiredAll, Answer, Claim, Grant, LeaseRecord, LeaseStore, Previous, Profile, Release, Renewal,
        },
        value::{
            error::{BoxError, Raced},
            holder::LeaseInfo,
            token::Token,
        },
    };
}

/// Beside [`Versioned`](struct@Versioned) and [`VersionedRow`]: what a row is read and written by, and what a write
/// returns.
#[cfg(feature = "sql")]
pub mod version {
    pub use crate::sql::version::{Bumped, Columns, Expected, Saved, VersionField};
}

/// Databases, as bounds of generic functions: [`Dialect`](dialect::Dialect) for all that lockkit speaks to, and one
/// trait for each kind of lock. They are sealed, and their operations are called through the locks only. And lockkit's
/// [migrations](dialect::write_migrations) for each of them as files.
#[cfg(feature = "sql")]
pub mod dialect {
    #[cfg(feature = "idempotent")]
    pub use crate::sql::IdempotentOps;
    #[cfg(feature = "shedlock")]
    pub use crate::sql::ShedLockOps;
    #[cfg(feature = "postgres")]
    pub use crate::sql::behind_pooler;
    pub use crate::{
        sql::{
            AsConnection, Dialect, FenceGuardOps, LeaseOps, ListenOps, NamedOps, RowOps, RowsAffected, SessionOps,
            StockOps, VersionOps, conn::On, long::warn_of_long_transactions, reuse::reuse_connections,
            schema::write_migrations, tx::AnyTx,
        },
        value::holder::LockHolder,
    };
}

/// Beside [`Idempotent`]: work that leaves the database, and errors that are answers.
#[cfg(feature = "idempotent")]
pub mod idempotent {
    pub use crate::sql::idempotent::{Attempt, Outside, StoresErr};
}

pub use lease::{
    ending::Released,
    held::Lease,
    leases::Leases,
    request::{LeaseRequest, MultiLease},
    store::LeaseStore,
};
pub use policy::{Backoff, OnLost, RetryPolicy, Wait};
pub use retry::is_retryable;
#[cfg(feature = "idempotent")]
pub use sql::idempotent::{Answered, Idempotent};
#[cfg(feature = "sql")]
pub use sql::{
    fence_guard::{forget_fences, guard},
    named::NamedLock,
    row::{PlanCheck, RowLock},
    schema::migrate,
    session::{Session, SessionLock},
    stock::{Stock, Taken},
    tx::{Tx, begin},
    version::{OrConflict, Versioned, VersionedRow, VersionedStruct},
};
pub use value::error::{Error, Fault, LossReason, Result};
pub use value::fence::Fence;
pub use value::holder::Holder;
pub use value::key::Key;
pub use value::version::Version;

#[cfg(feature = "macros")]
pub use lockkit_macros::{Versioned, with_lock};

/// The [`Key`] of a template that captures variables, as `format!` does. `#[with_lock]` makes its keys in the same way,
/// so a lock taken by hand and one taken by the attribute exclude each other if both have the same template and values.
///
/// A capture is a variable, or its fields and calls without arguments, `{user.id}` and `{id.value()}`, with a format
/// after a colon, `{kind:?}`. Each capture is evaluated once.
///
/// A template never makes one key from two different sets of values, which a `format!` can:
///
/// ```
/// use lockkit::key;
///
/// let (date, id) = ("2026-01-31", "a:b");
/// assert_eq!(key!("report-{date}"), "report-2026-01-31");
/// assert_eq!(key!("{date}:{id}"), "2026-01-31:a%3Ab");
///
/// let order = (7, Some("x"));
/// assert_eq!(key!("order:{order.0}:{order.1:?}"), "order:7:Some(\"x\")");
/// ```
///
/// The rule, so that other programs can make the same key: between two captures, the first character that is neither a
/// letter, a digit nor `%` is a separator. In each value, `%`, control characters and all separators of the template
/// are replaced by `%` and two upper-case hexadecimal digits for each of their UTF-8 bytes. A template with one capture
/// has no separator.
///
/// Keys of different templates can be equal: `order:{id}` and `order:{id}:{item}` both make `order:7:1`. Give each kind
/// of lock a prefix of its own.
#[cfg(feature = "macros")]
#[macro_export]
macro_rules! key {
    ($($template:tt)*) => {
        $crate::__private::key_template!(($crate) $($template)*)
    };
}

/// Panics if the code that runs now is not under the lock of this key: not in a function under `#[with_lock]`, nor in a
/// body of [`LeaseRequest::run`], or in one whose lease was lost or released. The key of a row lock is the name of
/// its table.
///
/// With the feature `testing`, for tests. Without the feature it expands to nothing, and the key is not evaluated: code
/// whose safety depends on a lock that its callers take can say so, and pays for it in tests only.
///
/// Only the task that runs the body is under its locks: a task that it spawns may outlive them. The key of a permit,
/// reader or writer is that of its lease, such as `catalog/writer`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// async fn close_month() -> lockkit::Result<()> {
///     lockkit::assert_locked!("invoices");
///     Ok(())
/// }
///
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # let leases = lockkit::Leases::new(pool); leases.migrate().await?;
/// leases.lease("invoices").run(|_| close_month()).await?;
/// # Ok(()) }
/// ```
#[cfg(feature = "testing")]
#[macro_export]
macro_rules! assert_locked {
    ($key:expr $(,)?) => {
        $crate::testing::assert_locked($key)
    };
}

/// Nothing: the feature `testing` is off. With it, panics if the code that runs now is not under the lock of this key.
#[cfg(not(feature = "testing"))]
#[macro_export]
macro_rules! assert_locked {
    ($key:expr $(,)?) => {
        // Type-checks the key and marks its operands as used.
        if false {
            let _: $crate::Key = ::core::convert::Into::into($key);
        }
    };
}
