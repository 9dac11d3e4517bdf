//! What can go wrong: with the connection to the cluster, and with one call.
//!
//! An alarm for want of space stays until an operator ends it, so a wait would only delay the answer. It has the code
//! of "too many requests", which passes; only the text differs, so the text is matched, as for an old
//! authentication token.

use std::io::{self, ErrorKind};

use etcd_client::Error as Etcd;
use lockkit::{Error, Fault, Key, store::BoxError};

/// The source of an error of lockkit when the database of the cluster is full. Waiting does not help.
const NO_SPACE: &str = "etcd has no space left (database space exceeded), so it takes no claims: compact and \
                        defragment it or raise `--quota-backend-bytes`, and then run `etcdctl alarm disarm`";

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
    /// No member of the cluster accepted a request.
    #[error("etcd cannot be reached at {servers}: check the addresses, TLS (`https://`) and the user")]
    #[non_exhaustive]
    Unreachable {
        /// The addresses, without user names and passwords.
        servers: String,
        /// The error of the client.
        source: BoxError,
    },
}

/// How a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server refused the request. This attempt was not executed. `only`: it was the only one.
    Refused { err: Etcd, only: bool },
    /// The database of the cluster has no space left. As `Refused`.
    NoSpace { only: bool },
    /// A key of another owner is where a lock has its own. Says what is there.
    Foreign(String),
    /// The etcd lease of the request does not exist.
    NoLease,
    /// No member answered in time. The request may have been executed.
    Silent(io::Error),
}

impl Failure {
    /// The answer to a claim came when its claim was over. It says nothing about other holders.
    pub(crate) fn too_late() -> Self {
        Self::Silent(io::Error::new(ErrorKind::TimedOut, "the answer came after the claim had expired or was given up"))
    }

    /// Whether nothing of the request was executed, or will be.
    pub(crate) fn left_nothing(&self) -> bool {
        matches!(self, Self::Refused { only: true, .. } | Self::NoSpace { only: true })
    }

    /// The error of lockkit.
    pub(crate) fn while_doing<'k>(self, doing: &'static str, key: impl Into<Option<&'k Key>>) -> Error {
        let (fault, source): (_, BoxError) = match self {
            Self::Refused { err, only: true } => (Fault::Other, err.into()),
            // An attempt before it may be on its way, so this is no answer to the call.
            Self::Refused { err, only: false } => (Fault::Unavailable, err.into()),
            Self::Foreign(what) => (Fault::Other, what.into()),
            Self::NoSpace { .. } => (Fault::Unavailable, NO_SPACE.into()),
            Self::NoLease => (Fault::Unavailable, "the etcd lease of this process has ended".into()),
            Self::Silent(err) => (Fault::Unavailable, err.into()),
        };
        Error::database(doing, key, fault, source)
    }
}

/// Codes of gRPC. The texts of errors are not compared, but for [`has_old_token`].
pub(crate) mod code {
    pub(crate) const NOT_FOUND: i32 = 5;
    pub(crate) const PERMISSION_DENIED: i32 = 7;
    pub(crate) const RESOURCE_EXHAUSTED: i32 = 8;
    /// Invalid argument, already exists, permission denied, failed precondition, out of range, unimplemented, data
    /// loss, unauthenticated.
    pub(crate) const FINAL: &[i32] = &[3, 6, 7, 9, 11, 12, 15, 16];
}

/// Whether the users or roles have changed since the client's JWT was made. Only its text differs from other errors.
/// The client itself gets a new token only when one has expired.
pub(crate) fn has_old_token(err: &Etcd) -> bool {
    matches!(err, Etcd::GRpcStatus(status) if status.message().contains("revision of auth store is old"))
}

/// Whether the database of the cluster is larger than its quota. Only its text differs from other errors with the same
/// code, such as too many requests.
fn has_no_space(err: &Etcd) -> bool {
    matches!(err, Etcd::GRpcStatus(status)
        if status.code() as i32 == code::RESOURCE_EXHAUSTED && status.message().contains("database space exceeded"))
}

/// `Err` with an error that may pass.
pub(crate) fn refused(err: Etcd, only: bool) -> Result<Failure, Etcd> {
    match err {
        // Its only meaning: the server does not know the lease.
        Etcd::LeaseKeepAliveError(_) => Ok(Failure::NoLease),
        Etcd::GRpcStatus(status) if status.code() as i32 == code::NOT_FOUND => Ok(Failure::NoLease),
        Etcd::GRpcStatus(status) if code::FINAL.contains(&(status.code() as i32)) => {
            Ok(Failure::Refused { err: Etcd::GRpcStatus(status), only })
        }
        err if has_no_space(&err) => Ok(Failure::NoSpace { only }),
        err @ (Etcd::GRpcStatus(_) | Etcd::TransportError(_) | Etcd::IoError(_) | Etcd::WatchError(_)) => Err(err),
        err => Ok(Failure::Refused { err, only }),
    }
}

#[cfg(test)]
mod tests {
    use tonic::{Code, Status};

    use super::*;

    fn status(code: Code, text: &str) -> Etcd {
        Etcd::GRpcStatus(Status::new(code, text))
    }

    #[test]
    fn what_a_server_refuses_for_good_is_told_from_what_may_pass() {
        let lease = refused(status(Code::NotFound, "etcdserver: requested lease not found"), true);
        assert!(matches!(lease, Ok(Failure::NoLease)), "{lease:?}");
        for code in [Code::InvalidArgument, Code::PermissionDenied, Code::FailedPrecondition, Code::Unauthenticated] {
            let user = refused(status(code, "etcdserver"), true);
            assert!(matches!(user, Ok(Failure::Refused { only: true, .. })), "{user:?}");
        }
        let space = refused(status(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"), false);
        assert!(matches!(space, Ok(Failure::NoSpace { only: false })), "{space:?}");
        for passes in [
            status(Code::ResourceExhausted, "etcdserver: too many requests"),
            status(Code::Unavailable, "etcdserver: leader changed"),
            status(Code::Unknown, "database space exceeded"),
        ] {
            assert!(refused(passes, true).is_err());
        }
    }

    #[test]
    fn only_a_request_that_was_refused_and_sent_once_has_left_nothing() {
        let refused = |only| Failure::Refused { err: status(Code::PermissionDenied, ""), only };
        assert!(refused(true).left_nothing() && Failure::NoSpace { only: true }.left_nothing());
        assert!(!refused(false).left_nothing() && !Failure::NoSpace { only: false }.left_nothing());
        assert!(!Failure::too_late().left_nothing());
        let is_answer = |only| {
            let err = refused(only).while_doing("testing", None);
            matches!(err, Error::Database { fault: Fault::Other, .. })
        };
        assert!(is_answer(true) && !is_answer(false));
    }

    #[test]
    fn an_old_token_is_told_from_other_mistakes() {
        assert!(has_old_token(&status(Code::InvalidArgument, "etcdserver: revision of auth store is old")));
        assert!(!has_old_token(&status(Code::InvalidArgument, "etcdserver: user name is empty")));
    }
}
