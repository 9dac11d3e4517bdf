//! The queue of one key, as a state machine: it knows no clock, no I/O and no lock.
//!
//! [`Queue`](super::Queue) passes events on, and wakes whom they name. A test runs every cell of these tables.
//!
//! Who is called, by how many wait:
//!
//! | event | nobody | one | two or more |
//! |---|---|---|---|
//! | `join` | it, who is the first | · | · |
//! | the first leaves | | · | the second, who is the first now |
//! | another one leaves | | | · |
//! | `answered`, `shared` | · | · | · |
//! | `serve_first` by the last holder | refuse | the first, with the lease | the first, with the lease |
//! | `serve_first` of what the first does not want | refuse | refuse | refuse |
//! | `serve_first` by another holder | refuse | refuse | refuse |
//! | `serve_first` of one who has not taken what it was handed | · | refuse | refuse |
//!
//! A caller who was handed a lease is the first until it leaves: if the lease is lost before the caller has it, the
//! caller is the next who asks the store.
//!
//! What a grant of the store is, by its fence and by what the last holder is:
//!
//! | fence | no holder | a holder | a lost holder |
//! |---|---|---|---|
//! | at least the greatest so far | the latest | the latest | the latest |
//! | a lower one | late, the next one counts | late | late, the next one counts |

use crate::{
    fifo::{Fifo, Place},
    value::fence::Fence,
};

/// `C` is called, `L` is the lease that it gets, and `H` names a holder.
#[derive(Debug)]
pub(super) struct State<C, L, H> {
    waiting: Fifo<C>,
    /// What was handed over to the first of them, who has not taken it yet.
    handed_over: Option<L>,
    /// How often the first of them learned who has the lease, or got it alone.
    answers: u64,
    /// How often the first of them got what the next one may have, too.
    shares: u64,
    /// The greatest fence that the store has granted to this process.
    fence: Fence,
    /// The last of this process whose lease can be handed over to the next.
    holder: Option<H>,
}

/// Where a caller stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Standing<L> {
    First,
    Behind,
    /// The first, who was handed this lease.
    HandedOver(L),
}

/// What a caller leaves behind.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Left<C, L> {
    /// The caller who is the first thereby.
    pub(super) next: Option<C>,
    /// What was handed over to it, and it has not taken.
    pub(super) handed_over: Option<L>,
}

impl<C: Clone, L, H: PartialEq> State<C, L, H> {
    /// Also returns whether the caller is the first.
    pub(super) fn join(&mut self, caller: C) -> (Place, bool) {
        let place = self.waiting.join(caller);
        (place, self.waiting.is_first(place))
    }

    pub(super) fn leave(&mut self, place: Place) -> Left<C, L> {
        let was_first = self.waiting.is_first(place);
        self.waiting.leave(place);
        if was_first {
            Left { next: self.first(), handed_over: self.handed_over.take() }
        } else {
            Left { next: None, handed_over: None }
        }
    }

    /// Takes what was handed over to this caller.
    pub(super) fn standing(&mut self, place: Place) -> Standing<L> {
        if self.waiting.is_first(place) {
            self.handed_over.take().map_or(Standing::First, Standing::HandedOver)
        } else {
            Standing::Behind
        }
    }

    /// The first caller has learned who has the lease.
    pub(super) fn answered(&mut self) {
        self.answers += 1;
    }

    pub(super) fn answers(&self) -> u64 {
        self.answers
    }

    /// The first caller has got what the next one may have, too.
    pub(super) fn shared(&mut self) {
        self.shares += 1;
    }

    pub(super) fn shares(&self) -> u64 {
        self.shares
    }

    /// Hands the lease that `make` makes over to the first caller, who is the next holder, and returns that caller.
    /// Only the lease that was granted last is handed over: another one was stolen before.
    pub(super) fn serve_first(&mut self, by: &H, make: impl FnOnce(&C) -> Option<(L, H)>) -> Option<C> {
        if self.holder.as_ref() != Some(by) || self.handed_over.is_some() {
            return None;
        }
        let caller = self.first()?;
        let (lease, holder) = make(&caller)?;
        (self.handed_over, self.holder) = (Some(lease), Some(holder));
        self.answers += 1;
        Some(caller)
    }

    /// The store has granted the lease, to a holder who can hand it over to the next or to another one. Returns `false`
    /// if it has granted a greater fence before: this answer is late, and its lease was stolen meanwhile.
    pub(super) fn granted(&mut self, fence: Fence, holder: Option<H>, is_lost: impl FnOnce(&H) -> bool) -> bool {
        let is_latest = fence >= self.fence;
        if is_latest {
            (self.fence, self.holder) = (fence, holder);
        } else if self.holder.as_ref().is_none_or(is_lost) {
            // A store that was set up anew grants lower fences from now on: the next grant counts.
            self.fence = fence;
        }
        is_latest
    }

    pub(super) fn holder(&self) -> Option<&H> {
        self.holder.as_ref()
    }

