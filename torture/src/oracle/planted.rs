//! A history without a violation, for tests to break.

use crate::clock::SECOND;
use crate::event::{Answer, Kind};
use crate::history::{Balance, Entry, History, Section};
use crate::rig::STOCK;

/// Three workers commit one after the other under the lease `lease/0`, and one piece of stock is sold.
pub(crate) fn clean() -> History {
    let account = Kind::Lease.account(0);
    let sections: Vec<_> = (1..=3).map(section).collect();
    let mut ledger: Vec<_> =
        (0..3).map(|line| Entry { op: line + 1, account, seen: line, fence: 100 + 2 * line }).collect();
    ledger.push(Entry { op: 9, account: Kind::Stock.account(0), seen: 9, fence: 0 });
    History {
        sections,
        ledger,
        balances: vec![Balance { account, value: 3, cents: 0 }],
        stock_left: Some(STOCK - 1),
        ttl: SECOND,
        ..History::default()
    }
}

fn section(number: u32) -> Section {
    let start = u64::from(number) * SECOND;
    Section {
        op: number.into(),
        worker: number,
        kind: Kind::Lease,
        asked: start,
        granted: vec![(Kind::Lease.key(0), 100 + 2 * i64::from(number - 1), start + SECOND / 10)],
        believed_until: start + SECOND / 2,
        sent: Some(start + SECOND / 2),
        answered: Some((start + SECOND / 2 + 1, Answer::Committed, "Ok".into())),
        failed: None,
    }
}

/// A commit of a worker under the lease that is its own, acknowledged at this instant.
pub(crate) fn own_commit(worker: u32, at: u64) -> Section {
    let mut section = section(worker);
    section.kind = Kind::Own;
    section.granted = vec![(Kind::Own.key(worker), 1, at - 2)];
    section.sent = Some(at - 1);
    section.answered = Some((at, Answer::Committed, "Ok".into()));
    section
}
