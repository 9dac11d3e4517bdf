//! A driver for sqlx whose server is the simulated one, so that lockkit's own pools, transactions, stocks and versions
//! run over it. Knows no SQL: each operation of lockkit is one query of `tables`.

use std::{borrow::Cow, error::Error as StdError, fmt, io, ops::RangeInclusive, str::FromStr, time::Duration};

use lockkit::{
    Error, Fault, Key, Version, Wait,
    testing::simulation::sql::{
        AsConnection, Dialect, Driver, Known, Look, Note, Portion, SaveQuery, Sealed, Segment, StockOps,
        StockStatements, Values, VersionOps, VersionQuery, VersionStatements, arguments, look, note, pieces, portion,
        segment,
    },
};
use log::LevelFilter;
use sqlx_core::{
    Either, Url,
    arguments::Arguments,
    column::{Column, ColumnIndex},
    connection::{ConnectOptions, Connection},
    database::Database,
    encode::{Encode, IsNull},
    error::{BoxDynError, DatabaseError, ErrorKind},
    impl_statement_query,
    pool::{Pool, PoolOptions},
    row::Row,
    sql_str::SqlStr,
    statement::Statement,
    transaction::{Transaction, TransactionManager},
    type_info::TypeInfo,
    types::Type,
    value::{Value, ValueRef},
};
use tokio::time::timeout;

use crate::{
    client::Client,
    store::{Reply, Request},
    tables::{Answer, ConnId, Query, Refusal},
};

/// Longest time to open a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Longest wait for a connection of a pool.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(6);

/// The simulated database.
#[derive(Debug)]
pub(crate) struct Simulated;

/// A pool of a process. Its connections have no limits in real time.
pub(crate) fn pool(client: Client, connections: u32) -> Pool<Simulated> {
    PoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(ACQUIRE_LIMIT)
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(Options(client))
}

/// A connection. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Conn {
    client: Client,
    id: ConnId,
    /// How many transactions are open in each other.
    depth: usize,
    is_broken: bool,
}

impl Conn {
    async fn query(&mut self, query: Query) -> sqlx_core::Result<Answer> {
        if self.is_broken {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        }
        match self.client.sends(Request::Query(self.id, query)).await {
            Some(Reply::Query(Answer::Refused(refusal))) => Err(sqlx_core::Error::Database(Box::new(refusal))),
            Some(Reply::Query(answer)) => Ok(answer),
            Some(other) => panic!("BUG: the server has answered {other:?}"),
            None => {
                self.is_broken = true;
                Err(io::Error::from(io::ErrorKind::ConnectionReset).into())
            }
        }
    }

    async fn done(&mut self, query: Query) -> sqlx_core::Result<()> {
        match self.query(query).await? {
            Answer::Done => Ok(()),
            other => unexpected(&other),
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.client.closes(self.id);
    }
}

/// An answer of another kind than the query asks for is a mistake of the simulation.
fn unexpected(answer: &Answer) -> ! {
    panic!("BUG: the server has answered {answer:?}")
}

/// The server of a process.
#[derive(Debug, Clone)]
pub(crate) struct Options(Client);

impl FromStr for Options {
    type Err = sqlx_core::Error;

    fn from_str(_: &str) -> Result<Self, sqlx_core::Error> {
        Err(sqlx_core::Error::Configuration("a simulated server has no address".into()))
    }
}

impl ConnectOptions for Options {
    type Connection = Conn;

    fn from_url(url: &Url) -> Result<Self, sqlx_core::Error> {
        url.as_str().parse()
    }

    async fn connect(&self) -> Result<Conn, sqlx_core::Error> {
        let mut conn = Conn { client: self.0.clone(), id: self.0.opens(), depth: 0, is_broken: false };
        let connected = timeout(CONNECT_LIMIT, conn.done(Query::Connect)).await;
        connected.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))?;
        Ok(conn)
    }

    fn log_statements(self, _: LevelFilter) -> Self {
        self
    }

    fn log_slow_statements(self, _: LevelFilter, _: Duration) -> Self {
        self
    }
}

impl Connection for Conn {
    type Database = Simulated;
    type Options = Options;

    async fn close(self) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn close_hard(self) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn ping(&mut self) -> sqlx_core::Result<()> {
        self.done(Query::Ping).await
    }

    async fn begin(&mut self) -> sqlx_core::Result<Transaction<'_, Simulated>> {
        Transaction::begin(self, None).await
    }

    fn shrink_buffers(&mut self) {}

    async fn flush(&mut self) -> sqlx_core::Result<()> {
        Ok(())
    }

    fn should_flush(&self) -> bool {
        false
    }
}

