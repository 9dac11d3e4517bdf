//! One clock for all processes of a machine: `CLOCK_MONOTONIC` in nanoseconds. It runs on while a process is stopped.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

pub(crate) const MILLISECOND: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000 * MILLISECOND;

pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * SECOND + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// An instant of this process on the common clock. Never later than the instant is.
pub(crate) fn of(instant: Instant) -> u64 {
    let here = now();
    let (ahead, behind) = (instant.saturating_duration_since(Instant::now()), instant.elapsed());
    let nanos = |it: std::time::Duration| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX);
    here.saturating_add(nanos(ahead)).saturating_sub(nanos(behind))
}
