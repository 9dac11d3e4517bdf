//! What happened in a lane, put together from the events of all workers and from the database. Knows no database.

use std::collections::BTreeMap;

use crate::crew::Life;
use crate::event::{Answer, Event, Kind, What};

/// One operation of one worker.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) op: i64,
    pub(crate) worker: u32,
    pub(crate) kind: Kind,
    pub(crate) asked: u64,
    /// Key, fence, and the instant of the grant.
    pub(crate) granted: Vec<(String, i64, u64)>,
    /// Where the holder's belief ends, at the latest; `u64::MAX` where nothing bounds it.
    pub(crate) believed_until: u64,
    pub(crate) sent: Option<u64>,
    pub(crate) answered: Option<(u64, Answer, String)>,
    pub(crate) failed: Option<(u64, String, String)>,
}

/// A line of the ledger: a committed operation, the value that it read, and the fence that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) op: i64,
    pub(crate) account: i64,
    pub(crate) seen: i64,
    pub(crate) fence: i64,
}

/// What is in an account at the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Balance {
    pub(crate) account: i64,
    pub(crate) value: i64,
    pub(crate) cents: i64,
}

/// A panic in a worker, of any of its tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Panic {
    pub(crate) worker: u32,
    pub(crate) at: u64,
    pub(crate) text: String,
}

/// All that the oracles look at.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) sections: Vec<Section>,
    pub(crate) ledger: Vec<Entry>,
    pub(crate) balances: Vec<Balance>,
    /// What is left in the stock; `None` if it could not be asked.
    pub(crate) stock_left: Option<u64>,
    pub(crate) lives: BTreeMap<u32, Life>,
    pub(crate) panics: Vec<Panic>,
    /// What is still locked after the last worker's end and a ttl, a line each.
    pub(crate) left_locked: Vec<String>,
    /// From the heal to the end of the lane, where the lane has a time to heal.
    pub(crate) healing: Option<(u64, u64)>,
    pub(crate) ttl: u64,
    /// When the workers were started.
    pub(crate) began: u64,
    /// When the workers were told to end.
    pub(crate) ended: u64,
}

/// Puts events, in the order of the clock, together to operations.
pub(crate) fn sections(events: &[Event], lives: &BTreeMap<u32, Life>) -> Vec<Section> {
    let mut sections: BTreeMap<i64, Section> = BTreeMap::new();
    for Event { at, worker, op, kind, key, what } in events {
        let section = sections.entry(*op).or_insert_with(|| Section {
            op: *op,
            worker: *worker,
            kind: *kind,
            asked: *at,
            granted: Vec::new(),
            believed_until: u64::MAX,
            sent: None,
            answered: None,
            failed: None,
        });
        match what {
            What::Asked => {}
            What::Granted { fence, until } => {
                section.granted.push((key.clone(), *fence, *at));
                section.believed_until = section.believed_until.min(*until);
            }
            What::Renewed { until } => section.believed_until = *until,
            What::Lost | What::Ended => section.believed_until = section.believed_until.min(*at),
            What::Sent => {
                section.sent = Some(*at);
                // The commit of these gives the lease back.
                if matches!(kind, Kind::Lease | Kind::Own | Kind::Several | Kind::Named | Kind::Row) {
                    section.believed_until = section.believed_until.min(*at);
                }
            }
            What::Answered { answer, class } => {
                section.answered.get_or_insert_with(|| (*at, *answer, class.clone()));
                section.believed_until = section.believed_until.min(*at);
            }
            What::Failed { class, text, .. } => {
                section.failed.get_or_insert_with(|| (*at, class.clone(), text.clone()));
                section.believed_until = section.believed_until.min(*at);
            }
        }
    }
    // The dead believe nothing.
    for section in sections.values_mut() {
        if let Some(killed) = lives.get(&section.worker).and_then(|it| it.killed) {
            section.believed_until = section.believed_until.min(killed);
        }
    }
    sections.into_values().collect()
}

impl Section {
    /// What the caller of the commit was told; without an answer nothing is known.
    pub(crate) fn answer(&self) -> Option<Answer> {
        self.sent?;
        Some(self.answered.as_ref().map_or(Answer::Unknown, |it| it.1))
    }

    pub(crate) fn is_committed(&self) -> bool {
        self.answer() == Some(Answer::Committed)
    }
}
