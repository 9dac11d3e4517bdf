//! Pauses between attempts. Pure: no clock.

use std::time::Duration;

/// Growing pauses with full jitter. The first is uniformly random between zero and `base`, the next between zero and
/// twice `base`, and so on up to `cap`. Pauses of the default length [adapt](crate::RetryPolicy::backoff) instead.
///
/// Full jitter spreads out callers that failed together better than a fixed or partly random pause (M. Brooker,
/// "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// The upper bound of the first pause. Defaults to 5 ms.
    pub base: Duration,
    /// The upper bound of every pause. Defaults to 250 ms.
    pub cap: Duration,
}

impl Backoff {
    /// The default: 5 ms, doubling up to 250 ms.
    pub const fn new() -> Self {
        Self { base: Duration::from_millis(5), cap: Duration::from_millis(250) }
    }

    /// Whether the pauses adapt to the attempts: nobody has chosen their length.
    pub(crate) fn adapts(self) -> bool {
        self == Self::new()
    }

    /// The upper bound of a pause, without jitter: `base` for number 0, then twice that, and so on up to `cap`.
    pub(crate) fn ceiling(self, number: u32) -> Duration {
        self.base.saturating_mul(1_u32.checked_shl(number).unwrap_or(u32::MAX)).min(self.cap)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

/// The pauses of one retry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pauses {
    backoff: Backoff,
    /// The number of pauses so far.
    count: u32,
}

impl Pauses {
    /// The shortest bound of a pause that adapts: what a timer can tell apart.
    const LEAST: Duration = Duration::from_millis(1);

    pub(crate) fn new(backoff: Backoff) -> Self {
        Self { backoff, count: 0 }
    }

    /// The next pause, after attempts of which the fastest took this long. A pause that adapts is zero if the next
    /// attempt `is_queued` otherwise.
    pub(crate) fn next(&mut self, fastest: Duration, is_queued: bool) -> Duration {
        let Backoff { base, cap } = self.backoff;
        let base = match self.backoff.adapts() {
            true if is_queued => return Duration::ZERO,
            true => fastest.max(Self::LEAST),
            false => base,
        };
        let ceiling = Backoff { base, cap }.ceiling(self.count);
        self.count += 1;
        full_jitter(ceiling)
    }
}

/// A uniformly random duration between zero and `ceiling`.
fn full_jitter(ceiling: Duration) -> Duration {
    ceiling.mul_f64(fastrand::f64())
}

/// A uniformly random duration between half of `ceiling` and `ceiling`.
pub(crate) fn half_jitter(ceiling: Duration) -> Duration {
    jitter_between(ceiling / 2, ceiling)
}

/// A uniformly random duration between these.
pub(crate) fn jitter_between(least: Duration, most: Duration) -> Duration {
    least + most.saturating_sub(least).mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_cap_and_stay_there() {
        let backoff = Backoff { base: Duration::from_millis(10), cap: Duration::from_millis(35) };
        assert_eq!([0, 1, 2, 3, 99].map(|it| backoff.ceiling(it).as_millis()), [10, 20, 35, 35, 35]);
        let huge = Backoff { base: Duration::MAX, cap: Duration::MAX };
        assert_eq!(huge.ceiling(3), Duration::MAX);
    }

    #[test]
    fn pauses_adapt_to_the_attempts_unless_the_caller_sets_them() {
        let millis = Duration::from_millis;
        let longest = |backoff, fastest, number| {
            let pause = || {
                let mut pauses = Pauses::new(backoff);
                (0..number).map(|_| pauses.next(fastest, false)).last().unwrap()
            };
            (0..2000).map(|_| pause()).max().unwrap()
        };
        let is_about = |pause: Duration, bound| pause <= bound && pause > bound / 2;
        assert!(is_about(longest(Backoff::new(), millis(8), 1), millis(8)));
        assert!(is_about(longest(Backoff::new(), millis(8), 3), millis(32)));
        assert!(is_about(longest(Backoff::new(), millis(8), 100), millis(250)));
        assert!(is_about(longest(Backoff::new(), Duration::ZERO, 1), millis(1)));
        let given = Backoff { base: millis(40), cap: millis(60) };
        assert!(is_about(longest(given, millis(8), 1), millis(40)));
        assert!(is_about(longest(given, millis(900), 5), millis(60)));
        assert_eq!(Pauses::new(Backoff::new()).next(millis(8), true), Duration::ZERO);
        let mut given = Pauses::new(given);
        assert!((0..100).any(|_| given.next(millis(8), true) > Duration::ZERO));
    }
}
