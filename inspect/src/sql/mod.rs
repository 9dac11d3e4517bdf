//! What an operator asks a database. All SQL of this crate is in the folders below; they share no statement.

#[cfg(any(feature = "mysql", feature = "postgres"))]
mod columns;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::future::Future;

use lockkit::{Key, dialect::Dialect};
use sqlx::{Database, Pool, Result};

#[cfg(all(any(test, feature = "_fuzz"), feature = "sqlite"))]
pub use self::sqlite::check_statement;
use crate::{Finding, Plan, Waits};

/// A database, as an operator sees it. It is implemented for each one that a feature has switched on.
///
/// # Errors
///
/// Each of its functions fails if the connection does, or if the server refuses a statement. What a user lacks the
/// right to see is no error: the answer says which statement grants it.
///
/// # Cancel safety
///
/// Each only reads, and a call that is dropped leaves no setting behind.
pub trait Inspect: Dialect {
    /// The locks that sessions wait for, and the sessions that wait or hold them. Leases are not among them. The keys
    /// are those whose locks can be named, where the server knows a hash only.
    fn waits(conn: &mut Connection<Self>, keys: &[Key]) -> impl Future<Output = Result<Waits>> + Send;

    /// What is wrong with the server, its settings, and the rights on lockkit's tables, of the user or of `role`.
    fn findings(conn: &mut Connection<Self>, role: Option<&str>) -> impl Future<Output = Result<Vec<Finding>>> + Send;

    /// How many connections the server has at most, and the statement that sets it. `None` where nothing limits them.
    fn most_connections(conn: &mut Connection<Self>) -> impl Future<Output = Result<Option<(u64, SetMost)>>> + Send;

    /// Whether session locks work. `None` where there are none.
    fn session_locks(pool: &Pool<Self>) -> impl Future<Output = Option<lockkit::Result<()>>> + Send;

    /// How the server would run this statement, for which [`Plan::is_for`] holds. The statement is not run. Several
    /// statements in one text are an error.
    fn plan(conn: &mut Connection<Self>, statement: &str) -> impl Future<Output = Result<Plan>> + Send;
}

/// Writes the statement that sets how many connections the server has at most.
pub type SetMost = fn(u64) -> String;

type Connection<DB> = <DB as Database>::Connection;
