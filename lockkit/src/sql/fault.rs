//! Errors of drivers in lockkit's words.
//!
//! A statement that a timeout of the server ends, or that is cancelled, has only waited, and MySQL and MariaDB cannot
//! tell it from lockkit's own bound: it is contended. A timeout of an idle transaction
//! (`idle_in_transaction_session_timeout`) applies only between two statements, so a commit that meets it was not run:
//! `TransactionEnded`, not `OutcomeUnknown`.

use std::error::Error as StdError;

use crate::{
    sql::Dialect,
    value::{
        error::{Error, Fault, chain},
        key::Key,
    },
};

impl Error {
    /// The error of sqlx that this one wraps, however deep; `None` if it wraps none. For its code, its message or the
    /// constraint that it names.
    ///
    /// ```
    /// use lockkit::{Error, Fault};
    ///
    /// let err = Error::database("renewing leases", None, Fault::Unavailable, sqlx::Error::PoolTimedOut);
    /// assert!(matches!(err.as_sqlx(), Some(sqlx::Error::PoolTimedOut)));
    /// ```
    pub fn as_sqlx(&self) -> Option<&sqlx::Error> {
        chain(self).find_map(<dyn StdError>::downcast_ref)
    }
}

/// Converts an error of the driver.
pub(crate) fn failed<DB: Dialect>(doing: &'static str, key: Option<&Key>, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::StatementLog => Error::StatementLog { doing, key: key.cloned(), source: source.into() },
        fault => Error::database(doing, key, fault, source),
    }
}

/// As [`failed`], for statements on lockkit's own tables: a missing table means that the migrations did not run, and
/// an encoding error is caused by the key.
pub(crate) fn failed_on_own_table<DB: Dialect>(doing: &'static str, key: Option<&Key>, source: sqlx::Error) -> Error {
    let fault = DB::fault(&source);
    if let Some(key) = key
        && fault == Fault::Encoding
        && !key.is_ascii()
    {
        let reason = "the database's encoding does not have all of its characters; use others, or a database in UTF8";
        return Error::InvalidKey { key: key.to_string(), reason };
    }
    if fault == Fault::NoTable {
        return Error::NotMigrated {
            hint: "run `leases.migrate().await` or `lockkit::migrate(&pool).await` once at start, or `sqlx migrate \
                   run` with the files of `lockkit::dialect::write_migrations`; where that command has nothing to do, \
                   the table was dropped and its history kept: delete the rows of `_lockkit_migrations` first (the \
                   migrations can be repeated)",
            source: source.into(),
        };
    }
    failed::<DB>(doing, key, source)
}

/// The faults that every driver reports alike.
pub(super) fn connection_fault(err: &sqlx::Error) -> Fault {
    match err {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Fault::Unavailable,
        _ => Fault::Other,
    }
}
