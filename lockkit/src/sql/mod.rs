//! All SQL of the crate. A strategy is written once, over the operation trait in its own file. Each database implements
//! these traits in its own folder, which contains all of its SQL.
//!
//! Each operation binds, runs and maps: one statement where the database can, and no policy. The traits are implemented
//! on sqlx's marker types ([`sqlx::Postgres`], [`sqlx::MySql`], [`sqlx::Sqlite`]) behind the feature of the same name,
//! and are sealed. Users name them in bounds, and implement [`LeaseStore`](crate::LeaseStore) for other stores.

mod commit;
pub(crate) mod conn;
mod dialect;
mod drivers;
mod fault;
pub(crate) mod fence_guard;
mod history;
pub(crate) mod holder;
#[cfg(feature = "idempotent")]
pub(crate) mod idempotent;
pub(crate) mod ident;
mod lease;
mod listen;
mod locked;
pub(crate) mod long;
#[cfg(feature = "mysql")]
mod mysql;
pub(crate) mod named;
mod pool;
mod pool_state;
#[cfg(feature = "postgres")]
mod postgres;
mod query;
pub(crate) mod reuse;
pub(crate) mod row;
pub(crate) mod schema;
pub(crate) mod session;
#[cfg(feature = "shedlock")]
pub(crate) mod shedlock;
#[cfg(feature = "testing")]
pub mod simulated;
mod spare;
#[cfg(any(feature = "sqlite", feature = "sqlite-unbundled"))]
mod sqlite;
mod starved;
#[cfg(any(feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled"))]
mod statement;
pub(crate) mod stock;
mod store;
pub(crate) mod tx;
mod units;
pub(crate) mod version;
mod warm;

#[cfg(feature = "postgres")]
pub use self::postgres::behind_pooler;
pub use dialect::{AsConnection, Dialect};
pub(crate) use dialect::{
    Driver, Known, Sessions, counted_depth, depth, in_step, in_transaction, note_answer, sealed, still_in_transaction,
};
#[cfg(any(feature = "postgres", feature = "sqlite", feature = "sqlite-unbundled"))]
pub(crate) use dialect::{begin_counted, uncount};
pub(crate) use drivers::{driver_fault, fault_in_chain};
pub(crate) use fault::{failed, failed_on_own_table};
pub use fence_guard::FenceGuardOps;
pub(crate) use fence_guard::FenceGuardStatements;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use fence_guard::GUARD_SECONDS;
#[cfg(feature = "idempotent")]
pub use idempotent::ops::IdempotentOps;
#[cfg(feature = "idempotent")]
pub(crate) use idempotent::ops::{IdempotentStatements, StoredAnswer};
pub use lease::LeaseOps;
pub(crate) use lease::LeaseStatements;
#[cfg(any(test, feature = "_fuzz"))]
pub use lease::{check_lease_row, check_prefix};
pub use listen::ListenOps;
#[cfg(feature = "postgres")]
pub(crate) use listen::ListenStatements;
pub use named::NamedOps;
pub(crate) use named::{Granted, NamedStatements, Names, Sharing};
pub(crate) use pool::{END_LIMIT, Unsettled, check_in, checked_in, checkout, close, connection};
pub(crate) use query::{By, Columns, RowQuery, SaveQuery, Strength, Values, VersionQuery};
pub use row::ops::RowOps;
pub(crate) use row::ops::{Access, Plan, RowStatements};
#[cfg(feature = "postgres")]
pub(crate) use session::AdvisoryNumber;
pub use session::SessionOps;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use session::{ServerSession, SessionAnswer, SessionName, SessionStatements};
#[cfg(feature = "shedlock")]
pub use shedlock::ops::ShedLockOps;
#[cfg(feature = "shedlock")]
pub(crate) use shedlock::ops::ShedLockStatements;
pub(crate) use starved::starved;
pub use stock::ops::StockOps;
pub(crate) use stock::{
    ops::{Look, Note, Portion, StockStatements},
    segment::Segment,
};
pub(crate) use version::ops::VersionStatements;
pub use version::ops::{RowsAffected, VersionOps};
