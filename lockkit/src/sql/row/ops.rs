//! What a row lock asks of a database.

use std::future::Future;

use crate::{
    error::LockHolder,
    key::Key,
    sql::{Dialect, RowQuery, Values},
};

/// Row locks.
#[diagnostic::on_unimplemented(
    message = "lockkit has no row locks in the database `{Self}`",
    label = "row locks need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is `lockkit::RowOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::RowOps`"
)]
pub trait RowOps: Dialect {
    /// The text of the selection, without its lock and without the way to read it. What is known about the plan of one
    /// text is not believed of another one.
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

    /// The session that has rows of the table locked, if it is the only one beside this. `None` too where the server does not
    /// say.
    fn row_holder(
        conn: &mut Self::Connection,
        table: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;

    /// Whether the statement failed because the table has changed so that it cannot be read in the way that was found.
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

/// How to read the table, where the optimizer would not choose an index by itself. By default the choice is its own.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The clause that names the indexes to use.
    pub(crate) force: String,
    /// What to select of rows that are only counted, so that an index alone does not have it.
    pub(crate) columns: Option<String>,
    /// Whether the values are joined to the table.
    pub(crate) joined: bool,
}
