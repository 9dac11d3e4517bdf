//! What can go wrong: with the session, and with one call.

use std::io;

use lockkit::{Error, Fault, Key, store::BoxError};
use zookeeper_client::Error as Zk;

/// How many characters of another owner's data an error shows.
const SHOWN: usize = 40;

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
    /// No server gave a session in the time of a session timeout.
    #[error("ZooKeeper cannot be reached at {servers}: check the addresses, and that the servers have a quorum")]
    #[non_exhaustive]
    Unreachable {
        /// The addresses, without user names and passwords.
        servers: String,
        /// The error of the client.
        source: BoxError,
    },
    /// The servers answer, and cannot keep leases as they are.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The system allows no thread for the session.
    #[error("the thread of the session could not be started: check the limits of the process")]
    #[non_exhaustive]
    NoThread {
        /// The error of the system.
        source: io::Error,
    },
}

/// Why servers cannot keep leases, and what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The node of the root could not be created.
    #[error("the root node `{root}` could not be created: check the rights on its parent, and that the chroot exists")]
    #[non_exhaustive]
    Root {
        /// The root.
        root: String,
        /// The error of the client.
        source: Zk,
    },
}

/// The source of an error of lockkit: ZooKeeper could not be reached, or did not answer in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer from ZooKeeper at `{hosts}`: {reason}")]
#[non_exhaustive]
pub struct NotConnected {
    /// The list of servers.
    pub hosts: String,
    /// What is known of the connection.
    pub reason: String,
    /// Marks an answer that did not come, for code that walks an error chain.
    source: io::Error,
}

/// The source of an error of lockkit: the numbers of ZooKeeper are used up. Nothing was granted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NumbersExhausted {
    /// The number of the transaction is too large for a fence.
    #[error("transaction {czxid:#x} is too large for a fence below 2^62: the ensemble has had 4,194,304 leaders")]
    #[non_exhaustive]
    Fence {
        /// The transaction that created the child of the claim.
        czxid: i64,
    },
    /// The key has had 2^31 claims. Sequence numbers would start again, and the order of the claims would be lost.
    #[error("the node of the key has had 2^31 children: delete it when no process uses the key")]
    #[non_exhaustive]
    Sequence,
}

/// A node of another owner, which is never written, released or deleted.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "the node `{path}` belongs to another program and is no lock: it has the data `{data}`; lockkit leaves it as it \
     is, so use another root or key, or empty the node if it is for locks only"
)]
pub(crate) struct Foreign {
    path: String,
    /// The start of its data, for people to read.
    data: String,
}

impl Foreign {
    pub(crate) fn new(path: impl Into<String>, data: &[u8]) -> Self {
        let text = String::from_utf8_lossy(data);
        let mut start = String::new();
        for char in text.chars().take(SHOWN) {
            match char {
                '"' | '\'' => start.push(char),
                other => start.extend(other.escape_debug()),
            }
        }
        if text.chars().nth(SHOWN).is_some() {
            start.push('…');
        }
        Self { path: path.into(), data: start }
    }
}

/// How an operation failed.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The server refused it, or no answer came.
    Client(Zk),
    /// The transaction is too large for a fence.
    NoFence(i64),
    /// The key has had too many claims.
    NoNumber,
    /// A node at the place of a lock is not one.
    Foreign(Foreign),
    /// The time for an answer is over, or the store is closed.
    Silence(String),
}

impl From<Zk> for Failure {
    fn from(err: Zk) -> Self {
        Self::Client(err)
    }
}

impl Failure {
    /// The error of lockkit.
    pub(crate) fn while_doing(self, doing: &'static str, key: Option<&Key>, hosts: &str) -> Error {
        let silent = |reason| {
            let source = io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
            let not_connected = NotConnected { hosts: hosts.to_owned(), reason, source };
            Error::database(doing, key, Fault::Unavailable, Box::new(not_connected))
        };
        match self {
            Self::NoFence(czxid) => {
                Error::database(doing, key, Fault::Other, Box::new(NumbersExhausted::Fence { czxid }))
            }
            Self::NoNumber => Error::database(doing, key, Fault::Other, Box::new(NumbersExhausted::Sequence)),
            Self::Foreign(foreign) => Error::database(doing, key, Fault::Other, foreign),
            Self::Silence(reason) => silent(reason),
            Self::Client(err) if is_silence(&err) => silent(err.to_string()),
            Self::Client(Zk::NotReadOnly) => Error::database(doing, key, Fault::ReadOnly, Box::new(Zk::NotReadOnly)),
            Self::Client(err) => Error::database(doing, key, Fault::Other, Box::new(err)),
        }
    }
}

/// Whether the outcome of the request is unknown, or another one may get an answer.
pub(crate) fn is_silence(err: &Zk) -> bool {
    !matches!(
        err,
        Zk::NoNode
            | Zk::NoAuth
            | Zk::BadVersion
            | Zk::NoChildrenForEphemerals
            | Zk::NodeExists
            | Zk::NotEmpty
            | Zk::InvalidAcl
            | Zk::AuthFailed
            | Zk::NotReadOnly
            | Zk::QuotaExceeded
            | Zk::MarshallingError
            | Zk::Unimplemented
            | Zk::BadArguments(_)
            | Zk::RuntimeInconsistent
    )
}
