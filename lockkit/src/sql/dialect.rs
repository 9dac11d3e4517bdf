//! A database that lockkit speaks to: its faults, its transactions, its schema, and the types that are its connections.

use std::{fmt::Debug, future::Future, time::Duration};

use sqlx::{Database, Pool, Transaction, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager;

use crate::{
    error::{Error, Fault},
    policy::Wait,
    sql::failed,
};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// A database that has what lockkit's locks need, or what those of `Ops` need besides.
///
/// Only for error messages: what is computed from `Itself` has no type where the database lacks them, and rustc reports
/// one mistake instead of one for each step.
pub trait Known<Ops = ()>: Database {
    /// The same database.
    type Itself: Database;
}

/// What session locks need besides.
#[derive(Debug)]
pub enum Sessions {}

/// A database that lockkit speaks to: its faults, its transactions and its schema.
#[diagnostic::on_unimplemented(
    message = "lockkit does not know the database `{Self}`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::Dialect`, or that of the lock, such as `DB: lockkit::RowOps`"
)]
pub trait Dialect:
    Database<Arguments: Clone + Debug + Sync, ArgumentBuffer: Default, Connection: AsConnection<Self>>
    + Known<Itself = Self>
    + sealed::Sealed
{
    /// Whether a network stands between this process and the database, so that an answer may never come.
    const IS_REMOTE: bool = true;

    /// Whether an open transaction of `begin` keeps out all others, because one lock serves all writers.
    const ONE_WRITER: bool = false;

    /// Whether `begin` changes settings of the session, so that `restore_session` must follow the end of the transaction.
    const CHANGES_SESSION: bool;

    /// What a driver's error means. Decided by code; text is never matched.
    fn fault(err: &sqlx::Error) -> Fault;

    /// How long the connection waits for the lock of the whole database. `None` where there is no such lock.
    fn waits_for(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<Option<Duration>>> + Send;

    /// Makes the connection wait for the lock of the whole database for so long.
    fn wait_for(conn: &mut Self::Connection, wait: Duration) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Finds out what must be known of the database before the first statement on a connection of this pool. What goes
    /// wrong here goes wrong again at that statement.
    fn greet(conn: &mut Self::Connection, pool: &Pool<Self>) -> impl Future<Output = ()> + Send;

    /// What the server is not suited for, to be told once: asked at the first `begin` on each server, empty afterwards.
    fn caveats(pool: &Pool<Self>, conn: &mut Self::Connection) -> impl Future<Output = Vec<&'static str>> + Send;

    /// Begins a READ COMMITTED transaction, or takes the write lock where that is the only lock there is.
    fn begin(conn: &mut Self::Connection, wait: Wait) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Fails when the database has already ended the transaction of `begin`, unless it refuses every further statement
    /// then.
    fn check_begun(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Commits the transaction of `begin` that `check_begun` found open.
    fn commit(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Restores the settings of the session that `begin` changed, and rolls back what ran after the transaction ended.
    fn restore_session(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Fails when the database has already ended a transaction of the application's that the connection is thought to
    /// be in.
    fn check_open(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// How deep the connection is in transactions that sqlx began: zero outside of any. Waits until the driver has done
    /// what a dropped transaction left to do, where its count is not right before.
    fn depth(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<usize>> + Send;

    /// Whether no transaction is open on the connection, by the word of the database.
    fn is_idle(conn: &mut Self::Connection) -> impl Future<Output = bool> + Send;

    /// Whether the user lacks a right. Decided by code.
    fn is_denied(err: &sqlx::Error) -> bool;

    /// Applies lockkit's migrations.
    fn migrate(pool: &Pool<Self>) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A connection, or a transaction, whose type tells its database, so that `RowLock::table("t").by("id", 7).lock(&mut tx)`
/// needs no type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a connection to a database that lockkit knows",
    label = "pass the transaction, `&mut tx`, or the connection inside it, `&mut *tx`"
)]
pub trait AsConnection<DB: Database>: Send + sealed::Sealed {
    /// The connection.
    fn as_connection(&mut self) -> &mut DB::Connection;
}

impl<DB: Dialect> sealed::Sealed for Transaction<'_, DB> {}

impl<DB: Dialect> AsConnection<DB> for Transaction<'_, DB> {
    fn as_connection(&mut self) -> &mut DB::Connection {
        self
    }
}

impl<DB: Dialect> sealed::Sealed for PoolConnection<DB> {}

impl<DB: Dialect> AsConnection<DB> for PoolConnection<DB> {
    fn as_connection(&mut self) -> &mut DB::Connection {
        self
    }
}

/// How deep the connection is in transactions: zero outside of any.
pub(crate) async fn depth<DB: Dialect>(conn: &mut DB::Connection) -> Result<usize, Error> {
    DB::depth(conn).await.map_err(|err| failed::<DB>("counting the open transactions", None, err))
}

/// As [`depth`], by what sqlx has counted so far: on SQLite only right after the connection has answered something.
pub(crate) fn counted_depth<DB: Database>(conn: &DB::Connection) -> usize {
    DB::TransactionManager::get_transaction_depth(conn)
}
