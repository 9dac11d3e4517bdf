//! The operations of a row lock that a database implements.

use std::future::Future;

use sqlx::Database;

use crate::{
    sql::{Dialect, RowQuery, Values},
    value::{holder::LockHolder, key::Key},
};

/// Row locks.
#[diagnostic::on_unimplemented(
    message = "lockkit has no row locks in the database `{Self}`",
    label = "row locks need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::RowOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::RowOps`"
)]
pub trait RowOps: Dialect + RowStatements {}

/// The statements of row locks. Hidden from the docs: users call the strategy.
pub trait RowStatements: Database {
    /// The text of the selection, without the locking clause and index hints. Plans are cached by this text.
    fn row_text(query: &RowQuery, values: &Values<Self>) -> String;

    /// How the database would find the rows of the selection.
    fn row_plan(
        conn: &mut Self::Connection,
        query: &RowQuery,
        values: &Values<Self>,
    ) -> impl Future<Output = sqlx::Result<Plan>> + Send;

    /// Selects and locks the rows, with this access to the table. Inside a transaction.
    fn row_lock(
        conn: &mut Self::Connection,
        query: &RowQuery,
        values: Values<Self>,
        access: &Access,
    ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

    /// The session that has rows of the table locked, if there is exactly one such session besides this one. `None`
    /// even where the server does not report it.
    fn row_holder(
        conn: &mut Self::Connection,
        table: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;

    /// Whether the statement failed because the table changed and the index or column of the plan no longer exists.
    fn row_plan_is_old(err: &sqlx::Error) -> bool;
}

/// How the database finds the rows of a lock.
#[derive(Debug, Clone)]
pub enum Plan {
    /// An index serves, with this access to the table.
    Served(Access),
    /// An index serves for these values; it may not contain other values.
    ServedOnce(Access),
    /// The values match nothing, so there is no plan to judge.
    NoRows,
    /// The whole table is read. Contains the plan, as the database prints it.
    Scan(String),
    /// The table is a view. Its rows cannot be locked, or not through an index of its own.
    View,
}

/// How to read the table where the optimizer would not choose an index. By default the optimizer chooses.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The clause that names the indexes to use.
    pub(crate) force: String,
    /// The column to select when rows are only counted: one that no index covers.
    pub(crate) columns: Option<String>,
    /// Whether the values are joined to the table.
    pub(crate) joined: bool,
    /// Whether at most one row matched when the plan was made, because of a unique index.
    pub(crate) is_one_row: bool,
}
