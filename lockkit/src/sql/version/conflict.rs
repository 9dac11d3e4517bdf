//! Turns "zero rows changed" into an error.

use crate::{
    sql::RowsAffected,
    value::error::{Error, Result},
};

/// Turns "no row was changed" into [`Error::Conflict`]. Implemented for the query result of every database, and for the
/// optional row of a statement with `RETURNING`.
///
/// Use it after your own write that compares the version:
///
/// ```
/// use lockkit::OrConflict;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t (id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t VALUES (1, 5, 3)").execute(&pool).await?;
/// sqlx::query("UPDATE t SET stock = stock - 1, version = version + 1 WHERE id = ? AND version = ?")
///     .bind(1)
///     .bind(3)
///     .execute(&pool)
///     .await?
///     .or_conflict()?;
///
/// let (stock,): (i64,) = sqlx::query_as(
///     "UPDATE t SET stock = stock - 1, version = version + 1 WHERE id = ? AND version = ? RETURNING stock",
/// )
/// .bind(1)
/// .bind(4)
/// .fetch_optional(&pool)
/// .await?
/// .or_conflict()?;
/// assert_eq!(stock, 3);
/// # Ok(()) }
/// ```
pub trait OrConflict: Sized {
    /// The result when a row was changed: the query result itself, or the row inside the `Option`.
    type Output;

    /// Returns the result or row, or [`Error::Conflict`] when the statement changed no row.
    ///
    /// # Errors
    /// [`Error::Conflict`] without versions: only the statement contains them.
    fn or_conflict(self) -> Result<Self::Output>;
}

impl<R: RowsAffected> OrConflict for R {
    type Output = Self;

    fn or_conflict(self) -> Result<Self> {
        if self.affected() == 0 { Err(Error::conflict()) } else { Ok(self) }
    }
}

impl<T> OrConflict for Option<T> {
    type Output = T;

    fn or_conflict(self) -> Result<T> {
        self.ok_or_else(Error::conflict)
    }
}
