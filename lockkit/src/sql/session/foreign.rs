//! Session locks with numbers that other programs chose: PostgreSQL's advisory locks as they are.

use super::{AdvisoryNumber, SessionLock, SessionName};
use crate::value::key::Key;

impl SessionLock {
    /// The advisory lock with this number, as `SELECT pg_advisory_lock(number)` takes it in another program. PostgreSQL
    /// only: MySQL and MariaDB lock names, not numbers, so [`acquire`](Self::acquire) returns
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) there.
    ///
    /// In errors and telemetry the lock is called `pg_advisory_lock(<number>)`. Use [`new`](Self::new) for a lock that
    /// only lockkit takes: its number cannot be that of another program by accident.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::raw(4711).acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    pub fn raw(number: i64) -> Self {
        let key = Key::from(format!("pg_advisory_lock({number})"));
        Self::named(SessionName { key, number: Some(AdvisoryNumber::One(number)) })
    }

    /// The advisory lock with these two numbers, as `SELECT pg_advisory_lock(first, second)` takes it in another
    /// program. No [`raw`](Self::raw) number names the same lock. PostgreSQL only, as [`raw`](Self::raw).
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let session = lockkit::SessionLock::raw2(4711, -1).acquire(&pool).await?;
    /// # session.release().await }
    /// ```
    pub fn raw2(first: i32, second: i32) -> Self {
        let key = Key::from(format!("pg_advisory_lock({first}, {second})"));
        Self::named(SessionName { key, number: Some(AdvisoryNumber::Two(first, second)) })
    }
}
