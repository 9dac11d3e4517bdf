//! The life of a lease as the library has it, in the time of a model.

use std::{sync::LazyLock, time::Duration};

use tokio::time::Instant;

// The file of the library itself, so that the models cannot drift away from it.
#[expect(dead_code, reason = "the models need a part of it")]
#[path = "../../lockkit/src/lease/life/state.rs"]
mod state;

pub(crate) use state::{Effect, Event, Life, Step};

/// Far longer than the margin of a ttl: a trust ends within its last tick.
const TICK: Duration = Duration::from_secs(1);

/// An instant of the processes' monotonic clock.
pub(crate) fn at(tick: i8) -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START + ticks(tick)
}

/// A length of time.
pub(crate) fn ticks(number: i8) -> Duration {
    TICK * u32::from(number.unsigned_abs())
}

/// A lease that a process trusts or has trusted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Trust {
    life: Life,
    /// It has been lost at some time.
    was_lost: bool,
}

impl Trust {
    pub(crate) fn new(sent: i8, ttl: i8) -> Self {
        Self { life: Life::new(at(sent), ticks(ttl)), was_lost: false }
    }

    pub(crate) fn of(life: Life) -> Self {
        Self { life, was_lost: false }
    }

    pub(crate) fn on(&mut self, now: i8, event: Event) -> Effect {
        self.life.on(at(now), event)
    }

    pub(crate) fn renewed(&mut self, now: i8, sent: i8, ttl: i8) {
        self.on(now, Event::Renewed { sent: at(sent), ttl: ticks(ttl) });
    }

    pub(crate) fn is_lost(&self, now: i8) -> bool {
        self.life.lost(at(now)).is_some()
    }

    /// Remembers a loss.
    pub(crate) fn look(&mut self, now: i8) {
        self.was_lost |= self.is_lost(now);
    }

    /// Whether it is trusted again after it was lost.
    pub(crate) fn has_returned(&self, now: i8) -> bool {
        self.was_lost && !self.is_lost(now)
    }

    /// Forgets how it ended, as code would that keeps only the end of the trust.
    pub(crate) fn restart(&mut self, sent: i8, ttl: i8) {
        self.life = Life::new(at(sent), ticks(ttl));
    }
}