    pub(super) fn first(&self) -> Option<C> {
        self.waiting.first().map(|(_, it)| it.clone())
    }

    /// In the order of arrival.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &C> {
        self.waiting.iter()
    }
}

impl<C, L, H> Default for State<C, L, H> {
    fn default() -> Self {
        let waiting = Fifo::default();
        Self { waiting, handed_over: None, answers: 0, shares: 0, fence: Fence::from(0), holder: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers are numbers in the order of arrival. Leases are the names of their holders.
    type Queue = State<usize, &'static str, &'static str>;

    fn with_callers(count: usize) -> (Queue, Vec<Place>) {
        let mut queue = Queue::default();
        assert!(queue.granted(Fence::from(1), Some("holder"), |_| false));
        let places = (0..count).map(|number| queue.join(number).0).collect();
        (queue, places)
    }

    fn standings(queue: &mut Queue, places: &[Place]) -> Vec<Standing<&'static str>> {
        places.iter().map(|it| queue.standing(*it)).collect()
    }

    #[test]
    fn each_event_calls_whom_the_table_names() {
        use Standing::{Behind, First, HandedOver as Has};

        for count in 0..4 {
            let second = (count > 1).then_some(1);

            let (mut queue, mut places) = with_callers(count);
            let (place, is_first) = queue.join(count);
            assert_eq!(is_first, count == 0);
            places.push(place);
            let all_behind = |from| (from..=count).map(|_| Behind);
            assert_eq!(standings(&mut queue, &places), [First].into_iter().chain(all_behind(1)).collect::<Vec<_>>());

            for leaves in 0..count {
                let (mut queue, mut places) = with_callers(count);
                let next = second.filter(|_| leaves == 0);
                assert_eq!(queue.leave(places.remove(leaves)), Left { next, handed_over: None }, "{leaves} of {count}");
                if let Some(first) = places.first() {
                    assert_eq!(queue.standing(*first), First);
                }
            }

            let (mut queue, places) = with_callers(count);
            queue.answered();
            assert_eq!((queue.answers(), queue.shares(), queue.first()), (1, 0, places.first().map(|_| 0)));
            queue.shared();
            assert_eq!((queue.answers(), queue.shares()), (1, 1));

            let (mut queue, places) = with_callers(count);
            assert_eq!(queue.serve_first(&"another", |_| panic!("it is not asked")), None);
            assert_eq!(queue.serve_first(&"holder", |_| None), None);
            assert_eq!((queue.answers(), queue.holder()), (0, Some(&"holder")));
            let served = queue.serve_first(&"holder", |caller| (*caller == 0).then_some(("lease", "next")));
            let Some((first, others)) = places.split_first() else {
                assert_eq!(served, None);
                continue;
            };
            assert_eq!(served, Some(0));
            assert_eq!((queue.answers(), queue.holder()), (1, Some(&"next")));
            assert_eq!(queue.serve_first(&"holder", |_| panic!("it was handed over")), None);
            assert_eq!(queue.serve_first(&"next", |_| panic!("it was not taken")), None);
            assert!(others.iter().all(|it| queue.standing(*it) == Behind));
            assert_eq!(queue.standing(*first), Has("lease"));
            assert_eq!(queue.standing(*first), First, "it was taken once");
            assert!(others.iter().all(|it| queue.standing(*it) == Behind));
            assert_eq!(queue.leave(*first), Left { next: second, handed_over: None });
            assert!(others.first().is_none_or(|it| queue.standing(*it) == First));
        }
    }

    #[test]
    fn who_leaves_with_a_lease_returns_it() {
        let (mut queue, places) = with_callers(3);
        assert_eq!(queue.serve_first(&"holder", |_| Some(("lease", "next"))), Some(0));
        assert_eq!(queue.leave(places[2]), Left { next: None, handed_over: None });
        assert_eq!(queue.leave(places[0]), Left { next: Some(1), handed_over: Some("lease") });
        assert_eq!(queue.leave(places[0]), Left { next: None, handed_over: None });
        assert_eq!(queue.first(), Some(1));
    }

    #[test]
    fn a_grant_counts_as_the_table_says() {
        let fences = |holder: Option<&'static str>, fence: u64| {
            let mut queue = Queue::default();
            assert!(queue.granted(Fence::from(5), holder, |_| unreachable!()));
            let is_latest = queue.granted(Fence::from(fence), Some("new"), |it| *it == "lost");
            // Whether one that is higher than this one, and lower than the first, counts.
            let next_counts = queue.granted(Fence::from(4), Some("next"), |_| false);
            (is_latest, next_counts)
        };
        for holder in [None, Some("held"), Some("lost")] {
            assert_eq!(fences(holder, 5), (true, false), "{holder:?}");
            assert_eq!(fences(holder, 6), (true, false), "{holder:?}");
        }
        assert_eq!(fences(None, 3), (false, true));
        assert_eq!(fences(Some("lost"), 3), (false, true));
        assert_eq!(fences(Some("held"), 3), (false, false));
    }
}