/// Begins and ends transactions.
#[derive(Debug)]
pub(crate) struct Manager;

impl TransactionManager for Manager {
    type Database = Simulated;

    async fn begin(conn: &mut Conn, _: Option<SqlStr>) -> sqlx_core::Result<()> {
        conn.done(Query::Begin).await?;
        conn.depth = 1;
        Ok(())
    }

    async fn commit(conn: &mut Conn) -> sqlx_core::Result<()> {
        conn.done(Query::Commit).await?;
        conn.depth = 0;
        Ok(())
    }

    async fn rollback(conn: &mut Conn) -> sqlx_core::Result<()> {
        conn.done(Query::RollBack).await?;
        conn.depth = 0;
        Ok(())
    }

    fn start_rollback(conn: &mut Conn) {
        // The server rolls back when the connection ends.
        (conn.depth, conn.is_broken) = (0, true);
    }

    fn get_transaction_depth(conn: &Conn) -> usize {
        conn.depth
    }
}

impl Database for Simulated {
    type Connection = Conn;
    type TransactionManager = Manager;
    type Row = Found;
    type QueryResult = Changed;
    type Column = Never;
    type TypeInfo = Int;
    type Value = Never;
    type ValueRef<'r> = Never;
    type Arguments = Bound;
    type ArgumentBuffer = Vec<i64>;
    type Statement = Never;

    const NAME: &'static str = "simulated";
    const URL_SCHEMES: &'static [&'static str] = &[];
}

/// A row of the table with versions.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) realm: i64,
    pub(crate) row: i64,
    pub(crate) version: i64,
    pub(crate) value: i64,
}

impl Row for Found {
    type Database = Simulated;

    fn columns(&self) -> &[Never] {
        &[]
    }

    fn try_get_raw<I: ColumnIndex<Self>>(&self, index: I) -> sqlx_core::Result<Never> {
        Err(sqlx_core::Error::ColumnNotFound(format!("{index:?}")))
    }
}

/// Bound values. All of them are integers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bound(Vec<i64>);

impl Arguments for Bound {
    type Database = Simulated;

    fn reserve(&mut self, _: usize, _: usize) {}

    fn add<'t, T: Encode<'t, Simulated> + Type<Simulated>>(&mut self, value: T) -> Result<(), BoxDynError> {
        value.encode(&mut self.0).map(drop)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Encode<'_, Simulated> for i64 {
    fn encode_by_ref(&self, buffer: &mut Vec<i64>) -> Result<IsNull, BoxDynError> {
        buffer.push(*self);
        Ok(IsNull::No)
    }
}

impl Type<Simulated> for i64 {
    fn type_info() -> Int {
        Int
    }
}

/// The type of every value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Int;

impl fmt::Display for Int {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl TypeInfo for Int {
    fn is_null(&self) -> bool {
        false
    }

    fn name(&self) -> &'static str {
        "INT8"
    }
}

/// The result of a statement with a text, of which there are none.
#[derive(Debug, Default)]
pub(crate) struct Changed;

impl Extend<Self> for Changed {
    fn extend<T: IntoIterator<Item = Self>>(&mut self, _: T) {}
}

/// What this driver never makes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Never {}

impl Column for Never {
    type Database = Simulated;

    fn ordinal(&self) -> usize {
        match *self {}
    }

    fn name(&self) -> &str {
        match *self {}
    }

    fn type_info(&self) -> &Int {
        match *self {}
    }
}

impl Value for Never {
    type Database = Simulated;

    fn as_ref(&self) -> Self {
        match *self {}
    }

    fn type_info(&self) -> Cow<'_, Int> {
        match *self {}
    }

    fn is_null(&self) -> bool {
        match *self {}
    }
}

impl ValueRef<'_> for Never {
    type Database = Simulated;

    fn to_owned(&self) -> Self {
        match *self {}
    }

    fn type_info(&self) -> Cow<'_, Int> {
        match *self {}
    }

    fn is_null(&self) -> bool {
        match *self {}
    }
}

impl Statement for Never {
    type Database = Simulated;

    fn into_sql(self) -> SqlStr {
        match self {}
    }

    fn sql(&self) -> &SqlStr {
        match *self {}
    }

    fn parameters(&self) -> Option<Either<&[Int], usize>> {
        match *self {}
    }

    fn columns(&self) -> &[Self] {
        match *self {}
    }

