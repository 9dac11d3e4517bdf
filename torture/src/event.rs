//! What workers and conductor tell each other: one JSON object a line. Knows no database.

use serde::{Deserialize, Serialize};

/// The kinds of work. Each has keys and accounts of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// A lease, and a commit under it.
    Lease,
    /// The same on a key that no other process wants: a process that cannot commit here is wedged, not starved.
    Own,
    /// A lease that is pinned in the transaction, which writes a row that refuses older fences.
    Fenced,
    /// Two leases at once, and cents moved between two accounts.
    Several,
    Named,
    Row,
    Version,
    Stock,
    Session,
    /// Control: no lock at all.
    NoLock,
    /// Control: a lease is held, but the commit does not depend on it.
    PlainCommit,
}

impl Kind {
    pub(crate) const ALL: [Self; 11] = [
        Self::Lease,
        Self::Own,
        Self::Fenced,
        Self::Several,
        Self::Named,
        Self::Row,
        Self::Version,
        Self::Stock,
        Self::Session,
        Self::NoLock,
        Self::PlainCommit,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Own => "own",
            Self::Fenced => "fenced",
            Self::Several => "several",
            Self::Named => "named",
            Self::Row => "row",
            Self::Version => "version",
            Self::Stock => "stock",
            Self::Session => "session",
            Self::NoLock => "no lock",
            Self::PlainCommit => "plain commit",
        }
    }

    pub(crate) fn is_control(self) -> bool {
        matches!(self, Self::NoLock | Self::PlainCommit)
    }

    /// Whether a grant has a fence and an end of trust.
    pub(crate) fn is_lease(self) -> bool {
        matches!(self, Self::Lease | Self::Own | Self::Fenced | Self::Several | Self::PlainCommit)
    }

    /// Whether the holder believes in its lock from the grant to an end that it can tell.
    pub(crate) fn is_held(self) -> bool {
        self.is_lease() || self == Self::Session
    }

    /// How many keys the workers compete for.
    pub(crate) fn keys(self) -> u32 {
        match self {
            Self::Lease | Self::Fenced | Self::Row | Self::Version => 2,
            Self::Several => 3,
            _ => 1,
        }
    }

    /// The account that a key of this kind guards.
    pub(crate) fn account(self, key: u32) -> i64 {
        // Own accounts have the worker's number, which grows as workers are replaced.
        let base = if self == Self::Own { 1_000 } else { 10 * (self as i64 + 1) };
        base + i64::from(key)
    }

    /// The name of a key in the database and in reports.
    pub(crate) fn key(self, key: u32) -> String {
        format!("{}/{key}", self.name().replace(' ', "-"))
    }
}

/// Something that happened to one operation of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub(crate) at: u64,
    pub(crate) worker: u32,
    /// Unique in a lane; also in the ledger.
    pub(crate) op: i64,
    pub(crate) kind: Kind,
    pub(crate) key: String,
    #[serde(flatten)]
    pub(crate) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(crate) enum What {
    Asked,
    /// The lock is held; a lease with this fence, trusted until this instant.
    Granted {
        fence: i64,
        until: u64,
    },
    /// A renewal moved the end of the trust.
    Renewed {
        until: u64,
    },
    /// The holder was told of the loss.
    Lost,
    /// The holder's belief ends: it is about to give the lock back.
    Ended,
    /// The commit is about to be sent.
    Sent,
    /// How the commit was answered.
    Answered {
        answer: Answer,
        class: String,
    },
    /// The operation failed before its commit was sent, or nobody was there to wait for the answer.
    Failed {
        doing: String,
        class: String,
        text: String,
    },
}

/// What the caller of a commit was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Committed,
    Refused,
    Unknown,
}

/// What a worker says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "says", rename_all = "snake_case")]
pub(crate) enum Said {
    Ready,
    Happened(Event),
    /// It aborts now.
    Aborts {
        at: u64,
    },
    Finished,
}

/// What a worker is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(crate) enum Order {
    Go,
    /// Abort the process during its next commit under a lease.
    AbortInCommit,
    /// Give everything back and end.
    Finish,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_survives_its_line() {
        let what = What::Answered { answer: Answer::Refused, class: "Lost".into() };
        let event = Event { at: 7, worker: 1, op: 1 << 40, kind: Kind::Lease, key: Kind::Lease.key(1), what };
        let line = serde_json::to_string(&Said::Happened(event.clone())).expect("to JSON");
        let Ok(Said::Happened(read)) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_eq!(read, event);
    }

    #[test]
    fn no_two_keys_share_an_account() {
        let mut accounts: Vec<_> =
            Kind::ALL.iter().flat_map(|kind| (0..kind.keys()).map(|key| kind.account(key))).collect();
        let all = accounts.len();
        accounts.sort_unstable();
        accounts.dedup();
        assert_eq!(accounts.len(), all);
    }
}
