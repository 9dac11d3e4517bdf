//! What must hold of the payments of a run. Knows no database.

use std::collections::BTreeMap;

use super::clients::{Reply, name};
use crate::oracle::Violation;

pub(super) const DOUBLE: &str = "double charge";
const MISSING: &str = "answered but not charged";
const DIFFERENT: &str = "different answers";
const OTHER: &str = "answer of another charge";
const REFUSED: &str = "never answered";
const REPEATED: &str = "not replayed";
const LEFT: &str = "left behind";

/// An answer, and whether it was stored before.
type Answered = Option<(Reply, bool)>;

/// All that the oracle looks at.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub(super) keys: u32,
    /// What each client was answered, with its key.
    pub(super) answers: Vec<(u32, Answered)>,
    /// What another client was answered for each key, when all was well again.
    pub(super) again: Vec<(u32, Answered)>,
    /// The name of the key and the number of each payment in the database.
    pub(super) charges: Vec<(String, i64)>,
    /// How many keys have an answer in lockkit's table, and how many have none. `None` for the control.
    pub(super) stored: Option<(i64, i64)>,
    /// What is still locked at the end, a line each.
    pub(super) left: Vec<String>,
    /// How the processes ended that were not killed.
    pub(super) ended: Vec<String>,
}

/// All violations of a run.
pub(super) fn judge(record: &Record) -> Vec<Violation> {
    let Record { keys, answers, again, charges, stored, left, ended } = record;
    let mut charged: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (key, payment) in charges {
        charged.entry(key).or_default().push(*payment);
    }
    let mut found = Vec::new();
    let mut add = |oracle, text: String| {
        found.push(Violation { oracle, kind: "payment", text, at: 0, excused: None });
    };
    for key in 0..*keys {
        let name = name(key);
        let payments = charged.get(&*name).map_or(&[][..], Vec::as_slice);
        if payments.len() > 1 {
            add(DOUBLE, format!("{name} was charged {} times", payments.len()));
        }
        let of_key = answers.iter().chain(again).filter(|it| it.0 == key);
        let replies: Vec<_> = of_key.filter_map(|it| Some(&it.1.as_ref()?.0)).collect();
        let Some((first, others)) = replies.split_first() else { continue };
        if payments.is_empty() {
            add(MISSING, format!("{name} was answered {}", text(first)));
        }
        if let Some(other) = others.iter().find(|other| *other != first) {
            add(DIFFERENT, format!("{name} was answered {} and {}", text(first), text(other)));
        }
        let is_charged = |reply: &Reply| number(reply).is_some_and(|it| payments.contains(&it));
        if !payments.is_empty() && !replies.iter().all(|reply| is_charged(reply)) {
            add(OTHER, format!("{name} was charged as {payments:?} and answered {}", text(first)));
        }
    }
    for (key, answered) in answers.iter().chain(again) {
        match answered {
            None => add(REFUSED, format!("{} got no answer in time", name(*key))),
            Some((reply, _)) if reply.status != 201 => add(REFUSED, format!("{} got {}", name(*key), text(reply))),
            Some(_) => {}
        }
    }
    for (key, _) in again.iter().filter(|it| matches!(it.1, Some((_, false)))) {
        add(REPEATED, format!("{} was paid for once more at the end", name(*key)));
    }
    if let Some((stored, begun)) = stored
        && (*stored != i64::from(*keys) || *begun != 0)
    {
        add(LEFT, format!("{stored} stored answers for {keys} keys, and {begun} rows without an answer"));
    }
    for left in left {
        add(LEFT, format!("still locked: {left}"));
    }
    for ended in ended {
        add(LEFT, format!("a process of the service ended by itself: {ended}"));
    }
    found
}

/// The number of the payment that an answer names.
fn number(reply: &Reply) -> Option<i64> {
    serde_json::from_slice::<serde_json::Value>(&reply.body).ok()?["payment"].as_i64()
}

fn text(reply: &Reply) -> String {
    format!("{} {}", reply.status, String::from_utf8_lossy(&reply.body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(payment: i64) -> Reply {
        let body = format!("{{\"payment\":{payment}}}").into_bytes();
        Reply { status: 201, headers: vec![("location".into(), payment.to_string().into_bytes())], body }
    }

    /// Two keys, three clients each, and one more at the end.
    fn clean() -> Record {
        let of = |key| Some((reply(100 + i64::from(key)), true));
        Record {
            keys: 2,
            answers: vec![(0, of(0)), (0, of(0)), (0, of(0)), (1, of(1)), (1, of(1)), (1, of(1))],
            again: vec![(0, of(0)), (1, of(1))],
            charges: vec![("k0".into(), 100), ("k1".into(), 101)],
            stored: Some((2, 0)),
            ..Record::default()
        }
    }

    /// What is said of a record with this bug.
    fn said(plant: impl FnOnce(&mut Record)) -> Vec<&'static str> {
        let mut record = clean();
        plant(&mut record);
        judge(&record).into_iter().map(|it| it.oracle).collect()
    }

    #[test]
    fn one_charge_and_one_answer_for_each_key_is_fine() {
        assert_eq!(said(|_| {}), [""; 0]);
    }

    #[test]
    fn each_planted_bug_is_seen() {
        assert_eq!(said(|it| it.charges.push(("k1".into(), 7))), [DOUBLE]);
        assert_eq!(said(|it| drop(it.charges.pop())), [MISSING]);
        assert_eq!(said(|it| it.charges[0].1 = 7), [OTHER]);
        assert_eq!(said(|it| it.answers[4].1 = None), [REFUSED]);
        assert_eq!(said(|it| it.again[1].1 = None), [REFUSED]);
        assert_eq!(said(|it| it.again[1].1 = Some((reply(101), false))), [REPEATED]);
        assert_eq!(said(|it| it.stored = Some((2, 1))), [LEFT]);
        assert_eq!(said(|it| it.stored = Some((1, 0))), [LEFT]);
        assert_eq!(said(|it| it.left.push("a session".into())), [LEFT]);
        assert_eq!(said(|it| it.ended.push("signal: 6".into())), [LEFT]);
    }

    #[test]
    fn a_byte_of_a_body_or_header_makes_another_answer() {
        let plant = |change: fn(&mut Reply)| {
            move |record: &mut Record| {
                for it in [&mut record.answers[5], &mut record.again[0]] {
                    let (reply, _) = it.1.as_mut().expect("an answer");
                    change(reply);
                }
            }
        };
        assert_eq!(said(plant(|it| it.body.push(b' '))), [DIFFERENT, DIFFERENT]);
        assert_eq!(said(plant(|it| it.headers[0].1.push(b'/'))), [DIFFERENT, DIFFERENT]);
        assert_eq!(said(plant(|it| it.headers.clear())), [DIFFERENT, DIFFERENT]);
        assert_eq!(said(plant(|it| it.status = 503)), [DIFFERENT, DIFFERENT, REFUSED, REFUSED]);
    }
}
