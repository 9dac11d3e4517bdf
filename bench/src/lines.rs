//! The lines of the result: each contender of a scenario, summed up over its rounds.

use crate::sample::Sample;
use crate::scenarios::Scenario;
use crate::servers::Kind;
use crate::strace::Calls;

/// Where a scenario is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) scenario: Scenario,
    pub(crate) database: Kind,
    /// Tasks of all processes together.
    pub(crate) tasks: u32,
    pub(crate) processes: u32,
    /// 0: each task has its own key.
    pub(crate) keys: u32,
    pub(crate) hold_ms: u64,
    /// Leases held, or rows in the table, where that is part of the scenario.
    pub(crate) rows: u32,
}

/// A contender in a setting.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) setting: Setting,
    pub(crate) contender: String,
    /// The first contender of the setting, which the others are compared with.
    pub(crate) is_baseline: bool,
    /// Why it was not measured.
    pub(crate) skipped: Option<String>,
    pub(crate) samples: Vec<Sample>,
    /// Of the last sample, if they were counted.
    pub(crate) calls: Option<Calls>,
    /// The rate by that of the baseline in the same round.
    pub(crate) ratios: Vec<f64>,
}

/// A median and the extremes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) least: f64,
    pub(crate) median: f64,
    pub(crate) greatest: f64,
}

impl Spread {
    /// `None` of no numbers.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut numbers: Vec<_> = numbers.into_iter().collect();
        numbers.sort_by(f64::total_cmp);
        let (least, greatest) = (*numbers.first()?, *numbers.last()?);
        let middle = numbers.len() / 2;
        let median =
            if numbers.len() % 2 == 1 { numbers[middle] } else { f64::midpoint(numbers[middle - 1], numbers[middle]) };
        Some(Self { least, median, greatest })
    }
}

impl Line {
    pub(crate) fn new(setting: Setting, contender: &str, is_baseline: bool) -> Self {
        let contender = contender.to_owned();
        Self { setting, contender, is_baseline, skipped: None, samples: Vec::new(), calls: None, ratios: Vec::new() }
    }

    pub(crate) fn spread(&self, number: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(self.samples.iter().map(number))
    }

    /// The median of a number that not every sample has.
    pub(crate) fn median_of(&self, number: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        Spread::of(self.samples.iter().filter_map(number)).map(|it| it.median)
    }

    pub(crate) fn ratio(&self) -> Option<Spread> {
        Spread::of(self.ratios.iter().copied())
    }

    /// What the oracles said, of all rounds.
    pub(crate) fn violations(&self) -> impl Iterator<Item = &String> {
        self.samples.iter().flat_map(|it| &it.violations)
    }
}

/// Compares each contender of a setting with the first, round by round.
pub(crate) fn compare(lines: &mut [Line]) {
    let Some((baseline, others)) = lines.split_first_mut() else { return };
    for line in others {
        let pairs = line.samples.iter().zip(&baseline.samples).filter(|(_, base)| base.rate > 0.0);
        line.ratios = pairs.map(|(sample, base)| sample.rate / base.rate).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_the_sorted_numbers() {
        let spread = Spread::of([5.0, 1.0, 3.0]);
        assert_eq!(spread, Some(Spread { least: 1.0, median: 3.0, greatest: 5.0 }));
        assert_eq!(Spread::of([4.0, 2.0]).map(|it| it.median), Some(3.0));
        assert_eq!(Spread::of([]), None);
    }
}
