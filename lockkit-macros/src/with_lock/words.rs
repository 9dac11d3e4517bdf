//! The words of `#[with_lock(…)]`, and which of them was probably meant. Knows nothing of syntax.

/// The kinds of locks.
pub(crate) const STRATEGIES: [&str; 5] = ["lease", "row", "named", "session", "version"];

/// What other libraries call them.
const OTHER_STRATEGIES: [(&str, &str); 9] = [
    ("advisory", "named"),
    ("pessimistic", "row"),
    ("for_update", "row"),
    ("rows", "row"),
    ("optimistic", "version"),
    ("versioned", "version"),
    ("distributed", "lease"),
    ("leases", "lease"),
    ("leader", "session"),
];

/// Every argument, and an example of it.
pub(crate) const ARGUMENTS: [(&str, &str); 22] = [
    ("on", "on = &self.db"),
    ("key", r#"key = "order:{user_id}""#),
    ("keys", r#"keys = ["account:{from}", "account:{to}"]"#),
    ("table", r#"table = "t_items""#),
    ("by", "by(item_id = item_id)"),
    ("by_any", "by_any(item_id = item_ids)"),
    ("order_by", "order_by(item_id)"),
    ("limit", "limit = 10"),
    ("skip_locked", "skip_locked"),
    ("rows", "rows = items: Vec<Item>"),
    ("ttl", r#"ttl = "30s""#),
    ("wait", r#"wait = "2s""#),
    ("min_hold", r#"min_hold = "1m""#),
    ("on_lost", "on_lost = continue"),
    ("fair", "fair"),
    ("attempts", "attempts = 3"),
    ("deadline", r#"deadline = "100ms""#),
    ("retry_if", "retry_if = path::to::test"),
    ("on_busy", "on_busy = Ok(None)"),
    ("as", "as = lease"),
    ("tx", "tx = tx"),
    ("crate", "crate = path::to::lockkit"),
];

/// What other libraries call them.
const OTHER_ARGUMENTS: [(&str, &str); 28] = [
    ("pool", "on"),
    ("db", "on"),
    ("conn", "on"),
    ("connection", "on"),
    ("leases", "on"),
    ("store", "on"),
    ("name", "key"),
    ("id", "key"),
    ("lock", "key"),
    ("names", "keys"),
    ("where", "by"),
    ("filter", "by"),
    ("column", "by"),
    ("columns", "by"),
    ("max_rows", "limit"),
    ("expiry", "ttl"),
    ("expires", "ttl"),
    ("lifetime", "ttl"),
    ("timeout", "wait"),
    ("lock_timeout", "wait"),
    ("wait_timeout", "wait"),
    ("nowait", "wait"),
    ("no_wait", "wait"),
    ("retry", "attempts"),
    ("retries", "attempts"),
    ("max_retries", "attempts"),
    ("max_attempts", "attempts"),
    ("transaction", "tx"),
];

/// The arguments that not every kind of lock has.
const OF: [(&str, &[&str]); 17] = [
    ("key", &["lease", "named", "session"]),
    ("keys", &["lease"]),
    ("table", &["row"]),
    ("by", &["row"]),
    ("by_any", &["row"]),
    ("order_by", &["row"]),
    ("limit", &["row"]),
    ("skip_locked", &["row"]),
    ("rows", &["row"]),
    ("ttl", &["lease"]),
    ("wait", &["lease", "row", "named", "session"]),
    ("min_hold", &["lease"]),
    ("on_lost", &["lease"]),
    ("fair", &["lease"]),
    ("attempts", &["row", "named", "version"]),
    ("deadline", &["row", "named", "version"]),
    ("retry_if", &["row", "named", "version"]),
];

/// The kinds of locks that have the argument.
pub(crate) fn strategies_with(argument: &str) -> &'static [&'static str] {
    OF.iter().find(|(name, _)| *name == argument).map_or(&STRATEGIES, |(_, strategies)| strategies)
}

/// An example of the argument of that name.
pub(crate) fn example(argument: &str) -> Option<&'static str> {
    ARGUMENTS.iter().find(|(name, _)| *name == argument).map(|(_, example)| *example)
}

/// The argument of that name, or nearly that name, or that another library calls so.
pub(crate) fn meant_argument(word: &str) -> Option<&'static str> {
    meant(word, &ARGUMENTS.map(|(name, _)| name), &OTHER_ARGUMENTS)
}

/// The kind of lock of that name, or nearly that name, or that another library calls so.
pub(crate) fn meant_strategy(word: &str) -> Option<&'static str> {
    meant(word, &STRATEGIES, &OTHER_STRATEGIES)
}

/// The arguments of a kind of lock; all arguments, where it is not known.
pub(crate) fn arguments_of(strategy: Option<&str>) -> String {
    let fits = |it: &&str| strategy.is_none_or(|strategy| strategies_with(it).contains(&strategy));
    let names: Vec<_> = ARGUMENTS.iter().map(|(name, _)| *name).filter(fits).collect();
    list(&names, "and")
}

fn meant(word: &str, known: &[&'static str], others: &[(&str, &'static str)]) -> Option<&'static str> {
    let word = word.to_lowercase();
    let other = others.iter().find(|(other, _)| *other == word).map(|(_, known)| *known);
    known.iter().find(|it| **it == word).copied().or(other).or_else(|| nearest(&word, known))
}

/// "`a`, `b` or `c`".
pub(crate) fn list(words: &[&str], and: &str) -> String {
    let quoted: Vec<_> = words.iter().map(|it| format!("`{it}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} {and} {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|it| (distance(word, it), *it)).min()?;
    (near.0 <= 2 && near.0 < near.1.len()).then_some(near.1)
}

/// How many letters must be inserted, removed, replaced or swapped with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        for (slip, known) in [
            ("wiat", "wait"),
            ("atempts", "attempts"),
            ("onbusy", "on_busy"),
            ("tabel", "table"),
            ("kyes", "keys"),
            ("fiar", "fair"),
            ("Key", "key"),
        ] {
            assert_eq!(meant_argument(slip), Some(known));
        }
        assert_eq!(meant_argument("colour"), None);
        assert_eq!(meant_strategy("LEASE"), Some("lease"));
        assert_eq!(nearest("x", &["on", "as"]), None);
    }

    #[test]
    fn a_word_of_other_libraries_is_understood() {
        for (other, known) in OTHER_ARGUMENTS {
            assert!(example(other).is_none() && example(known).is_some(), "{other}");
            assert_eq!(meant_argument(other), Some(known));
        }
        for (other, known) in OTHER_STRATEGIES {
            assert!(!STRATEGIES.contains(&other) && STRATEGIES.contains(&known), "{other}");
            assert_eq!(meant_strategy(other), Some(known));
        }
    }

    #[test]
    fn every_argument_of_some_kinds_is_an_argument() {
        for (argument, strategies) in OF {
            assert!(example(argument).is_some(), "{argument}");
            assert!(strategies.iter().all(|it| STRATEGIES.contains(it)), "{argument}");
        }
    }
}
