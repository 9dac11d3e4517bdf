//! What must hold of what the workers saw, whoever kept them apart. Knows no database.

/// Complaints in full; the rest is counted.
const SHOWN: usize = 3;

/// A lock that was held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) key: u32,
    pub(crate) process: usize,
    /// When the holder learned that it holds the lock, and when it began to release it.
    pub(crate) granted: u64,
    pub(crate) let_go: u64,
    pub(crate) fence: Option<u64>,
}

/// No two holders of one key at the same time.
pub(crate) fn overlaps(held: &[Held]) -> Vec<String> {
    let mut sorted = held.to_vec();
    sorted.sort_by_key(|it| (it.key, it.granted, it.let_go));
    // The one that ends last so far, because it may outlast several.
    let mut last: Option<Held> = None;
    let mut complaints = Vec::new();
    for now in sorted {
        match last.filter(|it| it.key == now.key) {
            Some(before) if now.granted < before.let_go => {
                complaints.push(format!(
                    "key {}: process {} was granted it {} ns before process {} let go",
                    now.key,
                    now.process,
                    before.let_go - now.granted,
                    before.process,
                ));
                if now.let_go > before.let_go {
                    last = Some(now);
                }
            }
            _ => last = Some(now),
        }
    }
    shortened("overlap", complaints)
}

/// Each holder of a key has a higher fence than the one before.
pub(crate) fn fences(held: &[Held]) -> Vec<String> {
    let mut sorted: Vec<_> = held.iter().filter(|it| it.fence.is_some()).collect();
    sorted.sort_by_key(|it| (it.key, it.granted));
    let fell = sorted.windows(2).filter(|pair| pair[0].key == pair[1].key && pair[1].fence <= pair[0].fence);
    let complaints = fell.map(|pair| {
        let fence = |held: &Held| held.fence.unwrap_or_default();
        format!("key {}: fence {} after fence {}", pair[1].key, fence(pair[1]), fence(pair[0]))
    });
    shortened("fence", complaints.collect())
}

/// A counter that every operation raised by one.
pub(crate) fn counter(raised: u64, found: u64) -> Vec<String> {
    if raised == found {
        return Vec::new();
    }
    vec![format!("lost update: {raised} operations raised the counter, which is at {found}")]
}

/// A stock from which something was taken.
pub(crate) fn stock(put: u64, taken: u64, left: u64) -> Vec<String> {
    if taken + left == put {
        return Vec::new();
    }
    let kind = if taken > put { "oversold" } else { "stock that changed" };
    vec![format!("{kind}: {put} put in, {taken} taken, {left} left")]
}

/// The server has counted at least the commits that it acknowledged.
pub(crate) fn commits(acknowledged: u64, counted: u64) -> Vec<String> {
    if counted >= acknowledged {
        return Vec::new();
    }
    vec![format!("lost commit: {acknowledged} acknowledged, {counted} counted by the server")]
}

fn shortened(kind: &str, complaints: Vec<String>) -> Vec<String> {
    let more = complaints.len().saturating_sub(SHOWN);
    let mut shown: Vec<_> = complaints.into_iter().take(SHOWN).map(|it| format!("{kind}: {it}")).collect();
    if more > 0 {
        shown.push(format!("{kind}: and {more} more"));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(key: u32, granted: u64, let_go: u64, fence: u64) -> Held {
        Held { key, process: 0, granted, let_go, fence: Some(fence) }
    }

    #[test]
    fn holders_one_after_the_other_are_accepted_in_any_order_of_reports() {
        let held = [held(1, 30, 40, 3), held(1, 10, 20, 1), held(2, 15, 35, 1), held(1, 20, 30, 2)];
        assert_eq!(overlaps(&held), [""; 0]);
        assert_eq!(fences(&held), [""; 0]);
    }

    #[test]
    fn a_holder_within_a_long_one_is_an_overlap_also_after_a_short_one() {
        let held = [held(1, 10, 100, 1), held(1, 20, 30, 2), held(1, 50, 60, 3), held(1, 100, 110, 4)];
        assert_eq!(overlaps(&held).len(), 2);
    }

    #[test]
    fn an_equal_and_a_lower_fence_are_complained_of() {
        assert_eq!(fences(&[held(1, 10, 20, 5), held(1, 20, 30, 5)]).len(), 1);
        assert_eq!(fences(&[held(1, 10, 20, 5), held(1, 20, 30, 4)]).len(), 1);
        assert_eq!(fences(&[held(1, 10, 20, 5), held(2, 20, 30, 4)]), [""; 0]);
    }

    #[test]
    fn numbers_that_do_not_add_up_are_complained_of() {
        assert_eq!(counter(10, 10), [""; 0]);
        assert_eq!(counter(10, 9).len(), 1);
        assert_eq!(stock(10, 4, 6), [""; 0]);
        assert!(stock(10, 11, 0)[0].starts_with("oversold"));
        assert!(stock(10, 4, 5)[0].starts_with("stock that changed"));
        assert_eq!(commits(10, 12), [""; 0]);
        assert_eq!(commits(10, 9).len(), 1);
    }
}
