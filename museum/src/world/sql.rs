//! What the recipes need of a database, in words that all of them understand, and where they differ.

use std::time::Duration;

use anyhow::Result;
use lockkit::dialect::{LeaseOps, NamedOps, RowOps, StockOps, VersionOps};
use sqlx::{
    AssertSqlSafe, Database, Encode, FromRow, MySql, Pool, Postgres, Row, Sqlite, Type,
    encode::IsNull,
    error::BoxDynError,
    mysql::{MySqlPoolOptions, MySqlRow},
    postgres::{PgPoolOptions, PgRow},
    raw_sql,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous},
};

use super::Place;

/// How many rows a statement has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Changed(pub(crate) u64);

/// A database that the recipes run on.
pub(crate) trait Sql:
    Database<Row: Columns> + LeaseOps + NamedOps + RowOps + StockOps + VersionOps + Values
{
    /// Whether it locks rows. SQLite locks the whole database.
    const LOCKS_ROWS: bool = true;

    /// How long a statement waits for a row by default. `None` for ever.
    const LOCK_WAIT: Option<Duration> = None;

    /// Begins a transaction that sees the database as it was at its first read.
    const BEGIN_SNAPSHOT: &'static str;

    /// Counts the sessions that wait for a lock, where the database can tell.
    const WAITING: Option<&'static str>;

    /// A database of its own, with so many connections.
    fn open(place: &Place, connections: u32) -> impl Future<Output = Result<Pool<Self>>> + Send;

    /// Begins a transaction and locks what the SELECT reads.
    fn begin_and_lock(conn: &mut Self::Connection, select: &str) -> impl Future<Output = sqlx::Result<Changed>> + Send {
        let sql = format!("BEGIN; {select} FOR UPDATE");
        async move { Self::execute(conn, &sql).await }
    }

    /// How the database finds the rows of the SELECT, in a word or two.
    fn plan(conn: &mut Self::Connection, select: &str) -> impl Future<Output = sqlx::Result<String>> + Send;

    fn execute(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = sqlx::Result<Changed>> + Send;

    /// The first column of the first row.
    fn text(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = sqlx::Result<String>> + Send;

    /// As [`text`](Self::text), of a number.
    fn number(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = sqlx::Result<i64>> + Send {
        let text = Self::text(conn, sql);
        async move { text.await?.parse().map_err(|err| sqlx::Error::Decode(Box::new(err))) }
    }
}

/// A row whose columns can be read without knowing its database.
pub(crate) trait Columns: Row {
    fn number(&self, column: &str) -> sqlx::Result<i64>;
}

/// A row with the column `nums`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nums(pub(crate) i64);

impl<R: Columns> FromRow<'_, R> for Nums {
    fn from_row(row: &R) -> sqlx::Result<Self> {
        Ok(Self(row.number("nums")?))
    }
}

/// A row with the columns `nums` and `version`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Item {
    pub(crate) nums: i64,
    pub(crate) version: i64,
}

impl<R: Columns> FromRow<'_, R> for Item {
    fn from_row(row: &R) -> sqlx::Result<Self> {
        Ok(Self { nums: row.number("nums")?, version: row.number("version")? })
    }
}

/// How a database binds and reads the values of the recipes, so that code which is generic over it needs no bounds.
pub(crate) trait Values: Database {
    fn bind_number(number: i64, buffer: &mut Self::ArgumentBuffer) -> Result<IsNull, BoxDynError>;
    fn bind_text(text: &str, buffer: &mut Self::ArgumentBuffer) -> Result<IsNull, BoxDynError>;
    fn number_type() -> Self::TypeInfo;
    fn text_type() -> Self::TypeInfo;
}

/// A number to bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) i64);

impl<DB: Sql> Type<DB> for Id {
    fn type_info() -> DB::TypeInfo {
        DB::number_type()
    }
}

impl<DB: Sql> Encode<'_, DB> for Id {
    fn encode_by_ref(&self, buffer: &mut DB::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
        DB::bind_number(self.0, buffer)
    }
}

/// A text to bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text(pub(crate) &'static str);

impl<DB: Sql> Type<DB> for Text {
    fn type_info() -> DB::TypeInfo {
        DB::text_type()
    }
}

impl<DB: Sql> Encode<'_, DB> for Text {
    fn encode_by_ref(&self, buffer: &mut DB::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
        DB::bind_text(self.0, buffer)
    }
}

