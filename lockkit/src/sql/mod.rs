//! What lockkit asks of a database, one small trait per strategy. The files below hold the only SQL of the crate.
//!
//! Each operation is bind, run, map: one statement where the database can, no policy. The traits are implemented on
//! sqlx's marker types ([`sqlx::Postgres`], [`sqlx::MySql`], [`sqlx::Sqlite`]) behind the feature of the same name,
//! and are sealed: users name them in bounds, and implement [`LeaseStore`](crate::LeaseStore) for other stores.

use std::{error::Error as StdError, fmt::Debug, future::Future, ops::RangeInclusive, time::Duration};

use sqlx::{Database, Pool, Transaction, error::DatabaseError, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager;

use crate::{
    error::{Error, Fault, LockHolder, chain},
    fence::Fence,
    key::Key,
    lease::store::{Acquired, AcquiredAll, Claim, Held, Release, Renewal, Scoped, Token},
    policy::Wait,
    version::Version,
};

pub(crate) mod conn;
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
pub(crate) mod stock;
pub(crate) mod tx;
pub(crate) mod version;

pub(crate) use pool::{address, check_in, checkout, connection, starved};
#[cfg(feature = "postgres")]
pub use postgres::behind_pooler;
pub(crate) use query::{By, Columns, RowQuery, SaveQuery, Strength, Values, VersionQuery};

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

#[cfg(feature = "postgres")]
impl Known for sqlx::Postgres {
    type Itself = Self;
}

#[cfg(feature = "postgres")]
impl Known<Sessions> for sqlx::Postgres {
    type Itself = Self;
}

#[cfg(feature = "mysql")]
impl Known for sqlx::MySql {
    type Itself = Self;
}

#[cfg(feature = "mysql")]
impl Known<Sessions> for sqlx::MySql {
    type Itself = Self;
}

#[cfg(any(feature = "sqlite", feature = "sqlite-unbundled"))]
impl Known for sqlx::Sqlite {
    type Itself = Self;
}

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

/// Leases in the table `lockkit_lease`.
#[diagnostic::on_unimplemented(
    message = "lockkit has no leases in the database `{Self}`",
    label = "leases need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is `lockkit::LeaseOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::LeaseOps`"
)]
pub trait LeaseOps: Dialect {
    /// See [`LeaseStore::lease_acquire`](crate::LeaseStore::lease_acquire).
    fn lease_acquire(conn: &mut Self::Connection, claim: &Claim)
    -> impl Future<Output = sqlx::Result<Acquired>> + Send;

    /// See [`LeaseStore::lease_acquire_all`](crate::LeaseStore::lease_acquire_all).
    fn lease_acquire_all(
        conn: &mut Self::Connection,
        claims: &[Claim],
    ) -> impl Future<Output = sqlx::Result<AcquiredAll>> + Send;

