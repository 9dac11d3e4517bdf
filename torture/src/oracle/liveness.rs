//! What must go on: locks come free, processes recover after a fault, and nobody is kept out.

use std::collections::BTreeMap;

use crate::clock::SECOND;
use crate::event::Kind;
use crate::history::{History, Section};
use crate::oracle::Violation;

pub(super) const LEFT: &str = "still locked";
pub(super) const RECOVERY: &str = "never recovered";
pub(super) const HUNG: &str = "hung";
pub(super) const TAKE_OVER: &str = "never taken over";
pub(super) const PANICKED: &str = "panicked";

/// How long after a ttl a dead holder's key may stay taken on a busy machine.
const PATIENCE: u64 = 5 * SECOND;

/// A process that has lived so much shorter before the end of a lane need not have recovered.
const SETTLED: u64 = 3 * SECOND;

/// What was still locked after the last worker's end and a ttl.
pub(super) fn left_locked(history: &History) -> Vec<Violation> {
    history.left_locked.iter().map(|it| Violation::new(LEFT, Kind::Lease, 0, it.clone())).collect()
}

/// A process that did not commit under a lease again after the heal, on a key that nobody else wants.
pub(crate) fn never_recovered(history: &History) -> Vec<Violation> {
    let Some((healed, ended)) = history.healing.filter(|(healed, ended)| ended - healed >= SETTLED) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (worker, life) in &history.lives {
        if life.killed.is_some_and(|it| it < ended) && !life.hung || life.began + SETTLED > ended {
            continue;
        }
        if recovery_of(history, *worker, healed).is_none() {
            let failures = failures_of(history, *worker, healed);
            let text = format!(
                "worker {worker} did not commit under a lease within {:.1} s of the heal; it was told {failures}",
                seconds(ended - healed)
            );
            found.push(Violation::new(RECOVERY, Kind::Own, healed, text));
        }
    }
    found
}

/// The key of a dead holder that nobody got long after its ttl. How long it takes is reported, not judged.
pub(super) fn never_taken_over(history: &History) -> Vec<Violation> {
    let limit = history.ttl + PATIENCE;
    let mut found = Vec::new();
    for (worker, killed) in history.lives.iter().filter_map(|(id, life)| Some((*id, life.killed?))) {
        for (key, died) in keys_held_at(history, worker, killed) {
            let next = next_grant(history, worker, key, died);
            if next.unwrap_or(history.ended).saturating_sub(died) > limit {
                let until = next.map_or("at all".to_owned(), |at| format!("for {:.1} s", seconds(at - died)));
                let text = format!("{key}: worker {worker} died, and nobody got it {until}");
                found.push(Violation::new(TAKE_OVER, Kind::Lease, died, text));
            }
        }
    }
    found
}

/// A panic of any task, though Tokio hides it: with `panic = "abort"` it ends the process.
pub(super) fn panicked(history: &History) -> Vec<Violation> {
    let panics = history.panics.iter();
    panics
        .map(|it| Violation::new(PANICKED, Kind::Lease, it.at, format!("worker {}: {}", it.worker, it.text)))
        .collect()
}

/// A process that did not end when it was told to, though every operation of its has a limit.
pub(super) fn hung(history: &History) -> Vec<Violation> {
    let hung = history.lives.iter().filter(|(_, life)| life.hung);
    hung.map(|(id, _)| Violation::new(HUNG, Kind::Lease, 0, format!("worker {id} did not end"))).collect()
}

/// How long it took until the last process had committed again after the heal.
pub(crate) fn seconds_to_recover(history: &History) -> Option<f64> {
    let (healed, ended) = history.healing?;
    let lived = history.lives.iter().filter(|(_, life)| life.killed.is_none() && life.began + SETTLED < ended);
    lived.filter_map(|(id, _)| Some(recovery_of(history, *id, healed)? - healed)).max().map(seconds)
}

/// The longest time from a holder's violent death to the next grant of its key, where somebody waited for it.
pub(crate) fn longest_take_over(history: &History) -> Option<f64> {
    let mut longest = None;
    for (worker, killed) in history.lives.iter().filter_map(|(id, life)| Some((*id, life.killed?))) {
        for (key, died) in keys_held_at(history, worker, killed) {
            longest = longest.max(next_grant(history, worker, key, died).map(|at| at - died));
        }
    }
    longest.map(seconds)
}

/// The longest time in which no worker was granted any lease.
pub(crate) fn longest_without_a_grant(history: &History) -> Option<f64> {
    let leases = history.sections.iter().filter(|it| it.kind.is_lease());
    let mut grants: Vec<_> = leases.flat_map(|it| it.granted.iter().map(|(_, _, at)| *at)).collect();
    grants.extend([history.began, history.ended]);
    grants.sort_unstable();
    grants.windows(2).map(|pair| pair[1] - pair[0]).max().map(seconds)
}

/// The grants of the contended lease, by worker, as shares of all.
pub(crate) fn shares(history: &History) -> BTreeMap<u32, f64> {
    let mut grants: BTreeMap<u32, f64> = history.lives.keys().map(|id| (*id, 0.0)).collect();
    let mut all = 0.0;
    for section in history.sections.iter().filter(|it| it.kind == Kind::Lease && !it.granted.is_empty()) {
        *grants.entry(section.worker).or_default() += 1.0;
        all += 1.0;
    }
    for share in grants.values_mut() {
        *share /= f64::max(all, 1.0);
    }
    grants
}

