//! Everything that speaks SQL. A strategy is written once, over the operation trait in its own file; each database implements
//! these traits in a folder of its own, with the only SQL of the crate.
//!
//! Each operation is bind, run, map: one statement where the database can, no policy. The traits are implemented on
//! sqlx's marker types ([`sqlx::Postgres`], [`sqlx::MySql`], [`sqlx::Sqlite`]) behind the feature of the same name,
//! and are sealed: users name them in bounds, and implement [`LeaseStore`](crate::LeaseStore) for other stores.

use std::future::Future;

use sqlx::Pool;

use crate::key::Key;

pub(crate) mod conn;
mod dialect;
mod fault;
mod history;
pub(crate) mod holder;
pub(crate) mod ident;
mod lease;
#[cfg(feature = "mysql")]
mod mysql;
pub(crate) mod named;
mod pool;
#[cfg(feature = "postgres")]
mod postgres;
mod query;
pub(crate) mod row;
pub(crate) mod schema;
pub(crate) mod session;
#[cfg(any(feature = "sqlite", feature = "sqlite-unbundled"))]
mod sqlite;
mod statement;
pub(crate) mod stock;
pub(crate) mod tx;
mod units;
pub(crate) mod version;

pub use dialect::{AsConnection, Dialect};
pub(crate) use dialect::{Known, Sessions, counted_depth, depth, sealed};
pub(crate) use fault::{failed, failed_on_own_table, fault_in_chain};
pub use lease::LeaseOps;
pub use named::NamedOps;
pub(crate) use named::Sharing;
pub(crate) use pool::{address, check_in, checkout, connection, starved};
#[cfg(feature = "postgres")]
pub use postgres::behind_pooler;
pub(crate) use query::{By, Columns, RowQuery, SaveQuery, Strength, Values, VersionQuery};
pub use row::ops::RowOps;
pub(crate) use row::ops::{Access, Plan};
pub use session::{ServerSession, SessionAnswer, SessionOps};
pub use stock::ops::StockOps;
pub(crate) use stock::ops::{Look, Segment};
pub use version::ops::{RowsAffected, VersionOps};

/// Hearing that a lease was given back, instead of asking again and again.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot tell those who wait that a lease was given back",
    note = "only PostgreSQL can (LISTEN and NOTIFY); elsewhere waiters ask again and again, which needs no setting"
)]
pub trait ListenOps: LeaseOps {
    /// A connection that hears.
    type Listener: Send;

    /// Opens one.
    fn listen(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Self::Listener>> + Send;

    /// Lets those who free the lease know that somebody waits for it.
    fn listen_for(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Nobody waits for it here any more.
    fn listen_no_more(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Waits until a lease was given back; `None` when the connection broke, and something may not have been heard.
    fn heard(listener: &mut Self::Listener) -> impl Future<Output = sqlx::Result<Option<Key>>> + Send;
}
