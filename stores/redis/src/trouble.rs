//! What can go wrong with a server, and what lockkit hears of it.

use std::{io, time::Duration};

use lockkit::{Error, Fault, Key};
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::fit::Unfit;

/// What went wrong with one call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error(transparent)]
    Redis(RedisError),
    /// A name that lockkit uses has a value that lockkit did not write. It was left as it is.
    #[error("{0}, so it was left as it is: give the leases a prefix or a database of their own")]
    Foreign(String),
    /// No answer came in time. The server may have executed the call.
    #[error("the server did not answer in time")]
    Silent(#[source] io::Error),
    /// The server is in quarantine. A timeout, so that waiting requests ask again.
    #[error("the server may have forgotten leases")]
    Forgot(#[source] io::Error),
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The server's answer is none of ours.
    #[error("the script answered {0}")]
    Nonsense(String),
    #[error("the system allows no thread that drives the connections")]
    NoThread(#[source] io::Error),
    #[error("the task that opened the connection panicked")]
    Panicked,
    #[error("{answered} of {nodes} servers answered, and {needed} are needed")]
    NoQuorum {
        answered: usize,
        nodes: usize,
        needed: usize,
        /// What one of the others said.
        source: Option<Box<Trouble>>,
    },
    #[error("a ttl of {ttl:?} is longer than the longest ttl of the store, {longest:?}")]
    TooLong { ttl: Duration, longest: Duration },
}

impl From<RedisError> for Trouble {
    fn from(err: RedisError) -> Self {
        match (err.code(), err.detail()) {
            // The errors of the scripts.
            (Some("FOREIGN"), Some(what)) => Self::Foreign(what.to_owned()),
            (Some("EVICTS"), Some(what)) => {
                let (policy, maxmemory) = what.split_once(' ').unwrap_or((what, ""));
                let maxmemory = maxmemory.parse().unwrap_or(0);
                Unfit::Evicts { policy: policy.to_owned(), maxmemory }.into()
            }
            _ => Self::Redis(err),
        }
    }
}

impl Trouble {
    pub(crate) fn silent(doing: &'static str, after: Duration) -> Self {
        Self::Silent(io::Error::new(io::ErrorKind::TimedOut, format!("{doing} took longer than {after:?}")))
    }

    pub(crate) fn forgot(left: Duration) -> Self {
        Self::Forgot(io::Error::new(io::ErrorKind::TimedOut, format!("its quarantine ends in {left:?}")))
    }

    /// Whether the connection cannot be used any more.
    pub(crate) fn ends_connection(&self) -> bool {
        match self {
            Self::Redis(err) => {
                err.is_io_error()
                    || err.is_unrecoverable_error()
                    // The server became a replica. The next connection finds the master.
                    || matches!(err.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly))
            }
            Self::Silent(_) => true,
            Self::Forgot(_)
            | Self::Foreign(_)
            | Self::Unfit(_)
            | Self::Nonsense(_)
            | Self::NoThread(_)
            | Self::Panicked
            | Self::NoQuorum { .. }
            | Self::TooLong { .. } => false,
        }
    }

    pub(crate) fn is_no_script(&self) -> bool {
        matches!(self, Self::Redis(err) if err.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
    }

    fn fault(&self) -> Fault {
        match self {
            Self::Redis(err) => match err.kind() {
                ErrorKind::Io
                | ErrorKind::MasterNameNotFoundBySentinel
                | ErrorKind::NoValidReplicasFoundBySentinel
                | ErrorKind::ClusterConnectionNotFound
                | ErrorKind::Server(
                    ServerErrorKind::BusyLoading
                    | ServerErrorKind::MasterDown
                    | ServerErrorKind::ClusterDown
                    | ServerErrorKind::TryAgain,
                ) => Fault::Unavailable,
                ErrorKind::Server(ServerErrorKind::ReadOnly) => Fault::ReadOnly,
                _ if matches!(err.code(), Some("NOREPLICAS" | "BUSY")) => Fault::Unavailable,
                _ => Fault::Other,
            },
            Self::Silent(_) | Self::Forgot(_) | Self::NoThread(_) | Self::Panicked | Self::NoQuorum { .. } => {
                Fault::Unavailable
            }
            Self::Foreign(_) | Self::Unfit(_) | Self::Nonsense(_) | Self::TooLong { .. } => Fault::Other,
        }
    }

    pub(crate) fn while_doing<'k>(self, doing: &'static str, key: impl Into<Option<&'k Key>>) -> Error {
        Error::database(doing, key, self.fault(), self)
    }
}
