//! The tables of the shop, in three databases. Knows nothing of locks.

use lockkit::dialect::{FenceGuardOps, LeaseOps, NamedOps, RowOps, RowsAffected, StockOps};
use serde::{Deserialize, Serialize};
use sqlx::{
    Database, Pool, Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
#[cfg(feature = "mysql")]
use sqlx::{MySql, MySqlPool, mysql::MySqlPoolOptions};
#[cfg(feature = "postgres")]
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use std::{future::Future, time::Duration};

/// What is on sale. A greater weight is drawn more often.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) item_id: i64,
    pub(crate) name: String,
    pub(crate) stock: u32,
    pub(crate) weight: u32,
}

/// An item as a draw finds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) stock: i64,
    pub(crate) version: i64,
}

/// How often a buyer holds an item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Win {
    pub(crate) item_id: i64,
    pub(crate) times: i64,
}

/// A database with the tables `t_items` and `t_wins`.
///
/// Statements are written once and spelled for each database by the macro below; a service that knows its database
/// writes them in place.
pub(crate) trait Shop:
    FenceGuardOps + LeaseOps + NamedOps + RowOps + StockOps + Database<Arguments: Sync, QueryResult: RowsAffected>
{
    /// A pool of at most `connections`.
    fn open(url: &str, connections: u32) -> impl Future<Output = sqlx::Result<Pool<Self>>> + Send;

    /// The name and version of the server.
    fn server(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<String>> + Send;

    /// Makes both tables anew.
    fn fill(pool: &Pool<Self>, items: &[Offer]) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// What is left of an item.
    fn item(conn: &mut Self::Connection, item_id: i64) -> impl Future<Output = sqlx::Result<Found>> + Send;

    /// Whether this buyer holds this item.
    fn has_won(
        conn: &mut Self::Connection,
        item_id: i64,
        buyer_id: i64,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Writes what is left of an item, as computed by the caller.
    fn set_stock(
        conn: &mut Self::Connection,
        item_id: i64,
        stock: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// The same, if the item still has the version that was read.
    fn set_stock_if(
        conn: &mut Self::Connection,
        item_id: i64,
        stock: i64,
        version: i64,
    ) -> impl Future<Output = sqlx::Result<Self::QueryResult>> + Send;

    /// Gives one piece to a buyer.
    fn add_win(
        conn: &mut Self::Connection,
        item_id: i64,
        buyer_id: i64,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// What is left of every item: `(item_id, stock)`.
    fn left(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Vec<(i64, i64)>>> + Send;

    /// Who holds what, one row for each item and buyer.
    fn wins(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Vec<Win>>> + Send;
}

macro_rules! shop {
    ($database:ty, open: $open:ident, version: $version:literal, marks: $a:literal $b:literal $c:literal) => {
        impl Shop for $database {
            async fn open(url: &str, connections: u32) -> sqlx::Result<Pool<Self>> {
                $open(url, connections).await
            }

            async fn server(pool: &Pool<Self>) -> sqlx::Result<String> {
                let version: String = sqlx::query_scalar($version).fetch_one(pool).await?;
                let name = if version.contains("MariaDB") { "MariaDB" } else { Self::NAME };
                Ok(format!("{name} {}", version.split([' ', '-']).next().unwrap_or_default()))
            }

            async fn fill(pool: &Pool<Self>, items: &[Offer]) -> sqlx::Result<()> {
                // On one connection: SQLite checks a new index against what the connection last saw of the schema.
                let mut conn = pool.acquire().await?;
                // No unique key on (item_id, buyer_id), on purpose: nothing but the lock keeps a buyer from winning an
                // item twice. A real shop has both.
                for statement in [
                    "DROP TABLE IF EXISTS t_wins",
                    "DROP TABLE IF EXISTS t_items",
                    "CREATE TABLE t_items (
                         item_id BIGINT NOT NULL PRIMARY KEY,
                         name VARCHAR(200) NOT NULL,
                         stock BIGINT NOT NULL,
                         version BIGINT NOT NULL
                     )",
                    "CREATE TABLE t_wins (item_id BIGINT NOT NULL, buyer_id BIGINT NOT NULL)",
                    "CREATE INDEX i_wins ON t_wins (item_id, buyer_id)",
                ] {
                    sqlx::query(statement).execute(&mut *conn).await?;
                }
                for item in items {
                    sqlx::query(concat!("INSERT INTO t_items VALUES (", $a, ", ", $b, ", ", $c, ", 1)"))
                        .bind(item.item_id)
                        .bind(&item.name)
                        .bind(i64::from(item.stock))
                        .execute(&mut *conn)
                        .await?;
                }
                Ok(())
            }

            async fn item(conn: &mut Self::Connection, item_id: i64) -> sqlx::Result<Found> {
                let sql = concat!("SELECT stock, version FROM t_items WHERE item_id = ", $a);
                let (stock, version) = sqlx::query_as(sql).bind(item_id).fetch_one(conn).await?;
                Ok(Found { stock, version })
            }

            async fn has_won(conn: &mut Self::Connection, item_id: i64, buyer_id: i64) -> sqlx::Result<bool> {
                let sql = concat!("SELECT COUNT(*) FROM t_wins WHERE item_id = ", $a, " AND buyer_id = ", $b);
                let times: i64 = sqlx::query_scalar(sql).bind(item_id).bind(buyer_id).fetch_one(conn).await?;
                Ok(times > 0)
            }

            async fn set_stock(conn: &mut Self::Connection, item_id: i64, stock: i64) -> sqlx::Result<()> {
                sqlx::query(concat!("UPDATE t_items SET stock = ", $a, " WHERE item_id = ", $b))
                    .bind(stock)
                    .bind(item_id)
                    .execute(conn)
                    .await?;
                Ok(())
            }

            async fn set_stock_if(
                conn: &mut Self::Connection,
                item_id: i64,
                stock: i64,
                version: i64,
            ) -> sqlx::Result<Self::QueryResult> {
                sqlx::query(concat!(
                    "UPDATE t_items SET stock = ",
                    $a,
                    ", version = version + 1
                     WHERE item_id = ",
                    $b,
                    " AND version = ",
                    $c
                ))
                .bind(stock)
                .bind(item_id)
                .bind(version)
                .execute(conn)
                .await
            }

            async fn add_win(conn: &mut Self::Connection, item_id: i64, buyer_id: i64) -> sqlx::Result<()> {
                sqlx::query(concat!("INSERT INTO t_wins (item_id, buyer_id) VALUES (", $a, ", ", $b, ")"))
                    .bind(item_id)
                    .bind(buyer_id)
                    .execute(conn)
                    .await?;
                Ok(())
            }

            async fn left(pool: &Pool<Self>) -> sqlx::Result<Vec<(i64, i64)>> {
                sqlx::query_as("SELECT item_id, stock FROM t_items").fetch_all(pool).await
            }

            async fn wins(pool: &Pool<Self>) -> sqlx::Result<Vec<Win>> {
                let sql = "SELECT item_id, COUNT(*) FROM t_wins GROUP BY item_id, buyer_id";
                let rows: Vec<(i64, i64)> = sqlx::query_as(sql).fetch_all(pool).await?;
                Ok(rows.into_iter().map(|(item_id, times)| Win { item_id, times }).collect())
            }
        }
    };
}

shop!(Sqlite, open: open_sqlite, version: "SELECT sqlite_version()", marks: "?" "?" "?");
#[cfg(feature = "mysql")]
shop!(MySql, open: open_mysql, version: "SELECT VERSION()", marks: "?" "?" "?");
#[cfg(feature = "postgres")]
shop!(Postgres, open: open_postgres, version: "SHOW server_version", marks: "$1" "$2" "$3");

/// SQLite has one writer at a time: more connections than a few only wait for each other.
const SQLITE_CONNECTIONS: u32 = 4;

async fn open_sqlite(url: &str, connections: u32) -> sqlx::Result<SqlitePool> {
    let options = url
        .parse::<SqliteConnectOptions>()?
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .busy_timeout(Duration::from_secs(10));
    SqlitePoolOptions::new().max_connections(connections.min(SQLITE_CONNECTIONS)).connect_with(options).await
}

#[cfg(feature = "mysql")]
async fn open_mysql(url: &str, connections: u32) -> sqlx::Result<MySqlPool> {
    MySqlPoolOptions::new().max_connections(connections).connect(url).await
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, connections: u32) -> sqlx::Result<PgPool> {
    PgPoolOptions::new().max_connections(connections).connect(url).await
}
