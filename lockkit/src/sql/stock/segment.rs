//! The segments of a stock and the amounts in them. Pure: no database.

use crate::value::error::{Error, Result};

/// More than any stock can hold.
pub(super) const TOO_MANY: u64 = 1 << 63;

/// One of the rows that a stock is spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub(crate) number: u32,
    pub(crate) quantity: u64,
}

/// A segment as read from its row.
pub(crate) fn segment(number: i64, quantity: i64) -> Segment {
    Segment { number: u32::try_from(number).unwrap_or(0), quantity: u64::try_from(quantity).unwrap_or(0) }
}

/// The quantity of a segment as its column stores it. `put` refuses quantities that do not fit.
pub(crate) fn quantity(segment: &Segment) -> i64 {
    i64::try_from(segment.quantity).unwrap_or(i64::MAX)
}

/// The sum of the quantities, at most `u64::MAX`.
pub(super) fn sum(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum, it| sum.saturating_add(it.quantity))
}

/// Spreads `total` pieces over `segments` segments. The quantities differ by at most one.
pub(super) fn even(total: u64, segments: u32) -> impl Iterator<Item = Segment> {
    let (each, rest) = (total / u64::from(segments), total % u64::from(segments));
    (0..segments).map(move |number| Segment { number, quantity: each + u64::from(u64::from(number) < rest) })
}

/// An amount as the database stores it.
pub(super) fn column(amount: u64) -> Result<i64> {
    let reason = match i64::try_from(amount) {
        Ok(0) => "is zero; at least one piece is needed to do anything".to_owned(),
        Ok(wanted) => return Ok(wanted),
        Err(_) => format!("is {amount}; a stock holds at most {}", i64::MAX),
    };
    Err(Error::InvalidOption { option: "amount", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_spread_evenly_and_none_is_lost() {
        for (total, segments) in [(0, 1), (3, 10), (200, 10), (203, 10), (u64::MAX >> 1, 7), (5, 1024)] {
            let spread: Vec<_> = even(total, segments).collect();
            let (least, most) = (spread.iter().map(|it| it.quantity).min(), spread.iter().map(|it| it.quantity).max());
            assert_eq!(sum(&spread), total);
            assert!(most.unwrap() - least.unwrap() <= 1, "{spread:?}");
            assert_eq!(spread.len(), segments as usize);
        }
    }

    #[test]
    fn an_amount_is_one_to_the_most_that_a_column_holds() {
        assert_eq!(column(1).unwrap(), 1);
        assert_eq!(column(TOO_MANY - 1).unwrap(), i64::MAX);
        for bad in [0, TOO_MANY, u64::MAX] {
            assert!(matches!(column(bad), Err(Error::InvalidOption { .. })), "{bad}");
        }
    }
}
