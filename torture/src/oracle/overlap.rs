//! One key, one holder: committed sections never overlap, and neither do beliefs.

use std::collections::BTreeMap;

use crate::event::Kind;
use crate::history::{History, Section};
use crate::oracle::Violation;

pub(super) const SECTIONS: &str = "overlap of committed sections";
pub(super) const BELIEFS: &str = "overlap of beliefs";
pub(super) const GRANTS: &str = "fence of a later grant that is not higher";

/// Committed sections under a lease: from the grant to the moment before the commit is sent, nobody else gets the key.
pub(super) fn of_committed_sections(history: &History) -> Vec<Violation> {
    let committed = |it: &&Section| it.kind.is_lease() && !it.kind.is_control() && it.is_committed();
    let sections = history.sections.iter().filter(committed);
    overlaps(SECTIONS, sections.filter_map(|it| Some((it, it.sent?))))
}

/// From the grant to the end of the trust, nobody else believes to have the key.
pub(super) fn of_beliefs(history: &History) -> Vec<Violation> {
    let held = |it: &&Section| it.kind.is_held() && it.kind != Kind::PlainCommit;
    overlaps(BELIEFS, history.sections.iter().filter(held).map(|it| (it, it.believed_until)))
}

/// A grant that was asked for after another grant of the key had come has a higher fence, whatever became of either.
pub(super) fn fences_of_grants(history: &History) -> Vec<Violation> {
    let mut keys: BTreeMap<&str, Vec<(u64, i64, &Section)>> = BTreeMap::new();
    for section in history.sections.iter().filter(|it| it.kind.is_lease()) {
        for (key, fence, at) in &section.granted {
            keys.entry(key).or_default().push((*at, *fence, section));
        }
    }
    let mut found = Vec::new();
    for (key, mut granted) in keys {
        granted.sort_by_key(|it| it.0);
        let mut asked = granted.clone();
        asked.sort_by_key(|it| it.2.asked);
        let (mut earlier, mut highest) = (granted.into_iter().peekable(), None);
        for (at, fence, section) in asked {
            while let Some((_, earlier_fence, _)) = earlier.next_if(|it| it.0 < section.asked) {
                highest = highest.max(Some(earlier_fence));
            }
            if let Some(highest) = highest.filter(|it| fence <= *it) {
                let text = format!("{key}: operation {} got {fence} after {highest} was granted", section.op);
                found.push(Violation::new(GRANTS, section.kind, at, text));
            }
        }
    }
    found
}

/// Two intervals of one key that overlap. O(n log n). One that was over when its holder heard of the grant, because it
/// was stopped before, is none.
fn overlaps<'a>(oracle: &'static str, sections: impl Iterator<Item = (&'a Section, u64)>) -> Vec<Violation> {
    let mut keys: BTreeMap<&str, Vec<(u64, u64, &Section)>> = BTreeMap::new();
    for (section, end) in sections {
        for (key, _, granted) in section.granted.iter().filter(|it| it.2 < end) {
            keys.entry(key).or_default().push((*granted, end, section));
        }
    }
    let mut found = Vec::new();
    for (key, mut intervals) in keys {
        intervals.sort_by_key(|it| it.0);
        let mut last: Option<(u64, &Section)> = None;
        for (granted, end, section) in intervals {
            if let Some((until, other)) = last.filter(|(until, _)| granted < *until) {
                let text = format!(
                    "{key}: worker {} was granted it {} ms before the end of worker {}'s, operations {} and {}",
                    section.worker,
                    (until - granted) / crate::clock::MILLISECOND,
                    other.worker,
                    section.op,
                    other.op
                );
                found.push(Violation::new(oracle, section.kind, granted, text));
            }
            if last.is_none_or(|(until, _)| end > until) {
                last = Some((end, section));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::planted::clean;

    #[test]
    fn sections_one_after_the_other_are_fine() {
        assert_eq!(of_committed_sections(&clean()), []);
        assert_eq!(of_beliefs(&clean()), []);
    }

    #[test]
    fn a_grant_before_the_others_commit_is_an_overlap() {
        let mut history = clean();
        history.sections[1].granted[0].2 = history.sections[0].sent.expect("it was sent") - 1;
        assert_eq!(of_committed_sections(&history).len(), 1);
        // Of one that did not commit it is none.
        history.sections[0].answered = None;
        assert_eq!(of_committed_sections(&history), []);
    }

    #[test]
    fn a_grant_before_the_end_of_the_others_trust_is_an_overlap() {
        let mut history = clean();
        history.sections[0].believed_until = history.sections[1].granted[0].2 + 1;
        assert_eq!(of_beliefs(&history).len(), 1);
        // The other one was stopped, and heard of its grant after the end of its trust.
        history.sections[1].believed_until = history.sections[1].granted[0].2;
        assert_eq!(of_beliefs(&history), []);
    }

    #[test]
    fn a_later_grant_with_a_fence_that_is_not_higher_is_seen() {
        assert_eq!(fences_of_grants(&clean()), []);
        for fence in [100, 99] {
            let mut history = clean();
            history.sections[2].granted[0].1 = fence;
            assert_eq!(fences_of_grants(&history).len(), 1);
            // What was asked for before the others came may have any.
            history.sections[2].asked = history.sections[0].asked;
            assert_eq!(fences_of_grants(&history), []);
        }
    }

    #[test]
    fn a_long_belief_is_compared_with_all_that_come_in_it() {
        let mut history = clean();
        history.sections[0].believed_until = u64::MAX;
        assert_eq!(of_beliefs(&history).len(), 2);
    }
}
