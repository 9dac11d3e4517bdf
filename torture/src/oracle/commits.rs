//! What callers were told of their commits, against what is in the database.

use std::collections::BTreeSet;

use crate::event::Answer;
use crate::history::History;
use crate::oracle::Violation;

pub(super) const MISSING: &str = "acknowledged but missing";
pub(super) const REFUSED: &str = "refused but committed";

/// Acknowledged, and not there.
pub(super) fn acknowledged_but_missing(history: &History) -> Vec<Violation> {
    let there: BTreeSet<_> = history.ledger.iter().map(|it| it.op).collect();
    let missing = history.sections.iter().filter(|it| it.is_committed() && !there.contains(&it.op));
    let violation = |it: &crate::history::Section| {
        Violation::new(MISSING, it.kind, it.sent.unwrap_or(0), format!("worker {}, operation {}", it.worker, it.op))
    };
    missing.map(violation).collect()
}

/// Refused, or failed before its commit was sent, and there all the same.
pub(super) fn refused_but_committed(history: &History) -> Vec<Violation> {
    let there: BTreeSet<_> = history.ledger.iter().map(|it| it.op).collect();
    let mut found = Vec::new();
    for section in history.sections.iter().filter(|it| there.contains(&it.op)) {
        let told = match (section.answer(), &section.answered) {
            (None, _) => "nothing: it was never sent",
            (Some(Answer::Refused), Some((_, _, class))) => class,
            _ => continue,
        };
        let text = format!("worker {}, operation {} was told {told}", section.worker, section.op);
        found.push(Violation::new(REFUSED, section.kind, section.sent.unwrap_or(section.asked), text));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::planted::clean;

    #[test]
    fn an_acknowledged_commit_must_be_there() {
        let mut history = clean();
        assert_eq!(acknowledged_but_missing(&history), []);
        history.ledger.remove(0);
        assert_eq!(acknowledged_but_missing(&history).len(), 1);
    }

    #[test]
    fn a_refused_commit_must_not_be_there_and_an_unknown_one_may() {
        let mut history = clean();
        assert_eq!(refused_but_committed(&history), []);
        history.sections[0].answered = Some((1, Answer::Unknown, "OutcomeUnknown".into()));
        assert_eq!(refused_but_committed(&history), []);
        history.sections[0].answered = Some((1, Answer::Refused, "Lost:Expired".into()));
        assert_eq!(refused_but_committed(&history).len(), 1);
    }

    #[test]
    fn what_was_never_sent_must_not_be_there() {
        let mut history = clean();
        history.sections[0].sent = None;
        history.sections[0].answered = None;
        assert_eq!(refused_but_committed(&history).len(), 1);
    }
}
