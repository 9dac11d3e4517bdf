//! What a stock asks of a database.

use std::{future::Future, ops::RangeInclusive};

use crate::{key::Key, policy::Wait, sql::Dialect};

/// Stocks in the table `lockkit_stock`.
///
/// Whoever waits for segments locks them in their order, so that nobody deadlocks. Segments are made, removed and filled
/// by whoever has all of them locked, segment 0 first; it is never removed.
pub trait StockOps: Dialect {
    /// Takes the amount from one segment that has as much and that nobody has locked, looking at `first` before the others.
    /// Never waits, and keeps no lock of what it passed over. `None` when there is no such segment.
    fn stock_take_any(
        conn: &mut Self::Connection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> impl Future<Output = sqlx::Result<Option<u32>>> + Send;

    /// The segments in their order, as they were at one instant; what others have taken but not committed is in them.
    fn stock_look(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<Look>> + Send;

    /// Inside a transaction: locks these segments in their order, and returns what they hold now.
    fn stock_lock(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<Vec<Segment>>> + Send;

    /// Inside a transaction: makes segment 0, empty, unless it is there.
    fn stock_make(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: writes what these segments hold, all of which it has locked or makes under the lock of
    /// segment 0.
    fn stock_write(
        conn: &mut Self::Connection,
        key: &Key,
        segments: &[Segment],
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: removes these segments, all of which it has locked.
    fn stock_remove(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// One of the rows that a stock is spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub(crate) number: u32,
    pub(crate) quantity: u64,
}

/// The segments of a stock, as a read without locks found them.
#[derive(Debug, Clone)]
pub struct Look {
    pub(crate) segments: Vec<Segment>,
    /// Whether they were read as of now, even inside a transaction that has read before.
    pub(crate) is_current: bool,
}

/// A segment as read from its row.
pub(crate) fn segment(number: i64, quantity: i64) -> Segment {
    Segment { number: u32::try_from(number).unwrap_or(0), quantity: u64::try_from(quantity).unwrap_or(0) }
}

/// What a segment holds, as its column has it: nobody puts more into a stock than that can be.
pub(crate) fn quantity(segment: &Segment) -> i64 {
    i64::try_from(segment.quantity).unwrap_or(i64::MAX)
}
