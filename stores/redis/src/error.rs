//! What can go wrong: with the connection to a server, and with one call.

use std::{io, time::Duration};

use lockkit::{Error, Fault, Key, store::BoxError};
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::fit::Unfit;

/// Why a store could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A setting cannot work.
    #[error("`{option}` {reason}")]
    #[non_exhaustive]
    InvalidOption {
        /// The setting.
        option: &'static str,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// No server accepted the connection.
    #[error("Redis cannot be reached at {servers}: check the addresses, TLS (`rediss://`), the user and the password")]
    #[non_exhaustive]
    Unreachable {
        /// The addresses, without user names and passwords.
        servers: String,
        /// The error of the client.
        source: BoxError,
    },
    /// A server answers, and cannot keep leases as it is.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The system allows no thread that drives the connections.
    #[error("the thread of the connections could not be started: check the limits of the process")]
    #[non_exhaustive]
    NoThread {
        /// The error of the system.
        source: io::Error,
    },
}

impl ConnectError {
    /// Why no server at these addresses gave a connection.
    pub(crate) fn new(failure: Failure, servers: String) -> Self {
        match failure {
            Failure::Unfit(unfit) => Self::Unfit(unfit),
            Failure::NoThread(source) => Self::NoThread { source },
            Failure::Silent(err) => Self::Unreachable { servers, source: err.into() },
            failure => Self::Unreachable { servers, source: failure.into() },
        }
    }
}

/// How one call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Redis(RedisError),
    /// A name that lockkit uses has a value that lockkit did not write. It was left as it is.
    #[error("{0}, so it was left as it is: give the leases a prefix or a database of their own")]
    Foreign(String),
    /// No answer came in time. The server may have executed the call.
    #[error("the server did not answer in time")]
    Silent(#[source] io::Error),
    /// The server is in quarantine. A timeout, so that waiting requests try again.
    #[error("the server may have forgotten leases")]
    Quarantined(#[source] io::Error),
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The script answered what it never answers.
    #[error("the script answered {0}")]
    Unexpected(String),
    #[error("the system allows no thread that drives the connections")]
    NoThread(#[source] io::Error),
    #[error("the task that opened the connection panicked")]
    Panicked,
    #[error("{answered} of {nodes} servers answered, and {needed} are needed")]
    NoQuorum {
        answered: usize,
        nodes: usize,
        needed: usize,
        /// The error of one of the others.
        source: Option<Box<Failure>>,
    },
    #[error("a ttl of {ttl:?} is longer than the longest ttl of the store, {longest:?}")]
    TooLong { ttl: Duration, longest: Duration },
}

impl From<RedisError> for Failure {
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

impl Failure {
    pub(crate) fn silent(doing: &'static str, after: Duration) -> Self {
        Self::Silent(io::Error::new(io::ErrorKind::TimedOut, format!("{doing} took longer than {after:?}")))
    }

    pub(crate) fn quarantined(left: Duration) -> Self {
        Self::Quarantined(io::Error::new(io::ErrorKind::TimedOut, format!("its quarantine ends in {left:?}")))
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
            Self::Quarantined(_)
            | Self::Foreign(_)
            | Self::Unfit(_)
            | Self::Unexpected(_)
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
            Self::Silent(_) | Self::Quarantined(_) | Self::NoThread(_) | Self::Panicked | Self::NoQuorum { .. } => {
                Fault::Unavailable
            }
            // What a server that became a replica answers on a new connection.
            Self::Unfit(Unfit::Replica) => Fault::ReadOnly,
            Self::Foreign(_) | Self::Unfit(_) | Self::Unexpected(_) | Self::TooLong { .. } => Fault::Other,
        }
    }

    pub(crate) fn while_doing<'k>(self, doing: &'static str, key: impl Into<Option<&'k Key>>) -> Error {
        Error::database(doing, key, self.fault(), self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error as a server sends it.
    fn sent(text: &str) -> Failure {
        let value = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).expect("an error is a value");
        value.extract_error().expect_err("it is an error").into()
    }

    fn broken() -> Failure {
        RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset)).into()
    }

    #[test]
    fn errors_of_the_scripts_are_read() {
        let foreign = sent("FOREIGN `k` has a value");
        assert!(matches!(&foreign, Failure::Foreign(what) if what == "`k` has a value"), "{foreign:?}");
        let evicts = Unfit::Evicts { policy: "allkeys-lru".to_owned(), maxmemory: 100 };
        assert!(matches!(sent("EVICTS allkeys-lru 100"), Failure::Unfit(it) if it == evicts));
    }

    #[test]
    fn a_connection_ends_when_it_broke_is_silent_or_reaches_a_replica() {
        assert!(broken().ends_connection() && Failure::silent("answering", Duration::ZERO).ends_connection());
        let late: Failure = RedisError::from(io::Error::from(io::ErrorKind::TimedOut)).into();
        let garbled: Failure = RedisError::from((ErrorKind::Parse, "it is no answer")).into();
        assert!(late.ends_connection() && garbled.ends_connection());
        assert!(sent("READONLY it is a replica").ends_connection());
        for other in [sent("NOSCRIPT no such script"), sent("ERR ?"), sent("LOADING ?"), Failure::Panicked] {
            assert!(!other.ends_connection(), "{other:?}");
        }
    }

    #[test]
    fn only_a_server_without_the_script_gets_its_text() {
        assert!(sent("NOSCRIPT no such script").is_no_script());
        assert!(![sent("ERR ?"), sent("READONLY ?"), broken()].iter().any(Failure::is_no_script));
    }

    #[test]
    fn a_server_that_may_answer_later_is_unavailable() {
        for text in ["LOADING ?", "MASTERDOWN ?", "CLUSTERDOWN ?", "TRYAGAIN ?", "NOREPLICAS ?", "BUSY ?"] {
            assert_eq!(sent(text).fault(), Fault::Unavailable, "{text}");
        }
        assert_eq!(broken().fault(), Fault::Unavailable);
        assert_eq!(sent("READONLY ?").fault(), Fault::ReadOnly);
        for text in ["OOM ?", "ERR ?", "NOPERM ?", "WRONGTYPE ?"] {
            assert_eq!(sent(text).fault(), Fault::Other, "{text}");
        }
    }
}
