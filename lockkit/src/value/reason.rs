//! What an [`Error`](crate::Error) says of its cause: kind of failure, reason of a loss, a lost race.

use std::fmt;

use crate::value::version::Row;

/// The kind of a failure. One classifier per database maps the codes of the driver to these; messages are never
/// matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A lock is held by another transaction, and the wait was refused or ran out, or the statement was ended by a
    /// timeout of the server's or cancelled.
    Contended,
    /// Picked as the victim of a deadlock.
    Deadlock,
    /// A serialization failure, or a snapshot too old to write from.
    Serialization,
    /// A unique key exists already.
    Duplicate,
    /// A table or column does not exist.
    NoTable,
    /// There is no transaction any more, or only a failed one.
    NoTransaction,
    /// The database, user or replica may not write.
    ReadOnly,
    /// The server's binary log of statements refuses writes in a READ COMMITTED transaction.
    StatementLog,
    /// The database's encoding has no such character.
    Encoding,
    /// The connection broke, the server is going away or takes no more connections, or the pool gave none in time.
    Unavailable,
    /// Anything else.
    Other,
}

impl Fault {
    /// Whether the database rolled back the work for a transient reason.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Deadlock | Self::Serialization)
    }

    /// Whether another transaction blocked the statement, which then changed nothing.
    pub(crate) fn is_of_the_moment(self) -> bool {
        self == Self::Contended || self.is_transient()
    }
}

/// Why a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// It was not renewed in time: the process was stopped or too busy.
    Expired,
    /// It was freed or taken before it expired.
    Stolen,
    /// The database could not be reached to renew it.
    Unreachable,
    /// This process released it.
    Released,
    /// This process closed its [`Leases`](crate::Leases), which released it.
    Closed,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "it was not renewed before it expired",
            Self::Stolen => "it was taken from this holder before it expired",
            Self::Unreachable => "the database could not be reached to renew it",
            Self::Released => "it had been released",
            Self::Closed => "its `Leases` were closed",
        })
    }
}

/// The innermost source of each [`Error::Conflict`](crate::Error::Conflict). Code that walks an error chain recognises
/// a wrapped conflict by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("another writer changed the row first")]
#[non_exhaustive]
pub struct Raced {
    /// The row, where lockkit wrote the statement.
    pub(crate) row: Option<Row>,
}