    impl_statement_query!(Bound);
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl StdError for Refusal {}

impl DatabaseError for Refusal {
    fn message(&self) -> &str {
        match self {
            Self::LockTimeout => "canceling statement due to lock timeout",
            Self::Deadlock => "deadlock detected",
            Self::Ended => "there is no transaction, or it has failed",
            Self::Gone => "terminating connection due to administrator command",
        }
    }

    fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
        self
    }

    fn as_error_mut(&mut self) -> &mut (dyn StdError + Send + Sync + 'static) {
        self
    }

    fn into_error(self: Box<Self>) -> Box<dyn StdError + Send + Sync + 'static> {
        self
    }

    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

impl Sealed for Simulated {}
impl Sealed for Conn {}

impl AsConnection<Simulated> for Conn {
    fn as_connection(&mut self) -> &mut Self {
        self
    }
}

impl Known for Simulated {
    type Itself = Self;
}

impl Dialect for Simulated {}
impl StockOps for Simulated {}
impl VersionOps for Simulated {}

impl Driver for Simulated {
    type Grammar = ();
    type Session = ();

    const MIGRATIONS: &'static [(i64, &'static str, &'static str)] = &[];
    const FAILED_REFUSES: bool = true;

    fn fault(err: &sqlx_core::Error) -> Fault {
        match err {
            sqlx_core::Error::Database(err) => match err.try_downcast_ref() {
                Some(Refusal::LockTimeout) => Fault::Contended,
                Some(Refusal::Deadlock) => Fault::Deadlock,
                Some(Refusal::Ended) => Fault::NoTransaction,
                Some(Refusal::Gone) => Fault::Unavailable,
                None => Fault::Other,
            },
            sqlx_core::Error::Io(_) | sqlx_core::Error::PoolTimedOut | sqlx_core::Error::PoolClosed => {
                Fault::Unavailable
            }
            _ => Fault::Other,
        }
    }

    async fn busy_timeout(_: &mut Conn) -> sqlx_core::Result<Duration> {
        Ok(Duration::ZERO)
    }

    async fn set_busy_timeout(_: &mut Conn, _: Duration) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn set_busy_timeout_unanswered(_: &mut Conn, _: Duration) {}

    async fn greet(_: &mut Conn, _: &Pool<Self>) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn probe_named_locks(_: &mut Conn, _: &Pool<Self>) {}

    fn shows_writes_at_once(_: &Pool<Self>) -> bool {
        true
    }

    async fn begin(conn: &mut Conn, _: &Pool<Self>, (): &mut (), _: Wait) -> sqlx_core::Result<()> {
        Manager::begin(conn, None).await
    }

    async fn check_begun(_: &mut Conn) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn was_undone(_: &mut Conn) -> bool {
        false
    }

    async fn commit(conn: &mut Conn) -> sqlx_core::Result<()> {
        Manager::commit(conn).await
    }

    async fn commit_counted(conn: &mut Conn, (): &mut ()) -> sqlx_core::Result<()> {
        Manager::commit(conn).await
    }

    async fn roll_back(conn: &mut Conn) -> sqlx_core::Result<()> {
        Manager::rollback(conn).await
    }

    fn must_restore((): &()) -> bool {
        false
    }

    async fn restore_ended(_: &mut Conn) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn restore_session(_: &mut Conn) -> sqlx_core::Result<()> {
        Ok(())
    }

    async fn check_open(conn: &mut Conn) -> sqlx_core::Result<()> {
        conn.done(Query::Check).await
    }

    async fn depth(conn: &mut Conn) -> sqlx_core::Result<usize> {
        Ok(conn.depth)
    }

    async fn is_idle(conn: &mut Conn) -> bool {
        conn.depth == 0
    }

    fn is_denied(_: &sqlx_core::Error) -> bool {
        false
    }

    fn accepts_nobody(_: &sqlx_core::Error) -> bool {
        false
    }

    async fn migrate(_: &Pool<Self>) -> Result<(), Error> {
        Ok(())
    }
}

