//! What a refused statement says of a lease: another transaction has its row, or the whole database.

use super::Dialect;
use crate::value::{
    error::{BoxError, Error, Fault, Result},
    key::Key,
};

/// The reason why a database with one lock for all writers did not grant a lease. It says nothing of the lease. Without
/// a source no answer came, for which a slow disk is enough.
#[derive(Debug, thiserror::Error)]
#[error(
    "another transaction has the whole database locked for writing, or the disk is slow; if the transaction is the \
     caller's own, end it first, or acquire the lease before it begins"
)]
struct DatabaseLocked {
    source: Option<BoxError>,
}

/// The error of a claim that did not get the lock of the whole database in time.
pub(super) fn database_locked(key: Option<&Key>, source: Option<BoxError>) -> Error {
    Error::database("acquiring lease", key, Fault::Contended, DatabaseLocked { source })
}

/// The answer to a claim, where `held` replaces the error that another transaction at the same lease caused.
pub(super) fn unless_held<DB: Dialect, T>(answer: Result<T>, key: &Key, held: T) -> Result<T> {
    match answer {
        Err(Error::Database { fault: Fault::Contended, source, .. }) if !DB::IS_REMOTE => {
            Err(database_locked(Some(key), Some(source)))
        }
        answer => unless_locked(answer, held),
    }
}

/// Replaces an error that another transaction caused, such as a lock wait or a rollback, by `otherwise`.
pub(super) fn unless_locked<T>(result: Result<T>, otherwise: T) -> Result<T> {
    match result {
        Err(Error::Database { fault, .. }) if fault.is_of_the_moment() => Ok(otherwise),
        result => result,
    }
}

/// How often a read is sent that other transactions undo.
pub(super) const READS: u32 = 5;

/// Repeats a read while another transaction undoes it, as one can where SERIALIZABLE is the default of the session.
macro_rules! read {
    ($read:expr) => {{
        let mut left = $crate::sql::locked::READS;
        loop {
            left -= 1;
            match $read {
                Err(err) if left > 0 && err.is_transient() => tokio::task::yield_now().await,
                answer => break answer,
            }
        }
    }};
}

pub(super) use read;
