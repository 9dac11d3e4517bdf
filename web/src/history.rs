//! What happened to each key in the last ten minutes, as a series of reads has shown it. Pure: no clock, no I/O.
//!
//! A holder that is gone when the leases are read again has released its lease, or has died. A store that remembers
//! deaths tells which, until the lease is taken again. Else it has died if the lease had less than half of its ttl left
//! at the last read, because it was not renewed, and that time is over. A lease with a ttl of less than two seconds can
//! expire between two reads, and then counts as released.

use std::{collections::BTreeMap, time::Duration};

use lockkit::{
    Fence, Key,
    store::{LeaseInfo, Previous},
};

/// How long it is remembered.
pub(crate) const SPAN: Duration = Duration::from_mins(10);

/// Two reads that are further apart say nothing about the time between them.
const GAP: Duration = Duration::from_secs(5);

/// The most holders of one key that are remembered.
const HOLDS: usize = 100;

/// The most keys that are remembered.
const KEYS: usize = 5_000;

#[derive(Debug, Default)]
pub(crate) struct History {
    lanes: BTreeMap<Key, Vec<Hold>>,
    last: Option<Duration>,
}

/// One holder of a key. Times count from the same moment as those of the reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) fence: Fence,
    pub(crate) holder: String,
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    pub(crate) end: End,
    /// When it expires unless it is renewed, as the last read has shown it.
    expires: Duration,
    is_late: bool,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Held,
    Released,
    /// It expired.
    Died,
    /// The page took it.
    Stolen,
    /// Nobody looked.
    Unseen,
}

impl History {
    /// Adds what a read at this time has shown.
    pub(crate) fn saw<'l>(&mut self, now: Duration, leases: impl IntoIterator<Item = &'l LeaseInfo>) {
        let before = self.last.replace(now);
        for lease in leases {
            let holds = self.lanes.entry(lease.key.clone()).or_default();
            if holds.last().is_none_or(|it| it.fence != lease.fence) {
                if let Some(hold) = holds.last_mut() {
                    hold.end(now, before);
                }
                let least = holds.last().map_or(Duration::ZERO, |it| it.to).max(now.saturating_sub(SPAN));
                holds.push(Hold::of(lease, now.saturating_sub(lease.held_for).max(least)));
            }
            if let Some(hold) = holds.last_mut() {
                hold.is_held(lease, now);
            }
            if holds.len() > HOLDS {
                holds.remove(0);
            }
        }
        self.lanes.retain(|_, holds| {
            for hold in holds.iter_mut().filter(|it| it.to < now) {
                hold.end(now, before);
            }
            holds.retain(|it| it.to + SPAN > now);
            !holds.is_empty()
        });
        let excess = self.lanes.len().saturating_sub(KEYS);
        if excess > 0 {
            let mut ends: Vec<_> = self.lanes.iter().map(|(key, holds)| (holds.last().map(|it| it.to), key)).collect();
            ends.sort_unstable();
            let oldest: Vec<_> = ends.iter().take(excess).map(|(_, key)| (*key).clone()).collect();
            for key in oldest {
                self.lanes.remove(&key);
            }
        }
    }

    /// Adds which of the holders that are gone have died, as the store knows it.
    pub(crate) fn died(&mut self, now: Duration, died: &BTreeMap<Key, Previous>) {
        for (key, died) in died {
            if let Some(hold) = self.lanes.get_mut(key).and_then(|it| it.last_mut())
                && hold.fence == died.fence
                && matches!(hold.end, End::Released | End::Unseen)
            {
                (hold.to, hold.end) = (now.saturating_sub(died.expired_for).max(hold.from), End::Died);
            }
        }
    }

    /// The page has taken the lease with this fence.
    pub(crate) fn stolen(&mut self, now: Duration, lease: &LeaseInfo) {
        let holds = self.lanes.entry(lease.key.clone()).or_default();
        if holds.last().is_none_or(|it| it.fence != lease.fence) {
            holds.push(Hold::of(lease, now.saturating_sub(lease.held_for)));
        }
        if let Some(hold) = holds.last_mut() {
            (hold.to, hold.end) = (now, End::Stolen);
        }
    }

    /// The keys with what happened to them, in order.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (&Key, &[Hold])> {
        self.lanes.iter().map(|(key, holds)| (key, holds.as_slice()))
    }

    /// What happened to this key, oldest first.
    pub(crate) fn lane(&self, key: &Key) -> &[Hold] {
        self.lanes.get(key).map_or(&[], Vec::as_slice)
    }
}

impl Hold {
    fn of(lease: &LeaseInfo, from: Duration) -> Self {
        let (fence, holder) = (lease.fence, lease.holder.clone());
        Self { fence, holder, from, to: from, end: End::Held, expires: from, is_late: false }
    }

    /// How long it has held the key, as far as that was seen.
    pub(crate) fn length(&self) -> Duration {
        self.to.saturating_sub(self.from)
    }

    fn is_held(&mut self, lease: &LeaseInfo, now: Duration) {
        match self.end {
            // The statement of the read was older than the theft.
            End::Stolen => {}
            End::Released if lease.is_released => {}
            _ => {
                (self.to, self.expires) = (now, now + lease.expires_in);
                self.is_late = lease.ttl.is_some_and(|ttl| lease.expires_in < ttl / 2);
                self.end = if lease.is_released { End::Released } else { End::Held };
            }
        }
    }

