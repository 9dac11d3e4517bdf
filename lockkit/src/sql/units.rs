//! Durations and fences as the columns store them.

use std::time::Duration;

use crate::value::fence::Fence;

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn fence(number: i64) -> Fence {
    Fence::from(u64::try_from(number).unwrap_or(0))
}
