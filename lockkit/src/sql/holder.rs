//! Reads the holder of a lock from the server after a wait for it has failed. A failure here is not an error: the
//! caller gets [`Error::Contended`] without a holder.
//!
//! Only the server knows the holder of a row, named or session lock, and a granted lock costs no further statement.
//! What each server shows:
//!
//! - PostgreSQL lists advisory locks, but keeps row locks in the rows. After a wait that timed out, the transaction
//!   answers no statement; so a holder is known with `Wait::Never`, and under the attribute, which rolls back and looks
//!   on a pooled connection for 1 s at most. A savepoint would keep the transaction, for a round trip each time.
//! - MySQL lists locks by thread. The lock of the table is read, since the lock of the row may be listed under the
//!   waiter.
//! - MariaDB lists a lock only while another session waits for it, so not after this wait.
//! - Of two transactions that have rows of a table locked, neither is named.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    sql::{
        AsConnection, Dialect, failed, note_answer,
        pool::{Reach, call},
    },
    value::{
        error::Error,
        holder::{Holder, LockHolder},
        key::Key,
    },
};

/// Longest time for the server to report the holder.
const LIMIT: Duration = Duration::from_secs(1);

/// The holder, as seen on the connection that has waited.
pub(crate) async fn seen<DB: Dialect>(
    conn: &mut impl AsConnection<DB>,
    look: impl AsyncFnOnce(&mut DB::Connection) -> sqlx::Result<Option<LockHolder>>,
) -> Option<Box<Holder>> {
    let seen = timeout(LIMIT, look(conn.for_query())).await.ok()?;
    let seen = note_answer(conn, seen.map_err(|err| failed::<DB>("looking for the holder of", None, err)));
    seen.ok()?.map(|it| Box::new(it.into()))
}

/// The error of a wait, completed with the holder. A connection of the pool reads it, because the transaction of the
/// wait has been rolled back.
pub(crate) async fn with_holder<DB: Dialect>(
    pool: &Pool<DB>,
    err: Error,
    look: impl AsyncFnOnce(&mut DB::Connection, &Key) -> sqlx::Result<Option<LockHolder>>,
) -> Error {
    let Error::Contended { key, waited, holder: None } = err else { return err };
    let looking =
        call(pool, Reach::POOL, "looking for the holder of", Some(&key), async |conn, _| look(conn, &key).await);
    let holder = timeout(LIMIT, looking).await.ok().and_then(Result::ok).flatten().map(|it| Box::new(it.into()));
    Error::Contended { key, waited, holder }
}
