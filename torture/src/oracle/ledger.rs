//! What the ledger says: no update is lost, fences rise in the order of the commits, and sums stay.

use std::collections::BTreeMap;

use crate::event::Kind;
use crate::history::{Entry, History};
use crate::oracle::Violation;
use crate::rig::{CENTS, STOCK};

pub(super) const LOST: &str = "lost update";
pub(super) const FENCES: &str = "fence that fell";
pub(super) const SUMS: &str = "sum that changed";

/// Two that read the same value, or a value that is not the number of its commits.
pub(super) fn lost_updates(history: &History) -> Vec<Violation> {
    Kind::ALL.iter().filter(|kind| !kind.is_control()).flat_map(|kind| lost_updates_of(history, *kind)).collect()
}

pub(super) fn lost_updates_of(history: &History, kind: Kind) -> Vec<Violation> {
    let mut found = Vec::new();
    if kind == Kind::Stock {
        return found;
    }
    for (account, entries) in accounts(history, kind) {
        let mut readers: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for entry in &entries {
            readers.entry(entry.seen).or_default().push(entry.op);
        }
        let before = found.len();
        for (seen, ops) in readers.into_iter().filter(|(_, ops)| ops.len() > 1) {
            let at = ops.iter().map(|op| sent(history, *op)).max().unwrap_or(0);
            found.push(Violation::new(LOST, kind, at, format!("account {account}: {ops:?} both read {seen}")));
        }
        let value = history.balances.iter().find(|it| it.account == account).map(|it| it.value);
        let commits = i64::try_from(entries.len()).unwrap_or(i64::MAX);
        if found.len() == before && value.is_some_and(|value| value != commits) {
            let text = format!("account {account}: {commits} commits made {}", value.unwrap_or_default());
            found.push(Violation::new(LOST, kind, 0, text));
        }
    }
    found
}

/// In the order in which the sections saw each other's values, fences rise.
pub(super) fn fences_out_of_order(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_lease() && !kind.is_control()) {
        for (account, mut entries) in accounts(history, kind) {
            entries.sort_by_key(|it| it.seen);
            for pair in entries.windows(2) {
                if pair[1].seen > pair[0].seen && pair[1].fence <= pair[0].fence {
                    let text = format!("account {account}: after {:?} came {:?}", pair[0], pair[1]);
                    found.push(Violation::new(FENCES, kind, sent(history, pair[1].op), text));
                }
            }
        }
    }
    found
}

/// Cents are only moved, and the stock sells what it has.
pub(super) fn sums_that_changed(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    let pairs: Vec<_> = (0..Kind::Several.keys()).map(|key| Kind::Several.account(key)).collect();
    let balances: Vec<_> = history.balances.iter().filter(|it| pairs.contains(&it.account)).collect();
    let cents: i64 = balances.iter().map(|it| it.cents).sum();
    let all = CENTS * i64::try_from(balances.len()).unwrap_or(0);
    if cents != all {
        found.push(Violation::new(SUMS, Kind::Several, 0, format!("{cents} cents of {all}")));
    }
    if let Some(left) = history.stock_left {
        let account = Kind::Stock.account(0);
        let sold = history.ledger.iter().filter(|it| it.account == account).count() as u64;
        if left + sold != STOCK {
            let text = format!("{sold} sold and {left} left of {STOCK}");
            found.push(Violation::new(SUMS, Kind::Stock, 0, text));
        }
    }
    found
}

/// The ledger by the accounts of a kind.
fn accounts(history: &History, kind: Kind) -> BTreeMap<i64, Vec<Entry>> {
    let mut accounts: BTreeMap<i64, Vec<Entry>> = BTreeMap::new();
    let range = match kind {
        Kind::Own => kind.account(0)..i64::MAX,
        _ => kind.account(0)..kind.account(kind.keys()),
    };
    for entry in history.ledger.iter().filter(|it| range.contains(&it.account)) {
        accounts.entry(entry.account).or_default().push(*entry);
    }
    accounts
}

fn sent(history: &History, op: i64) -> u64 {
    history.sections.iter().find(|it| it.op == op).and_then(|it| it.sent).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Balance;
    use crate::oracle::planted::clean;

    #[test]
    fn a_clean_history_has_no_violation() {
        let history = clean();
        assert_eq!(lost_updates(&history), []);
        assert_eq!(fences_out_of_order(&history), []);
        assert_eq!(sums_that_changed(&history), []);
    }

    #[test]
    fn two_that_read_one_value_lost_an_update() {
        let mut history = clean();
        history.ledger[1].seen = history.ledger[0].seen;
        assert_eq!(lost_updates(&history).len(), 1);
    }

    #[test]
    fn a_value_that_is_not_the_number_of_commits_lost_an_update() {
        let mut history = clean();
        history.balances[0].value -= 1;
        assert_eq!(lost_updates(&history).len(), 1);
    }

    #[test]
    fn a_fence_that_falls_or_stays_is_seen() {
        for fence in [history_fence(0) - 1, history_fence(0)] {
            let mut history = clean();
            history.ledger[1].fence = fence;
            assert_eq!(fences_out_of_order(&history).len(), 1);
        }
    }

    fn history_fence(line: usize) -> i64 {
        clean().ledger[line].fence
    }

    #[test]
    fn a_cent_too_many_and_a_piece_sold_twice_are_seen() {
        let mut history = clean();
        history.balances.push(Balance { account: Kind::Several.account(0), value: 0, cents: CENTS + 1 });
        assert_eq!(sums_that_changed(&history).len(), 1);
        let mut history = clean();
        history.stock_left = history.stock_left.map(|left| left + 1);
        assert_eq!(sums_that_changed(&history).len(), 1);
    }
}
