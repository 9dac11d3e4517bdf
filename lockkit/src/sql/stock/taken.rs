//! What a caller has taken from a stock.

use crate::sql::stock::segment::{Segment, sum};

/// The pieces that were taken from a stock. Dropping it puts nothing back; [`Stock::put`](crate::Stock::put) does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Taken {
    pub(super) parts: Vec<Segment>,
}

impl Taken {
    pub(super) fn from_one(number: u32, quantity: u64) -> Self {
        Self { parts: vec![Segment { number, quantity }] }
    }

    /// Number of pieces taken.
    pub fn amount(&self) -> u64 {
        sum(&self.parts)
    }

    /// The segments and the number of pieces from each. More than one segment only if no single segment had enough.
    pub fn segments(&self) -> impl Iterator<Item = (u32, u64)> {
        self.parts.iter().map(|it| (it.number, it.quantity))
    }
}
