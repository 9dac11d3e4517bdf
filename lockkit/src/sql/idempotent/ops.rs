//! What each database does for stored answers.

use std::{future::Future, time::Duration};

use crate::{
    sql::{Driver, NamedOps},
    value::key::Key,
};

/// Stored answers.
#[diagnostic::on_unimplemented(
    message = "lockkit stores no answers in the database `{Self}`",
    label = "stored answers need sqlx's `Postgres`, `MySql` or `Sqlite` here, or a type parameter that is \
             `lockkit::dialect::IdempotentOps`",
    note = "use a pool of one database (`PgPool`, `MySqlPool`, `SqlitePool`) and switch on lockkit's feature \
            `postgres`, `mysql` or `sqlite`; `sqlx::Any` cannot tell its database",
    note = "in a generic function, write the bound `DB: lockkit::dialect::IdempotentOps`"
)]
pub trait IdempotentOps: NamedOps + IdempotentStatements {}

/// The statements of stored answers. Hidden from the docs: users call [`Idempotent`](crate::Idempotent).
pub trait IdempotentStatements: Driver {
    /// The row of this key, if there is one that has not expired. Outside of a transaction, and leaves none open.
    fn answer_look(
        conn: &mut Self::Connection,
        session: &Self::Session,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<StoredAnswer>>> + Send;

    /// The same in the transaction that has the lock of the key. If there is no such row, marks the transaction for
    /// `answer_store`, as the new row of a [`Granted::New`](crate::sql::Granted) does.
    fn answer_look_locked(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<StoredAnswer>>> + Send;

    /// Stores that work has begun, in place of an answer that has expired. Keeps the time of an attempt that began
    /// before. The transaction has the lock of the key, and has found no answer.
    fn answer_begin(
        conn: &mut Self::Connection,
        key: &Key,
        fingerprint: &[u8],
        keep: Duration,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Stores the answer, in place of one that has expired or of work that has begun. The transaction has the lock of
    /// the key.
    ///
    /// Stores nothing and fails or returns `false` if the row of the lock is gone or, in a marked transaction, if
    /// another one is open now, or none.
    fn answer_store(
        conn: &mut Self::Connection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
        is_marked: bool,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Marks the place in the transaction that `answer_undo` returns to.
    fn answer_mark(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Forgets the place of `answer_mark`. Fails if the transaction has ended since.
    fn answer_unmark(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back what the transaction has done since `answer_mark`, and keeps the locks that it had then. Fails if the
    /// transaction has ended since.
    fn answer_undo(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// The row of a key.
#[derive(Debug)]
pub struct StoredAnswer {
    pub(crate) fingerprint: Vec<u8>,
    /// `None` where work outside of the database has begun, and its answer is not known.
    pub(crate) answer: Option<Vec<u8>>,
    /// When the row was made, in microseconds since 1970, and how long ago that is.
    pub(crate) made_us: i64,
    pub(crate) age_us: i64,
}
