//! The operations on a stock that a database implements.

use std::{future::Future, ops::RangeInclusive};

use crate::{
    policy::Wait,
    sql::{Dialect, Driver, stock::segment::Segment},
    value::{key::Key, token::Token},
};

/// Stocks in the table `lockkit_stock`.
///
/// An operation that waits for segments locks them in ascending order, so no two operations deadlock. An operation that
/// adds, removes or fills segments locks all of them, segment 0 first. Segment 0 is never removed.
pub trait StockOps: Dialect + StockStatements {}

/// The statements of stocks. Hidden from the docs: users call the strategy.
pub trait StockStatements: Driver {
    /// Takes the amount from one unlocked segment that has enough, preferably one of `first`. Does not wait, and keeps
    /// no lock on skipped segments. `None` when no unlocked segment has enough. `grammar` is that of the connection's
    /// pool; `None` in a transaction.
    fn stock_take_any(
        conn: &mut Self::Connection,
        grammar: Option<Self::Grammar>,
        key: &Key,
        amount: i64,
        first: [u32; 4],
    ) -> impl Future<Output = sqlx::Result<Option<u32>>> + Send;

    /// Takes for the first takers of a batch from one unlocked segment: for as many as it has enough for. `sums` are
    /// the ascending sums of their amounts. Prefers one of `first` that has enough for all. Does not wait for segments.
    /// `None` when no unlocked segment has enough for the first taker, or the note is not there.
    ///
    /// On a server the same statement writes the note, and takes nothing unless the note has a lower number.
    fn stock_take_batch(
        conn: &mut Self::Connection,
        key: &Key,
        sums: &[i64],
        first: [u32; 4],
        note: Note,
    ) -> impl Future<Output = sqlx::Result<Option<Portion>>> + Send;

    /// Creates this note unless it is there, and deletes notes unused for a day. Does nothing on a database that
    /// answers every statement.
    fn stock_note_make(conn: &mut Self::Connection, note: Note) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Refuses the batch of this note, unless it was executed. Waits for it while it is being executed.
    fn stock_note_void(conn: &mut Self::Connection, note: Note) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// The number of the last batch with this note and what it took. `None` when the note is not there.
    fn stock_note_look(
        conn: &mut Self::Connection,
        note: Note,
    ) -> impl Future<Output = sqlx::Result<Option<(i64, Portion)>>> + Send;

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

/// The row in `lockkit_stock_batch` that proves whether a batch was executed. Only one batch at a time uses it.
#[derive(Debug, Clone, Copy)]
pub struct Note {
    pub(crate) id: Token,
    /// The number of the batch. Rises with every batch.
    pub(crate) number: i64,
}

impl Note {
    /// The number of a note whose batch was refused. No batch has a higher one.
    pub(crate) const VOID: i64 = i64::MAX;
}

/// What a batch took from one segment: the amounts of its first `takers` takers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portion {
    pub(crate) segment: u32,
    pub(crate) takers: usize,
}

/// The segments of a stock, as read without locks.
#[derive(Debug, Clone)]
pub struct Look {
    pub(crate) segments: Vec<Segment>,
    /// Whether the read is current, even inside a transaction that has read before.
    pub(crate) is_current: bool,
}
