//! Durations as text: `"30s"`, `"1.5s"`, `"100us"`. Pure. Their bounds are those of lockkit, as a test checks.

use std::time::Duration;

/// The longest duration that lockkit takes: 365 days.
pub(crate) const MAX: Duration = Duration::from_hours(365 * 24);

/// The shortest ttl of a lease.
const MIN_TTL: Duration = Duration::from_millis(50);

/// What is wrong with the ttl of a lease.
pub(crate) fn fault_of_ttl(ttl: Duration) -> Option<&'static str> {
    (ttl < MIN_TTL).then_some("is too short to be renewed in time; use `50ms` or more")
}

/// What is wrong with a time for which an answer is kept.
pub(crate) fn fault_of_keep(keep: Duration) -> Option<&'static str> {
    keep.is_zero().then_some("keeps no answer, so each request would do the work")
}

/// What is wrong with a deadline.
pub(crate) fn fault_of_deadline(deadline: Duration) -> Option<&'static str> {
    deadline.is_zero().then_some("leaves no time for even one attempt")
}

/// The duration that the text names, or what is wrong with the text.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let forms = || format!("`{text}` is not a duration; write it like `30s`, `1.5s`, `500ms`, `100us`, `2m` or `1h`");
    let unit_at = text.find(|it: char| !it.is_ascii_digit() && it != '.').ok_or_else(forms)?;
    let (number, unit) = text.split_at(unit_at);
    let nanos_per_unit: u128 = match unit {
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60 * 1_000_000_000,
        "h" => 3_600 * 1_000_000_000,
        _ => return Err(forms()),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((_, "")) => return Err(forms()),
        Some(parts) => parts,
        None => (number, ""),
    };
    if whole.is_empty() || fraction.contains('.') {
        return Err(forms());
    }
    let too_long = || format!("`{text}` is more than a year; give it a shorter duration");
    let whole: u128 = whole.parse().ok().filter(|it| *it <= MAX.as_nanos()).ok_or_else(too_long)?;
    let mut nanos = whole * nanos_per_unit;
    let mut unit = nanos_per_unit;
    for digit in fraction.bytes() {
        if !unit.is_multiple_of(10) {
            return Err(format!("`{text}` is finer than a nanosecond"));
        }
        unit /= 10;
        nanos += u128::from(digit - b'0') * unit;
    }
    if nanos > MAX.as_nanos() {
        return Err(too_long());
    }
    Ok(Duration::from_nanos_u128(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_and_a_unit_make_a_duration() {
        for (text, nanos) in [
            ("30s", 30_000_000_000),
            ("500ms", 500_000_000),
            ("2m", 120_000_000_000),
            ("1h", 3_600_000_000_000),
            ("100us", 100_000),
            ("1.5s", 1_500_000_000),
            ("0.25us", 250),
            ("0s", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "s",
            "30",
            "30 s",
            "30sec",
            "-1s",
            "1.s",
            ".5s",
            "1.2.3s",
            "1e3s",
            "0.00000000001s",
            "9000h",
            "99999999999999999999999999999999999999999s",
            "30S",
            "٣s",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
