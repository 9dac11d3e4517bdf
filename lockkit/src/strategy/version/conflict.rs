//! Zero rows changed, as an error.

use crate::{
    dialect::RowsAffected,
    error::{Error, Raced, Result},
};

/// Turns "no row was changed" into [`Error::Conflict`], on every database's query result.
///
/// Use it after a write of your own that compares the version:
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
/// # Ok(()) }
/// ```
pub trait OrConflict: Sized {
    /// The result itself, or [`Error::Conflict`] when the statement changed no row.
    ///
    /// # Errors
    /// [`Error::Conflict`] without versions: only the statement knew them.
    fn or_conflict(self) -> Result<Self>;
}

impl<R: RowsAffected> OrConflict for R {
    fn or_conflict(self) -> Result<Self> {
        if self.affected() == 0 {
            return Err(Error::Conflict { table: None, expected: None, found: None, source: Raced });
        }
        Ok(self)
    }
}
