//! What must hold after every fault. Each oracle is a function from a history to violations, and is tested on histories
//! that break it.

mod commits;
mod ledger;
mod liveness;
mod overlap;

#[cfg(test)]
pub(crate) mod planted;

use serde::Serialize;

use crate::event::Kind;
use crate::history::History;

pub(crate) use self::liveness::{
    longest_take_over, longest_without_a_grant, never_recovered, seconds, seconds_to_recover, shares,
};

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Violation {
    pub(crate) oracle: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    /// When, by the common clock; 0 where it has no time.
    pub(crate) at: u64,
    /// Why it does not count: no lock can promise it under this fault.
    pub(crate) excused: Option<&'static str>,
}

impl Violation {
    fn new(oracle: &'static str, kind: Kind, at: u64, text: String) -> Self {
        Self { oracle, kind: kind.name(), text, at, excused: None }
    }

    pub(crate) fn counts(&self) -> bool {
        self.excused.is_none()
    }
}

/// What a fault makes impossible for anybody.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Excuses {
    /// Somebody took the lease by force, or moved the clock that decides: two may believe in it for a while.
    pub(crate) beliefs: Option<&'static str>,
    /// The server forgets what it acknowledged.
    pub(crate) missing: Option<&'static str>,
    /// A session lock ends with its connection, and its holder hears of that later.
    pub(crate) sessions: Option<&'static str>,
    /// A named lock is that of one server of several.
    pub(crate) names: Option<&'static str>,
}

/// All violations of a history, without those of the controls, which are counted apart.
pub(crate) fn judge(history: &History, excuses: Excuses) -> Vec<Violation> {
    let mut found = ledger::lost_updates(history);
    found.extend(ledger::fences_out_of_order(history));
    found.extend(ledger::sums_that_changed(history));
    found.extend(commits::acknowledged_but_missing(history));
    found.extend(commits::refused_but_committed(history));
    found.extend(overlap::of_committed_sections(history));
    found.extend(overlap::of_beliefs(history));
    found.extend(overlap::fences_of_grants(history));
    found.extend(liveness::left_locked(history));
    found.extend(never_recovered(history));
    found.extend(liveness::never_taken_over(history));
    found.extend(liveness::hung(history));
    found.extend(liveness::panicked(history));
    for violation in &mut found {
        let excuse = match violation.oracle {
            overlap::BELIEFS | ledger::LOST if violation.kind == Kind::Session.name() => excuses.sessions,
            overlap::BELIEFS => excuses.beliefs,
            commits::MISSING | ledger::SUMS => excuses.missing,
            ledger::LOST if violation.kind == Kind::Named.name() => excuses.names,
            _ => None,
        };
        violation.excused = violation.excused.or(excuse);
    }
    found
}

/// How often each control was violated: without a lock, and with a commit beside the lease.
pub(crate) fn controls(history: &History) -> (usize, usize) {
    (ledger::lost_updates_of(history, Kind::NoLock).len(), ledger::lost_updates_of(history, Kind::PlainCommit).len())
}