/// The keys of leases that a worker held when it died.
fn keys_held_at(history: &History, worker: u32, killed: u64) -> Vec<(&str, u64)> {
    let mine = history.sections.iter().filter(|it| it.worker == worker && it.kind.is_lease() && it.kind != Kind::Own);
    let open = mine.filter(|it| it.answered.is_none() && it.failed.is_none() && it.believed_until >= killed);
    open.flat_map(|it| it.granted.iter().map(|(key, _, _)| (key.as_str(), killed))).collect()
}

/// When another worker was granted the key after its holder's death.
fn next_grant(history: &History, worker: u32, key: &str, died: u64) -> Option<u64> {
    let others = history.sections.iter().filter(|it| it.worker != worker);
    others.flat_map(|it| grants(it, key)).filter(|at| *at > died).min()
}

fn grants<'a>(section: &'a Section, key: &'a str) -> impl Iterator<Item = u64> + 'a {
    section.granted.iter().filter(move |it| it.0 == key).map(|it| it.2)
}

fn recovery_of(history: &History, worker: u32, healed: u64) -> Option<u64> {
    let own = history.sections.iter().filter(|it| it.worker == worker && it.kind == Kind::Own && it.is_committed());
    own.filter_map(|it| Some(it.answered.as_ref()?.0)).filter(|at| *at > healed).min()
}

/// What a worker's operations ended with after an instant, and how often.
/// How often each error came, with the last of its texts.
fn failures_of(history: &History, worker: u32, since: u64) -> String {
    let mut classes: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    let own = history.sections.iter().filter(|it| it.worker == worker && it.kind == Kind::Own);
    for section in own {
        let told = section.answered.as_ref().map(|(at, _, class)| (*at, class.as_str(), ""));
        let failed = section.failed.as_ref().map(|(at, class, text)| (*at, class.as_str(), text.as_str()));
        if let Some((_, class, text)) = told.or(failed).filter(|(at, ..)| *at > since) {
            let (times, last) = classes.entry(class).or_default();
            *times += 1;
            *last = text;
        }
    }
    if classes.is_empty() {
        return "nothing at all".to_owned();
    }
    classes
        .into_iter()
        .map(|(class, (times, last))| format!("{class} {times} times: {last}"))
        .collect::<Vec<_>>()
        .join("; ")
}

pub(crate) fn seconds(nanos: u64) -> f64 {
    std::time::Duration::from_nanos(nanos).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crew::Life;
    use crate::history::Panic;
    use crate::oracle::planted::{clean, own_commit};

    #[test]
    fn what_is_left_and_what_hangs_is_told() {
        let mut history = clean();
        assert_eq!(left_locked(&history), []);
        assert_eq!(hung(&history), []);
        history.left_locked.push("lease/0".into());
        history.lives.insert(1, Life { hung: true, ..Life::default() });
        assert_eq!(left_locked(&history).len(), 1);
        assert_eq!(hung(&history).len(), 1);
    }

    #[test]
    fn a_panic_of_any_task_is_told() {
        let mut history = clean();
        assert_eq!(panicked(&history), []);
        history.panics.push(Panic { worker: 2, at: 7, text: "panicked at lib.rs:1:2".into() });
        let found = panicked(&history);
        assert_eq!((found.len(), found[0].at), (1, 7));
        assert!(found[0].text.starts_with("worker 2: "), "{found:?}");
    }

    #[test]
    fn a_process_that_never_commits_again_is_told() {
        let mut history = clean();
        history.lives = [(1, Life::default()), (2, Life::default())].into();
        history.healing = Some((10 * SECOND, 19 * SECOND));
        history.sections = vec![own_commit(1, 12 * SECOND), own_commit(2, 9 * SECOND)];
        let found = never_recovered(&history);
        assert_eq!(found.len(), 1);
        assert!(found[0].text.starts_with("worker 2 "), "{found:?}");
        history.sections.push(own_commit(2, 18 * SECOND));
        assert_eq!(never_recovered(&history), []);
        assert_eq!(seconds_to_recover(&history), Some(8.0));
    }

    #[test]
    fn the_longest_time_without_a_grant_counts_the_begin_and_the_end() {
        let mut history = clean();
        (history.began, history.ended) = (SECOND, 4 * SECOND);
        assert_eq!(longest_without_a_grant(&history), Some(1.0));
        history.ended = 8 * SECOND;
        assert_eq!(longest_without_a_grant(&history), Some(4.9));
        history.sections.clear();
        assert_eq!(longest_without_a_grant(&history), Some(7.0));
    }

    #[test]
    fn a_dead_holders_key_is_taken_over_by_the_next_grant_of_another() {
        let mut history = clean();
        history.lives.insert(1, Life { killed: Some(5 * SECOND), ..Life::default() });
        let mut dead = own_commit(1, 4 * SECOND);
        (dead.kind, dead.answered, dead.sent) = (Kind::Lease, None, None);
        dead.granted = vec![("lease/0".into(), 8, 4 * SECOND)];
        dead.believed_until = 5 * SECOND;
        let mut heir = own_commit(2, 7 * SECOND);
        (heir.kind, heir.granted) = (Kind::Lease, vec![("lease/0".into(), 9, 6 * SECOND)]);
        history.sections = vec![dead, heir];
        history.ended = 30 * SECOND;
        assert_eq!(longest_take_over(&history), Some(1.0));
        assert_eq!(never_taken_over(&history), []);
        history.sections[1].granted[0].2 = 12 * SECOND;
        assert_eq!(never_taken_over(&history).len(), 1);
        history.sections.pop();
        assert_eq!(never_taken_over(&history).len(), 1);
    }
}
