//! Statements given as plain text, on any driver: a test that is generic over the database needs no bounds for them.

use sqlx::{AssertSqlSafe, Database, Result, Row, raw_sql};

/// A driver that runs statements given as text, without parameters and without preparing them.
pub trait PlainSql: Database {
    /// Runs the statements and returns the number of rows they changed.
    fn execute(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = Result<u64>> + Send;

    /// The first column of every row, as text.
    fn fetch_texts(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = Result<Vec<Option<String>>>> + Send;
}

// An implementation for all drivers at once would need higher-ranked bounds on executors, which every caller would
// repeat.
macro_rules! impl_plain_sql {
    ($($driver:ty),+) => {$(
        impl PlainSql for $driver {
            async fn execute(conn: &mut Self::Connection, sql: &str) -> Result<u64> {
                Ok(raw_sql(AssertSqlSafe(sql)).execute(conn).await?.rows_affected())
            }

            async fn fetch_texts(conn: &mut Self::Connection, sql: &str) -> Result<Vec<Option<String>>> {
                let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(conn).await?;
                // Unchecked, because servers send every type as text when a statement is not prepared.
                rows.iter().map(|row| row.try_get_unchecked(0)).collect()
            }
        }
    )+};
}

impl_plain_sql!(sqlx::Sqlite, sqlx::Postgres, sqlx::MySql);