/// What the drivers have in common, and no trait of sqlx says without bounds that every caller would repeat.
macro_rules! common {
    () => {
        async fn execute(conn: &mut Self::Connection, sql: &str) -> sqlx::Result<Changed> {
            Ok(Changed(raw_sql(AssertSqlSafe(sql)).execute(conn).await?.rows_affected()))
        }

        async fn text(conn: &mut Self::Connection, sql: &str) -> sqlx::Result<String> {
            // Unchecked, because servers send every type as text when a statement is not prepared.
            raw_sql(AssertSqlSafe(sql)).fetch_one(conn).await?.try_get_unchecked(0)
        }
    };
}

macro_rules! values {
    ($database:ty, $row:ty) => {
        impl Columns for $row {
            fn number(&self, column: &str) -> sqlx::Result<i64> {
                self.try_get(column)
            }
        }

        impl Values for $database {
            fn bind_number(number: i64, buffer: &mut Self::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
                <i64 as Encode<'_, Self>>::encode(number, buffer)
            }

            fn bind_text(text: &str, buffer: &mut Self::ArgumentBuffer) -> Result<IsNull, BoxDynError> {
                <String as Encode<'_, Self>>::encode(text.to_owned(), buffer)
            }

            fn number_type() -> Self::TypeInfo {
                <i64 as Type<Self>>::type_info()
            }

            fn text_type() -> Self::TypeInfo {
                <String as Type<Self>>::type_info()
            }
        }
    };
}

values!(Sqlite, SqliteRow);
values!(Postgres, PgRow);
values!(MySql, MySqlRow);

impl Sql for Sqlite {
    const LOCKS_ROWS: bool = false;
    const BEGIN_SNAPSHOT: &'static str = "BEGIN";
    const WAITING: Option<&'static str> = None;

    async fn open(place: &Place, connections: u32) -> Result<Pool<Self>> {
        let options = SqliteConnectOptions::new()
            .filename(place.file())
            .create_if_missing(true)
            // Readers do not wait for a writer, as on a server.
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off)
            // A statement waits for a lock, as on a server. A schedule is over before that.
            .busy_timeout(Duration::from_secs(60));
        Ok(SqlitePoolOptions::new().max_connections(connections).connect_with(options).await?)
    }

    async fn begin_and_lock(conn: &mut Self::Connection, select: &str) -> sqlx::Result<Changed> {
        Self::execute(conn, &format!("BEGIN IMMEDIATE; {select}")).await
    }

    async fn plan(conn: &mut Self::Connection, select: &str) -> sqlx::Result<String> {
        let explain = format!("EXPLAIN QUERY PLAN {select}");
        raw_sql(AssertSqlSafe(explain)).fetch_one(conn).await?.try_get("detail")
    }

    common!();
}

impl Sql for Postgres {
    const BEGIN_SNAPSHOT: &'static str = "BEGIN ISOLATION LEVEL REPEATABLE READ";
    const WAITING: Option<&'static str> = Some(
        "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0",
    );

    async fn open(place: &Place, connections: u32) -> Result<Pool<Self>> {
        Ok(PgPoolOptions::new().max_connections(connections).connect_with(place.postgres().await?).await?)
    }

    async fn plan(conn: &mut Self::Connection, select: &str) -> sqlx::Result<String> {
        Self::text(conn, &format!("EXPLAIN (COSTS OFF) {select}")).await
    }

    common!();
}

/// MySQL and MariaDB.
impl Sql for MySql {
    /// `innodb_lock_wait_timeout`.
    const LOCK_WAIT: Option<Duration> = Some(Duration::from_secs(50));
    const BEGIN_SNAPSHOT: &'static str = "BEGIN";
    const WAITING: Option<&'static str> = Some(
        "SELECT count(*) FROM information_schema.innodb_trx
         JOIN information_schema.processlist ON id = trx_mysql_thread_id
         WHERE trx_state = 'LOCK WAIT' AND db = DATABASE()",
    );

    async fn open(place: &Place, connections: u32) -> Result<Pool<Self>> {
        Ok(MySqlPoolOptions::new().max_connections(connections).connect_with(place.mysql().await?).await?)
    }

    async fn plan(conn: &mut Self::Connection, select: &str) -> sqlx::Result<String> {
        let row = raw_sql(AssertSqlSafe(format!("EXPLAIN FORMAT=TRADITIONAL {select}"))).fetch_one(conn).await?;
        let kind: String = row.try_get_unchecked("type")?;
        Ok(format!("type {kind}"))
    }

    common!();
}
