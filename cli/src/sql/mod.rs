//! What an operator asks a database. All SQL of this crate is in the folders below; they share no statement.

mod mysql;
mod postgres;
mod sqlite;

use std::future::Future;

use lockkit::{Key, dialect::Dialect};
use sqlx::{Database, Pool, Result};

use crate::{
    doctor::finding::{Finding, Plan},
    explain::picture::{Session, Wait},
};

/// A database, as an operator sees it.
pub(crate) trait Inspect: Dialect {
    /// What each lock that a session waits for is called, and who has it. Leases are not among them. The keys are those
    /// whose locks can be named, where the server knows a hash only. Also returns what the user may not see.
    fn waits(conn: &mut Connection<Self>, keys: &[Key]) -> impl Future<Output = Result<(Vec<Wait>, Vec<String>)>>;

    /// The sessions with these numbers.
    fn sessions(conn: &mut Connection<Self>, ids: &[i64]) -> impl Future<Output = Result<Vec<Session>>>;

    /// What is wrong with the server, its settings, and the rights on lockkit's tables, of the user or of `role`.
    fn findings(conn: &mut Connection<Self>, role: Option<&str>) -> impl Future<Output = Result<Vec<Finding>>>;

    /// How many connections the server has at most, and the statement that sets it. `None` where nothing limits them.
    fn most_connections(conn: &mut Connection<Self>) -> impl Future<Output = Result<Option<(u64, SetMost)>>>;

    /// Whether session locks work. `None` where there are none.
    fn session_locks(pool: &Pool<Self>) -> impl Future<Output = Option<lockkit::Result<()>>>;

    /// How the server would run this statement.
    fn plan(conn: &mut Connection<Self>, statement: &str) -> impl Future<Output = Result<Plan>>;
}

/// Writes a statement.
pub(crate) type SetMost = fn(u64) -> String;

type Connection<DB> = <DB as Database>::Connection;
