//! A lease that this process released a moment ago, as a state machine: it knows no clock.
//!
//! A process that reacquires the same lease in a loop would starve the other processes, whose requests learn of a
//! release later. So it checks for their tickets first.

use std::time::Duration;

use tokio::time::Instant;

/// How long a process remembers that it released a lease.
const LASTS: Duration = Duration::from_secs(1);

/// How often it checks for tickets. Each check that finds none doubles the pause, up to [`CHECK_AT_LEAST_EVERY`].
const CHECK_EVERY: Duration = Duration::from_millis(25);

/// See [`CHECK_EVERY`].
const CHECK_AT_LEAST_EVERY: Duration = Duration::from_millis(100);

/// What is known of a lease that was released.
#[derive(Debug)]
pub(super) struct RecentRelease {
    released: Instant,
    /// The last time that a check found tickets.
    tickets_seen: Option<Instant>,
    /// When to check again, after a check that found no tickets.
    check_at: Option<Instant>,
    check_every: Duration,
}

impl RecentRelease {
    pub(super) fn released(now: Instant) -> Self {
        Self { released: now, tickets_seen: None, check_at: None, check_every: CHECK_EVERY }
    }

    /// The lease was released again. `false` if the last release is too long ago to count.
    pub(super) fn released_again(&mut self, now: Instant) -> bool {
        let counts = self.is_recent(now);
        if counts {
            self.released = now;
        }
        counts
    }

    pub(super) fn is_recent(&self, now: Instant) -> bool {
        self.released + LASTS > now
    }

    /// Whether to check for tickets before the lease is taken again: each time while tickets are found, else from time
    /// to time.
    pub(super) fn must_check(&self, now: Instant) -> bool {
        let is_contended = self.tickets_seen.is_some_and(|then| then + LASTS > now);
        self.is_recent(now) && (is_contended || self.check_at.is_none_or(|at| at <= now))
    }

    /// The result of a check.
    pub(super) fn checked(&mut self, now: Instant, found: bool) {
        if found {
            (self.tickets_seen, self.check_every) = (Some(now), CHECK_EVERY);
        } else {
            self.check_at = Some(now + self.check_every);
            self.check_every = (2 * self.check_every).min(CHECK_AT_LEAST_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_grow_rarer_while_nobody_queues_and_are_made_each_time_while_somebody_does() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut recent = RecentRelease::released(start);
        assert!(recent.must_check(at(0)));
        for (now, next) in [(0, 25), (25, 75), (75, 175), (175, 275)] {
            recent.checked(at(now), false);
            assert!(!recent.must_check(at(next - 1)) && recent.must_check(at(next)), "{now}");
        }
        recent.checked(at(300), true);
        assert!(recent.must_check(at(300)) && recent.must_check(at(999)));
        assert!(!recent.must_check(at(1000)), "the release is too long ago");
        assert!(recent.released_again(at(999)) && recent.must_check(at(1299)));
        recent.checked(at(1299), false);
        assert!(recent.must_check(at(1299)), "tickets were found less than a second ago");
        assert!(!recent.must_check(at(1300)) && recent.must_check(at(1324)));
        assert!(!recent.released_again(at(1999)) && !recent.is_recent(at(1999)));
    }
}
