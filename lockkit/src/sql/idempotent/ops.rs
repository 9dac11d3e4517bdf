//! What each database does for stored answers.

use std::{future::Future, time::Duration};

use sqlx::Database;

use crate::{sql::NamedOps, value::key::Key};

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
pub trait IdempotentStatements: Database {
    /// The answer of this key, if one is stored and has not expired.
    fn answer_look(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<StoredAnswer>>> + Send;

    /// Stores the answer, in place of one that has expired. The transaction has the lock of the key.
    fn answer_store(
        conn: &mut Self::Connection,
        key: &Key,
        fingerprint: &[u8],
        answer: &[u8],
        keep: Duration,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// A stored answer.
#[derive(Debug)]
pub struct StoredAnswer {
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) answer: Vec<u8>,
}
