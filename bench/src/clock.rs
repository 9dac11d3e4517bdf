//! The machine's monotonic clock, which all processes share, and the CPU time of this process.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since the machine's start.
pub(crate) fn now() -> u64 {
    read(ClockId::Monotonic)
}

/// Nanoseconds of CPU that this process has used, all threads together.
pub(crate) fn cpu() -> u64 {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let part = |it: i64| u64::try_from(it).expect("BUG: these clocks are never negative");
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}