    /// See [`LeaseStore::lease_look`](crate::LeaseStore::lease_look).
    fn lease_look(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<Option<Held>>> + Send;

    /// Cuts the expiry of a lease, read by an earlier statement, to its ttl from now, if the row still has both and the
    /// expiry is further away than that. Never waits for the row.
    ///
    /// Compared with the earlier read because a statement may be older than the row that it finds: what was there before
    /// the statement began was not written later than now, unless the clock was set back.
    fn lease_cut(
        conn: &mut Self::Connection,
        key: &Key,
        expires_us: i64,
        ttl_us: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// See [`LeaseStore::lease_renew`](crate::LeaseStore::lease_renew).
    fn lease_renew(
        conn: &mut Self::Connection,
        renewals: &[Renewal],
    ) -> impl Future<Output = sqlx::Result<Vec<Scoped>>> + Send;

    /// See [`LeaseStore::lease_release`](crate::LeaseStore::lease_release).
    fn lease_release(
        conn: &mut Self::Connection,
        key: &Key,
        token: Token,
        min_hold: Duration,
    ) -> impl Future<Output = sqlx::Result<Scoped>> + Send;

    /// See [`LeaseStore::lease_release_all`](crate::LeaseStore::lease_release_all).
    fn lease_release_all(
        conn: &mut Self::Connection,
        releases: &[Release],
    ) -> impl Future<Output = sqlx::Result<Vec<Scoped>>> + Send;

    /// Inside a transaction: keeps everybody else from taking the lease until the transaction ends, while its holder may
    /// go on renewing it where the database can tell the two apart. `false` when the token no longer holds it.
    fn lease_pin(
        conn: &mut Self::Connection,
        key: &Key,
        token: Token,
        ttl: Duration,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Inside a transaction: gives the lease back as part of it. `false` when the token no longer holds it. Where the lease
    /// was pinned before, nobody can have taken it, even if its time is over by now.
    fn lease_give_up(
        conn: &mut Self::Connection,
        key: &Key,
        token: Token,
        min_hold: Duration,
        pinned: bool,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// See [`LeaseStore::lease_list`](crate::LeaseStore::lease_list).
    fn lease_list(
        conn: &mut Self::Connection,
        prefix: &str,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<Vec<Held>>> + Send;

    /// See [`LeaseStore::lease_sweep`](crate::LeaseStore::lease_sweep).
    fn lease_sweep(
        conn: &mut Self::Connection,
        retention: Duration,
        limit: u32,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;
}

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
    force: String,
    /// What to select of rows that are only counted, so that an index alone does not have it.
    columns: Option<String>,
    /// Whether the values are joined to the table.
    joined: bool,
}

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

/// With whom a named or session lock is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// With nobody.
    Alone,
    /// With all who share it, too.
    Shared,
}

/// Named locks for a transaction.
#[diagnostic::on_unimplemented(
    message = "lockkit has no named locks in the database `{Self}`",
    label = "named locks need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is `lockkit::NamedOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::NamedOps`"
)]
pub trait NamedOps: Dialect {
    /// Takes the lock for the rest of the transaction. `false` when somebody else holds it and there is no waiting.
    fn named_lock(
        conn: &mut Self::Connection,
        key: &Key,
        sharing: Sharing,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The session that holds the lock, another one than this if there is one. `None` too where the server does not say.
    fn named_holder(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;
}

/// Locks of a session of the server, which outlive its transactions and end with it.
///
/// Every operation names the session it must run in, so that a pooler or proxy which moved the connection to another
/// one is noticed, and nothing is locked there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no session locks",
    label = "this database has no session locks",
    note = "PostgreSQL, MySQL and MariaDB have them, with lockkit's feature `postgres` or `mysql`; in a generic function, write the bound `DB: lockkit::SessionOps`",
    note = "use a lease (`lockkit::Leases`), which survives its connection, or a `lockkit::NamedLock` for one transaction"
)]
pub trait SessionOps: Dialect + Known<Sessions, Itself = Self> {
    /// Whether poolers for this database lend a session to other connections between two transactions, even while it
    /// holds a lock.
    const POOLERS_SHARE_SESSIONS: bool;

    /// Whether several sessions can share a lock.
    const HAS_SHARED_LOCKS: bool;

    /// The session that runs this statement. Never a prepared statement, which such a pooler may lose.
    fn session_look(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<ServerSession>> + Send;

    /// Takes the lock, or waits for it up to `slice`, or less where the server counts in seconds.
    fn session_lock(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
        sharing: Sharing,
        slice: Duration,
    ) -> impl Future<Output = sqlx::Result<SessionAnswer>> + Send;

    /// Whether the session holds the lock.
    fn session_holds(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Gives the lock back. `false` when the session did not hold it.
    fn session_unlock(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
        sharing: Sharing,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The session that holds the lock.
    fn session_holder(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;
}

/// A session of the server, as it describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerSession {
    pub(crate) id: i64,
    /// Others lock on another server than this one.
    pub(crate) is_replica: bool,
}

/// What became of one question for a session lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAnswer {
    /// The session holds it now, and did not before.
    Granted,
    /// It was held, by another session or by this one already.
    Held,
    /// The statement ran in another session than it named, and locked nothing.
    Elsewhere,
}

/// Versions of rows.
pub trait VersionOps: Dialect {
    /// Reads the row and its version.
    fn version_read(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
    ) -> impl Future<Output = sqlx::Result<Option<(Self::Row, Version)>>> + Send;

    /// Moves the version from `expected` to its successor and returns that; `None` when the row has another version.
    fn version_bump(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> impl Future<Output = sqlx::Result<Option<Version>>> + Send;

    /// Writes the columns and adds one to the version. `false` when the row has another version than `expected`, and
    /// nothing was written. The values of the columns come before those of the key.
    fn version_save(
        conn: &mut Self::Connection,
        query: &SaveQuery,
        values: Values<Self>,
        expected: i64,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Deletes the row. `false` when it has another version than `expected`, or is gone.
    fn version_delete(
        conn: &mut Self::Connection,
        query: &VersionQuery,
        values: Values<Self>,
        expected: &Version,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;
}

/// Stocks in the table `lockkit_stock`.
///
/// Whoever waits for segments locks them in their order, so that nobody deadlocks. Segments are made, removed and filled
/// by whoever has all of them locked, segment 0 first; it is never removed.
pub trait StockOps: Dialect {
    /// Takes the amount from one segment that has as much and that nobody has locked, looking at `first` before the others.
    /// Never waits, and keeps no lock of what it passed over. `None` when there is no such segment.
    fn stock_take_any(
        conn: &mut Self::Connection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> impl Future<Output = sqlx::Result<Option<u32>>> + Send;

    /// The segments in their order, as they were at one instant; what others have taken but not committed is in them.
    fn stock_look(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<Look>> + Send;

    /// Inside a transaction: locks these segments in their order, and returns what they hold now.
    fn stock_lock(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<Vec<Segment>>> + Send;

    /// Inside a transaction: makes segment 0, empty, unless it is there.
    fn stock_make(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: writes what these segments hold, all of which it has locked or makes under the lock of
    /// segment 0.
    fn stock_write(
        conn: &mut Self::Connection,
        key: &Key,
        segments: &[Segment],
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: removes these segments, all of which it has locked.
    fn stock_remove(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// One of the rows that a stock is spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub(crate) number: u32,
    pub(crate) quantity: u64,
}

/// The segments of a stock, as a read without locks found them.
#[derive(Debug, Clone)]
pub struct Look {
    pub(crate) segments: Vec<Segment>,
    /// Whether they were read as of now, even inside a transaction that has read before.
    pub(crate) is_current: bool,
}

/// How many rows a statement changed, on each database's query result.
pub trait RowsAffected: sealed::Sealed {
    /// The number of rows.
    fn affected(&self) -> u64;
}

/// An error of the database, in lockkit's words.
pub(crate) fn failed<DB: Dialect>(doing: &'static str, key: Option<&Key>, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::StatementLog => Error::StatementLog { doing, key: key.cloned(), source },
        fault => Error::Database { doing, key: key.cloned(), fault, source },
    }
}

/// As [`failed`], where a missing table or column can only be lockkit's own, and what the encoding lacks is in the key.
pub(crate) fn failed_on_own_table<DB: Dialect>(doing: &'static str, key: Option<&Key>, source: sqlx::Error) -> Error {
    let fault = DB::fault(&source);
    if let Some(key) = key
        && fault == Fault::Encoding
        && !key.is_ascii()
    {
        let reason = "the database's encoding does not have all of its characters; use others, or a database in UTF8";
        return Error::InvalidKey { key: key.to_string(), reason };
    }
    if fault == Fault::NoTable {
        return Error::NotMigrated {
            hint: "run `leases.migrate().await` or `lockkit::migrate(&pool).await` once at start, or \
                   `sqlx migrate run --source <lockkit>/migrations/<database> --config <lockkit>/migrations/sqlx.toml`; \
                   where that command has nothing to do, the table was dropped and its history kept: delete the rows of \
                   `_lockkit_migrations` first (the migrations can be repeated)",
            source,
        };
    }
    failed::<DB>(doing, key, source)
}

/// How deep the connection is in transactions: zero outside of any.
pub(crate) async fn depth<DB: Dialect>(conn: &mut DB::Connection) -> Result<usize, Error> {
    DB::depth(conn).await.map_err(|err| failed::<DB>("counting the open transactions", None, err))
}

/// As [`depth`], by what sqlx has counted so far: on SQLite only right after the connection has answered something.
pub(crate) fn counted_depth<DB: Database>(conn: &DB::Connection) -> usize {
    DB::TransactionManager::get_transaction_depth(conn)
}

/// The fault of an error of any kind: the first that a driver reported, down its chain of sources.
pub(crate) fn fault_in_chain(err: &(dyn StdError + 'static)) -> Option<Fault> {
    chain(err).find_map(driver_fault)
}

fn driver_fault(err: &(dyn StdError + 'static)) -> Option<Fault> {
    let err = match err.downcast_ref::<Box<dyn DatabaseError>>() {
        Some(boxed) => boxed.as_error(),
        None => err,
    };
    #[cfg(feature = "postgres")]
    if let Some(err) = err.downcast_ref() {
        return Some(postgres::fault_of(err));
    }
    #[cfg(feature = "mysql")]
    if let Some(err) = err.downcast_ref() {
        return Some(mysql::fault_of(err));
    }
    #[cfg(any(feature = "sqlite", feature = "sqlite-unbundled"))]
    if let Some(err) = err.downcast_ref() {
        return Some(sqlite::fault_of(err));
    }
    None
}

/// The faults that every driver reports alike.
fn connection_fault(err: &sqlx::Error) -> Fault {
    match err {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Fault::Unavailable,
        _ => Fault::Other,
    }
}

/// What a version column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VersionKind {
    Number,
    Timestamp,
    /// Nothing that can be moved on.
    Other,
}

impl VersionKind {
    fn of(version: &Version) -> Self {
        match version {
            Version::Number(_) => Self::Number,
            Version::Timestamp(_) => Self::Timestamp,
        }
    }
}

/// The version that the database printed as `text`, which is `None` for NULL.
fn parse_version(kind: VersionKind, text: Option<String>) -> sqlx::Result<Version> {
    let Some(text) = text else {
        return Err(sqlx::Error::Decode("the version of the row is NULL".into()));
    };
    match kind {
        VersionKind::Number => text.parse().map(Version::Number).map_err(|err| sqlx::Error::Decode(Box::new(err))),
        VersionKind::Timestamp => Ok(Version::Timestamp(text)),
        VersionKind::Other => {
            Err(sqlx::Error::Decode("the version of the row is neither an integer nor a timestamp".into()))
        }
    }
}

/// A segment as read from its row.
fn segment(number: i64, quantity: i64) -> Segment {
    Segment { number: u32::try_from(number).unwrap_or(0), quantity: u64::try_from(quantity).unwrap_or(0) }
}

/// What a segment holds, as its column has it: nobody puts more into a stock than that can be.
fn quantity(segment: &Segment) -> i64 {
    i64::try_from(segment.quantity).unwrap_or(i64::MAX)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn fence(number: i64) -> Fence {
    Fence::from(u64::try_from(number).unwrap_or(0))
}
