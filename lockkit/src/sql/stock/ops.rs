//! What a stock asks of a database.

use std::{future::Future, ops::RangeInclusive};

use sqlx::Database;

use crate::{
    key::Key,
    policy::Wait,
    sql::{Dialect, stock::segment::Segment},
};

/// Stocks in the table `lockkit_stock`.
///
/// An operation that waits for segments locks them in their order, so that no two deadlock. An operation that adds,
/// removes or fills segments locks all of them, segment 0 first. Segment 0 is never removed.
pub trait StockOps: Dialect + StockStatements {}

/// The statements of stocks. Hidden from users, who call the strategy.
pub trait StockStatements: Database {
    /// Takes the amount from one unlocked segment that has enough, trying `first` before the others. Does not wait,
    /// and keeps no lock on segments that it skipped. `None` when there is no such segment.
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

/// The segments of a stock, as a read without locks found them.
#[derive(Debug, Clone)]
pub struct Look {
    pub(crate) segments: Vec<Segment>,
    /// Whether they were read as of now, even inside a transaction that has read before.
    pub(crate) is_current: bool,
}
