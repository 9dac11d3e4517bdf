//! What a row lock asks of a database.

use std::future::Future;

use sqlx::Database;

use crate::{
    holder::LockHolder,
    key::Key,
    sql::{Dialect, RowQuery, Values},
};

/// Row locks.
#[diagnostic::on_unimplemented(
    message = "lockkit has no row locks in the database `{Self}`",
    label = "row locks need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is `lockkit::dialect::RowOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::RowOps`"
)]
pub trait RowOps: Dialect + RowStatements {}

/// The statements of row locks. Hidden from users, who call the strategy.
pub trait RowStatements: Database {
    /// The text of the selection, without the locking clause and index hints. Plans are cached by this text.
    fn row_text(query: &RowQuery, values: &Values<Self>) -> String;

    /// How the selection finds its rows.
    fn row_plan(
        conn: &mut Self::Connection,
        query: &RowQuery,
        values: &Values<Self>,
    ) -> impl Future<Output = sqlx::Result<Plan>> + Send;

    /// Selects and locks the rows, read in this way. Inside a transaction.
    fn row_lock(
        conn: &mut Self::Connection,
        query: &RowQuery,
        values: Values<Self>,
        access: &Access,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// The session that has rows of the table locked, if there is exactly one other than this. `None` also where the
    /// server does not tell.
    fn row_holder(
        conn: &mut Self::Connection,
        table: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;

    /// Whether the statement failed because the table changed and the index or column of the plan no longer exists.
    fn row_plan_is_old(err: &sqlx::Error) -> bool;
}

/// How the rows of a lock are found.
#[derive(Debug, Clone)]
pub enum Plan {
    /// An index serves, if the table is read in this way.
    Served(Access),
    /// The same, for these values: others may not be in the index.
    ServedOnce(Access),
    /// The values match nothing, so that there is no plan to judge.
    NoRows,
    /// The whole table is read. The plan, in the database's words.
    Scan(String),
    /// It is a view, whose rows cannot be locked, or not by an index of its own.
    View,
}

/// How to read the table where the optimizer would not choose an index. By default the optimizer chooses.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The clause that names the indexes to use.
    #[cfg_attr(not(feature = "mysql"), allow(dead_code))]
    pub(crate) force: String,
    /// What to select of rows that are only counted: a column that no index covers.
    #[cfg_attr(not(feature = "mysql"), allow(dead_code))]
    pub(crate) columns: Option<String>,
    /// Whether the values are joined to the table.
    #[cfg_attr(not(feature = "mysql"), allow(dead_code))]
    pub(crate) joined: bool,
}
