//! A queue in the order of arrival, whose members can leave from any place. Pure: who waits for what, and for how long,
//! is up to its users.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// A place in a queue. The places of one queue rise in the order of arrival. Never reused in this process, so an old
/// place is not taken for one of a later queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place(u64);

/// Those who wait, by their places. Joining and leaving cost the logarithm of how many wait.
#[derive(Debug)]
pub(crate) struct Fifo<T>(BTreeMap<Place, T>);

impl Place {
    /// A place behind all that exist.
    pub(crate) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

impl<T> Fifo<T> {
    pub(crate) fn join(&mut self, waiter: T) -> Place {
        let place = Place::next();
        self.put(place, waiter);
        place
    }

    /// Joins at this place, which may be one from which the waiter was taken.
    pub(crate) fn put(&mut self, place: Place, waiter: T) {
        self.0.insert(place, waiter);
    }

    /// `None` if nobody has this place any more.
    pub(crate) fn leave(&mut self, place: Place) -> Option<T> {
        self.0.remove(&place)
    }

    pub(crate) fn first(&self) -> Option<(Place, &T)> {
        self.0.first_key_value().map(|(place, waiter)| (*place, waiter))
    }

    pub(crate) fn is_first(&self, place: Place) -> bool {
        self.first().is_some_and(|(first, _)| first == place)
    }

    pub(crate) fn take_first(&mut self) -> Option<(Place, T)> {
        self.0.pop_first()
    }

    pub(crate) fn has(&self, place: Place) -> bool {
        self.0.contains_key(&place)
    }

    /// In the order of arrival.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.0.retain(|_, waiter| keep(waiter));
    }
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_served_in_the_order_of_arrival_and_leave_from_any_place() {
        let mut queue = Fifo::default();
        let [first, second, third] = ["first", "second", "third"].map(|it| queue.join(it));
        assert!(queue.is_first(first) && !queue.is_first(second) && queue.has(third));
        assert_eq!(queue.leave(second), Some("second"));
        assert_eq!(queue.leave(second), None);
        assert_eq!(queue.take_first(), Some((first, "first")));
        assert!(queue.is_first(third) && !queue.has(first));
        queue.put(first, "first again");
        let last = queue.join("last");
        assert_eq!(queue.iter().copied().collect::<Vec<_>>(), ["first again", "third", "last"]);
        queue.retain(|it| *it != "third");
        assert_eq!([first, third].map(|it| queue.leave(it).is_some()), [true, false]);
        assert_eq!(queue.first(), Some((last, &"last")));
        assert_eq!(queue.leave(last), Some("last"));
        assert!(queue.take_first().is_none());
    }
}