    /// It is not held any more. `before` is the time of the last read.
    fn end(&mut self, now: Duration, before: Option<Duration>) {
        if self.end != End::Held {
            return;
        }
        if before.is_none_or(|it| it + GAP < now) {
            self.end = End::Unseen;
        } else if self.is_late && self.expires <= now {
            (self.to, self.end) = (self.expires, End::Died);
        } else {
            (self.to, self.end) = (now, End::Released);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn at(seconds: u64) -> Duration {
        SPAN + Duration::from_secs(seconds)
    }

    /// A lease of `k` that was acquired at one time and lives to another, as a read at `now` shows it.
    fn lease(now: u64, fence: u64, [acquired, expires]: [u64; 2]) -> LeaseInfo {
        let mut lease =
            LeaseInfo::new(Key::from("k"), format!("holder {fence}"), Fence::from(fence), SystemTime::now());
        lease.held_for = Duration::from_secs(now - acquired);
        lease.expires_in = Duration::from_secs(expires - now);
        lease.ttl = Some(TTL);
        lease
    }

    /// The fences of `k` with their times and ends.
    fn lane(history: &History) -> Vec<(u64, u64, u64, End)> {
        let seconds = |it: Duration| it.saturating_sub(SPAN).as_secs();
        let holds = history.lane(&Key::from("k")).iter();
        holds.map(|it| (it.fence.get(), seconds(it.from), seconds(it.to), it.end)).collect()
    }

    #[test]
    fn a_holder_that_is_gone_has_released_or_died() {
        let mut history = History::default();
        history.saw(at(100), [&lease(100, 1, [90, 120])]);
        assert_eq!(lane(&history), [(1, 90, 100, End::Held)], "from its acquisition");
        history.saw(at(101), [&lease(101, 1, [90, 131])]);
        history.saw(at(102), []);
        assert_eq!(lane(&history), [(1, 90, 102, End::Released)]);

        history.saw(at(103), [&lease(103, 2, [102, 132])]);
        for now in 104..132 {
            history.saw(at(now), [&lease(now, 2, [102, 132])]);
        }
        history.saw(at(133), []);
        let died = (2, 102, 132, End::Died);
        assert_eq!(lane(&history), [(1, 90, 102, End::Released), died]);
        // Taken over, and handed on between two reads.
        history.saw(at(134), [&lease(134, 3, [133, 163])]);
        history.saw(at(135), [&lease(135, 4, [135, 163])]);
        let others = [(3, 133, 135, End::Released), (4, 135, 135, End::Held)];
        assert_eq!(lane(&history)[1..], [died, others[0], others[1]]);
    }

    #[test]
    fn nothing_is_said_of_a_time_in_which_nobody_looked() {
        let mut history = History::default();
        history.saw(at(100), [&lease(100, 1, [90, 101])]);
        history.saw(at(200), [&lease(200, 2, [150, 220])]);
        assert_eq!(lane(&history), [(1, 90, 100, End::Unseen), (2, 150, 200, End::Held)]);
        history.saw(at(300), [&lease(300, 2, [150, 320])]);
        assert_eq!(lane(&history)[1], (2, 150, 300, End::Held), "it cannot have been released between");
    }

    #[test]
    fn a_death_that_the_store_remembers_is_no_release() {
        let mut history = History::default();
        let died = |fence: u64, ago: u64| {
            let died = Previous::new("holder", Fence::from(fence), Duration::from_secs(ago));
            BTreeMap::from([(Key::from("k"), died)])
        };
        // Its ttl is as long as the time between two reads.
        history.saw(at(100), [&lease(100, 1, [100, 101])]);
        history.saw(at(103), []);
        history.died(at(103), &died(1, 2));
        assert_eq!(lane(&history), [(1, 100, 101, End::Died)]);
        // Nobody looks for a minute.
        history.saw(at(104), [&lease(104, 2, [104, 134])]);
        history.saw(at(164), []);
        history.died(at(164), &died(1, 63));
        assert_eq!(lane(&history)[1], (2, 104, 104, End::Unseen), "that was the one before");
        history.died(at(164), &died(2, 30));
        assert_eq!(lane(&history)[1], (2, 104, 134, End::Died));
    }

    #[test]
    fn a_theft_stays_one() {
        let mut history = History::default();
        let stolen = lease(100, 1, [90, 120]);
        history.saw(at(100), [&stolen]);
        history.stolen(at(101), &stolen);
        // A read that was sent before the theft.
        history.saw(at(102), [&lease(102, 1, [90, 120])]);
        history.saw(at(103), [&lease(103, 2, [102, 132])]);
        assert_eq!(lane(&history), [(1, 90, 101, End::Stolen), (2, 102, 103, End::Held)]);
    }

    #[test]
    fn a_lease_that_is_kept_after_its_release_has_not_died() {
        let mut history = History::default();
        history.saw(at(100), [&lease(100, 1, [90, 101])]);
        let mut kept = lease(101, 1, [90, 103]);
        kept.is_released = true;
        history.saw(at(101), [&kept]);
        history.saw(at(104), []);
        assert_eq!(lane(&history), [(1, 90, 101, End::Released)]);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut history = History::default();
        let at = |number: u64| SPAN + Duration::from_millis(number * 1000);
        for now in 0..1_000 {
            history.saw(at(now), [&lease(now, now, [now, now + 30])]);
        }
        let lane = lane(&history);
        assert_eq!((lane.len(), lane.last().map(|it| it.0)), (HOLDS, Some(999)));
        history.saw(at(999) + SPAN + SPAN, []);
        assert_eq!(history.lanes().count(), 0);

        let named = |number: u64| {
            let mut lease = lease(0, 1, [0, 30]);
            lease.key = Key::from(format!("k:{number}"));
            lease
        };
        for now in 0..3 {
            let leases: Vec<_> = (0..10_000).map(|it| named(now * 10_000 + it)).collect();
            history.saw(at(2_000 + now), &leases);
        }
        assert_eq!(history.lanes().count(), KEYS);
        assert!(history.lane(&Key::from("k:0")).is_empty() && !history.lane(&Key::from("k:29999")).is_empty());
    }
}
