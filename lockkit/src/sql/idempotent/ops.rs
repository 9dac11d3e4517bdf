//! What each database does for stored answers.

use std::{future::Future, time::Duration};

use crate::{
    sql::{Driver, Granted, NamedOps},
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

    /// The same in the transaction that was granted the lock of the key, and a mark of this transaction.
    fn answer_look_locked(
        conn: &mut Self::Connection,
        key: &Key,
        granted: Granted,
    ) -> impl Future<Output = sqlx::Result<(Mark, Option<StoredAnswer>)>> + Send;

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
    /// Stores nothing and fails or returns `false` if the row of the lock is gone or, with a mark, if another
    /// transaction is open, or none.
    fn answer_store(
        conn: &mut Self::Connection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
        mark: Option<Mark>,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Marks the place in the transaction that `answer_undo` returns to.
    fn answer_mark(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Rolls back what the transaction has done since `answer_mark`, and keeps the locks that it had then. Fails if the
    /// transaction has ended since.
    fn answer_undo(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// What tells the transaction that has the lock of a key from others on its connection.
#[derive(Debug, Clone, Copy)]
pub enum Mark {
    /// A savepoint.
    Savepoint,
    /// The number of the transaction, and whether it has found a row of the key, even one that has expired.
    Number { number: i64, has_row: bool },
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
