//! Whether the session's thread has run all the time. Pure: no clock, no I/O.
//!
//! A write proves that the leader has not ended the session, and not that it will live for long: a follower that
//! forwards a request reports only every half tick that the client lives. [`trusted`](crate::session) rests on a client
//! that gives signs of life all the time. One that was stopped has not, and goes on on its old connection if something
//! had arrived meanwhile, such as a watch. The leader may end its session up to half a tick after it has granted a
//! lease. So after a stop nothing is granted until a sign of life was reported, or the client has joined the session on
//! another connection, of which the leader learns at once.
//!
//! A lease that is trusted may be renewed all the same: its last renewals were signs of life, and the stop was shorter
//! than its trust.

use std::time::Duration;

use tokio::time::Instant;

/// Of one session.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Pulse {
    /// When the thread ran last.
    last: Instant,
    longest: Duration,
    /// How long after a stop its end is reported at the latest.
    report: Duration,
    stop: Option<Stop>,
}

/// The last stop that may matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stop {
    lasted: Duration,
    ended: Instant,
}

/// Why nothing is granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stopped {
    pub(crate) lasted: Duration,
    /// How long nothing will be granted.
    pub(crate) left: Duration,
}

impl Pulse {
    /// `silence` is the longest one on a connection, in an eighth of which the client looks whether to ping. It pings
    /// after three of them, so at the latest after half of the silence. Nine eighths of the silence are in `trusted`.
    pub(crate) fn new(now: Instant, session: Duration, silence: Duration) -> Self {
        Self { last: now, longest: Self::longest(silence), report: silence / 2 + session / 4, stop: None }
    }

    /// The longest time in which the thread need not run.
    pub(crate) fn longest(silence: Duration) -> Duration {
        silence * 5 / 8
    }

    /// The thread runs.
    pub(crate) fn beat(&mut self, now: Instant) {
        let lasted = now.saturating_duration_since(self.last);
        if lasted > self.longest {
            self.stop = Some(Stop { lasted, ended: now });
        }
        self.last = self.last.max(now);
    }

    /// The client has joined the session on another connection. It had none at `since`.
    pub(crate) fn reconnected(&mut self, since: Instant) {
        self.stop = self.stop.filter(|it| it.ended > since);
    }

    /// Whether a stop stands against a grant at this time.
    pub(crate) fn stopped(&mut self, now: Instant) -> Option<Stopped> {
        self.beat(now);
        let Stop { lasted, ended } = self.stop?;
        let left = (ended + self.report).saturating_duration_since(now);
        if left.is_zero() {
            self.stop = None;
            return None;
        }
        Some(Stopped { lasted, left })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_stop_counts_until_it_is_reported_or_the_client_has_connected_again() {
        let began = Instant::now();
        let at = |seconds: u32| began + SECOND * seconds;
        // Of a session of 24 s: stops of 5 s do no harm, and the end of a longer one is reported after 10 s.
        let pulse = || Pulse::new(began, SECOND * 24, SECOND * 8);
        let mut steady = pulse();
        for now in [5, 10, 11] {
            assert_eq!(steady.stopped(at(now)), None);
        }

        let stopped = |lasted, left| Some(Stopped { lasted: SECOND * lasted, left: SECOND * left });
        let mut reported = pulse();
        assert_eq!(reported.stopped(at(6)), stopped(6, 10));
        assert_eq!(reported.stopped(at(11)), stopped(6, 5));
        assert_eq!(reported.stopped(at(16)), None);

        let mut twice = pulse();
        twice.beat(at(6));
        twice.beat(at(13));
        assert_eq!(twice.stopped(at(13)), stopped(7, 10));

        let mut connected = pulse();
        connected.beat(at(6));
        connected.reconnected(at(5));
        assert_eq!(connected.stopped(at(7)), stopped(6, 9), "it had no connection before the stop had ended");
        connected.reconnected(at(6));
        assert_eq!(connected.stopped(at(8)), None);
    }
}
