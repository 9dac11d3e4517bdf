//! The operations on a stock that a database implements.

use std::{future::Future, ops::RangeInclusive};

use sqlx::Database;

use crate::{
    key::Key,
    policy::Wait,
    sql::{Dialect, stock::segment::Segment},
};

/// Stocks in the table `lockkit_stock`.
///
/// An operation that waits for segments locks them in ascending order, so no two operations deadlock. An operation that
/// adds, removes or fills segments locks all of them, segment 0 first. Segment 0 is never removed.
pub trait StockOps: Dialect + StockStatements {}

/// The statements of stocks. Hidden from the docs: users call the strategy.
pub trait StockStatements: Database {
    /// Takes the amount from one unlocked segment that has enough, preferably one of `first`. Does not wait, and keeps
    /// no lock on skipped segments. `None` when no unlocked segment has enough.
    fn stock_take_any(
        conn: &mut Self::Connection,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> impl Future<Output = sqlx::Result<Option<u32>>> + Send;

    /// The segments in ascending order, as they were at one instant. Uncommitted takes still count as left.
    fn stock_look(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<Look>> + Send;

    /// Inside a transaction: locks these segments in ascending order, and returns their current quantities.
    fn stock_lock(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
        wait: Wait,
    ) -> impl Future<Output = sqlx::Result<Vec<Segment>>> + Send;

    /// Inside a transaction: creates segment 0 with quantity zero, unless it exists.
    fn stock_make(conn: &mut Self::Connection, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: writes the quantities of these segments. The transaction has locked each segment, or
    /// creates it under the lock of segment 0.
    fn stock_write(
        conn: &mut Self::Connection,
        key: &Key,
        segments: &[Segment],
    ) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Inside a transaction: removes these segments, all of which the transaction has locked.
    fn stock_remove(
        conn: &mut Self::Connection,
        key: &Key,
        segments: RangeInclusive<u32>,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// The segments of a stock, as read without locks.
#[derive(Debug, Clone)]
pub struct Look {
    pub(crate) segments: Vec<Segment>,
    /// Whether the read is current, even inside a transaction that has read before.
    pub(crate) is_current: bool,
}
