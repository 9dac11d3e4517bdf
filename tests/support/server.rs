//! A kind of database a test can run on, and what differs between the kinds.

use lockkit::dialect::{FenceGuardOps, IdempotentOps, LeaseOps, NamedOps, RowOps, StockOps, VersionOps};
use sqlx::{Database, Error, Result};

use crate::PlainSql;

/// A kind of database. `MariaDB` and `MySQL` are two kinds with one driver.
pub trait Server: Sized + Send + Sync + 'static {
    type DB: PlainSql;

    /// As its makers write it.
    const NAME: &'static str;

    /// How many connections a test's pool may open unless the test says otherwise.
    const CONNECTIONS: u32 = 20;

    /// SQL for the server's version.
    const VERSION: &'static str = "SELECT VERSION()";

    /// Why tests on this server are to be left out, if the environment says that they are.
    fn left_out() -> Option<String> {
        None
    }

    /// Makes an empty database, starting the server if need be, and returns its URL.
    fn create_database() -> impl Future<Output = String> + Send;

    /// Deletes a database that may still be in use.
    fn drop_database(url: &str) -> impl Future<Output = Result<()>> + Send;

    /// What other sessions are doing or holding in this connection's database, one line each.
    fn leftovers(conn: &mut Connection<Self>) -> impl Future<Output = Result<Vec<String>>> + Send;

    /// Runs the statements and returns the number of rows they changed.
    fn execute(conn: &mut Connection<Self>, sql: &str) -> impl Future<Output = Result<u64>> + Send {
        Self::DB::execute(conn, sql)
    }

    /// The first column of the first row; `None` if it is NULL or there is no row.
    fn fetch_text(conn: &mut Connection<Self>, sql: &str) -> impl Future<Output = Result<Option<String>>> + Send {
        async move { Ok(Self::DB::fetch_texts(conn, sql).await?.into_iter().next().flatten()) }
    }

    /// The first column of the first row as a number; `None` if it is NULL or there is no row.
    ///
    /// It may have any integer type, or be a boolean, or a decimal without a fraction.
    fn fetch_i64(conn: &mut Connection<Self>, sql: &str) -> impl Future<Output = Result<Option<i64>>> + Send {
        async move {
            match Self::fetch_text(conn, sql).await?.as_deref() {
                None => Ok(None),
                Some("t") => Ok(Some(1)),
                Some("f") => Ok(Some(0)),
                Some(text) => text.parse().map(Some).map_err(|err| Error::Decode(Box::new(err))),
            }
        }
    }
}

/// A connection to a server of this kind.
type Connection<S> = <<S as Server>::DB as Database>::Connection;

/// A [`Server`] that `lockkit` has its locks in: the one place for the bounds that tests of all databases need.
pub trait Backend:
    Server<DB: FenceGuardOps + IdempotentOps + LeaseOps + NamedOps + RowOps + StockOps + VersionOps>
{
}

impl<S> Backend for S where
    S: Server<DB: FenceGuardOps + IdempotentOps + LeaseOps + NamedOps + RowOps + StockOps + VersionOps>
{
}