/// The pieces as lockkit's columns have them, which hold no negative number.
fn amount(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

impl StockStatements for Simulated {
    async fn stock_take_any(
        conn: &mut Conn,
        _: Option<()>,
        key: &Key,
        wanted: i64,
        first: [u32; 4],
    ) -> sqlx_core::Result<Option<u32>> {
        match conn.query(Query::Take { key: key.clone(), amount: amount(wanted), first }).await? {
            Answer::Segment(number) => Ok(number),
            other => unexpected(&other),
        }
    }

    async fn stock_take_batch(
        conn: &mut Conn,
        key: &Key,
        sums: &[i64],
        first: [u32; 4],
        of: Note,
    ) -> sqlx_core::Result<Option<Portion>> {
        let sums = sums.iter().map(|it| amount(*it)).collect();
        let (note, number) = note(of);
        match conn.query(Query::TakeBatch { key: key.clone(), sums, first, note, number }).await? {
            Answer::Portion(taken) => Ok(taken.map(|(segment, takers)| portion(segment, takers))),
            other => unexpected(&other),
        }
    }

    async fn stock_note_make(conn: &mut Conn, of: Note) -> sqlx_core::Result<()> {
        let (note, number) = note(of);
        conn.done(Query::MakeNote { note, number }).await
    }

    async fn stock_note_void(conn: &mut Conn, of: Note) -> sqlx_core::Result<()> {
        let (note, number) = note(of);
        conn.done(Query::VoidNote { note, number }).await
    }

    async fn stock_note_look(conn: &mut Conn, of: Note) -> sqlx_core::Result<Option<(i64, Portion)>> {
        match conn.query(Query::LookAtNote(note(of).0)).await? {
            Answer::Note(found) => Ok(found.map(|(number, (segment, takers))| (number, portion(segment, takers)))),
            other => unexpected(&other),
        }
    }

    async fn stock_look(conn: &mut Conn, key: &Key) -> sqlx_core::Result<Look> {
        Ok(look(segments(conn, Query::Look(key.clone())).await?))
    }

    async fn stock_lock(
        conn: &mut Conn,
        key: &Key,
        range: RangeInclusive<u32>,
        wait: Wait,
    ) -> sqlx_core::Result<Vec<Segment>> {
        let wait = match wait {
            Wait::Never => Some(1),
            Wait::AtMost(wait) => u64::try_from(wait.as_micros()).ok().map(|it| it.max(1000)),
            Wait::Unbounded => None,
        };
        segments(conn, Query::Lock { key: key.clone(), segments: range, wait }).await
    }

    async fn stock_make(conn: &mut Conn, key: &Key) -> sqlx_core::Result<()> {
        conn.done(Query::Make(key.clone())).await
    }

    async fn stock_write(conn: &mut Conn, key: &Key, segments: &[Segment]) -> sqlx_core::Result<()> {
        conn.done(Query::Write(key.clone(), segments.iter().map(pieces).collect())).await
    }

    async fn stock_remove(conn: &mut Conn, key: &Key, segments: RangeInclusive<u32>) -> sqlx_core::Result<()> {
        conn.done(Query::Remove(key.clone(), segments)).await
    }
}

async fn segments(conn: &mut Conn, query: Query) -> sqlx_core::Result<Vec<Segment>> {
    match conn.query(query).await? {
        Answer::Segments(found) => Ok(found.into_iter().map(|(number, quantity)| segment(number, quantity)).collect()),
        other => unexpected(&other),
    }
}

/// The rows are of `clerk::Counter`: the values of a key are the realm, which only lockkit sees, and the row.
impl VersionStatements for Simulated {
    async fn version_read(
        conn: &mut Conn,
        _: &VersionQuery,
        values: Values<Self>,
    ) -> sqlx_core::Result<Option<(Found, Version)>> {
        let [realm, row] = bound(values);
        match conn.query(Query::Read(row)).await? {
            Answer::Row(version, value) => Ok(Some((Found { realm, row, version, value }, Version::Number(version)))),
            other => unexpected(&other),
        }
    }

    async fn version_bump(
        _: &mut Conn,
        _: &VersionQuery,
        _: Values<Self>,
        _: &Version,
    ) -> sqlx_core::Result<Option<Version>> {
        panic!("BUG: no task of the simulation bumps a version")
    }

    async fn version_save(
        conn: &mut Conn,
        _: &SaveQuery,
        values: Values<Self>,
        expected: i64,
    ) -> sqlx_core::Result<bool> {
        let [value, _realm, row] = bound(values);
        match conn.query(Query::Save { row, value, expected }).await? {
            Answer::Saved(is_saved) => Ok(is_saved),
            other => unexpected(&other),
        }
    }

    async fn version_delete(_: &mut Conn, _: &VersionQuery, _: Values<Self>, _: &Version) -> sqlx_core::Result<bool> {
        panic!("BUG: no task of the simulation deletes a row")
    }
}

fn bound<const COUNT: usize>(values: Values<Simulated>) -> [i64; COUNT] {
    let Bound(values) = arguments(values);
    values.try_into().unwrap_or_else(|it| panic!("BUG: the values are {it:?}"))
}
