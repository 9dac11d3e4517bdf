//! The columns of waits and sessions, the same on every database.

use sqlx::{ColumnIndex, Decode, Result, Row, Type};

use crate::{Session, Wait};

/// A row that has them.
pub(super) struct Columns<'r, R>(pub(super) &'r R);

impl<R: Row> Columns<'_, R>
where
    for<'v> i64: Decode<'v, R::Database> + Type<R::Database>,
    for<'v> String: Decode<'v, R::Database> + Type<R::Database>,
    for<'i> &'i str: ColumnIndex<R>,
{
    pub(super) fn wait(&self, lock: String, holders: Vec<i64>) -> Result<Wait> {
        let waits_ms = self.millis("waits_ms")?.unwrap_or(0);
        Ok(Wait { waiter: self.0.try_get("waiter")?, waits_ms, lock, holders })
    }

    pub(super) fn session(&self) -> Result<Session> {
        Ok(Session {
            id: self.0.try_get("id")?,
            name: self.0.try_get("name")?,
            transaction_ms: self.millis("transaction_ms")?,
            state: self.0.try_get("state")?,
            statement: self.0.try_get("statement")?,
            end_by: self.0.try_get("end_by")?,
        })
    }

    /// The clock may be behind that of a transaction.
    fn millis(&self, column: &str) -> Result<Option<u64>> {
        Ok(self.0.try_get::<Option<i64>, _>(column)?.and_then(|it| it.try_into().ok()))
    }
}
