//! One attempt to take from a stock or to spread it: its statements, its locks and the deadline of its waits.
//!
//! A stock is not sold out because every segment with pieces is locked: what others have taken may come back. So a take
//! first skips locked segments, then reads all of them without locks, at one instant. Pieces that are taken but not
//! committed still count as left there, so a sum below the wanted number is definite. Otherwise it waits for one
//! segment that has enough, and if that was emptied meanwhile, in a new transaction for all segments in their order.
//! `take_in` cannot release a lock, so it waits in order from the first, and trusts the read only where it is known to
//! be current.
//!
//! A PostgreSQL statement that waits for rows does not see rows created while it waited, so two redistributions could
//! miss rows of each other. So each operation that changes the set of segments, or needs their sum, first locks segment
//! 0, which is never removed, in a statement of its own, and then looks.

use std::{
    cmp::Reverse,
    future::Future,
    ops::{ControlFlow, RangeInclusive},
    panic::Location,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    body::{
        batch::Single,
        task::{no_answer, timed_out, until},
    },
    policy::Wait,
    sql::{
        Look, StockOps, failed_on_own_table,
        pool::{Failed, Reach, call, tried, write},
        starved::answers,
        stock::{
            Stock, Taken,
            batch::{Take, Took},
            segment::{Segment, TOO_MANY, even, sum},
        },
        tx::{Tx, begin_within},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// Where there is one lock for all writers: the shortest time that a take stays in the queue, even if it does not wait.
/// A batch that need not wait for the lock takes less.
const QUEUE_GRACE: Duration = Duration::from_millis(20);

/// The operation, as named in errors.
pub(super) const DOING: &str = "using stock";

/// Time beyond the bound before the connection counts as broken. A server may apply the bound to each row separately,
/// and MySQL does not bound the statement that creates a stock.
const BACKSTOP: Duration = Duration::from_secs(1);

/// Longest time for the answer to a statement that waits for no segment.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

pub(super) const FIRST: RangeInclusive<u32> = 0..=0;
pub(super) const ALL: RangeInclusive<u32> = 0..=u32::MAX;

impl<DB: StockOps> Stock<DB> {
    pub(super) fn waiting(&self) -> Waiting {
        let started = Instant::now();
        let bound = self.wait.millis().map(|it| started + Duration::from_millis(it));
        Waiting { started, bound, unanswered: AtomicBool::new(false) }
    }

    /// Takes in one statement, or if that fails, in its own transaction. `single` ends with the statement.
    pub(super) async fn take_alone(
        &self,
        amount: u64,
        wanted: i64,
        waiting: &Waiting,
        single: Option<Single<Key, Take, Took>>,
    ) -> Result<Taken> {
        let first = self.random_segments();
        let taken = write(&self.pool, Reach::TAKE, DOING, Some(&self.key), async |conn, grammar, tries| {
            let tries = tries.by(waiting.bound);
            let segment =
                tried!(tries, answered::<DB, _>(DB::stock_take_any(conn, Some(grammar), &self.key, wanted, first)))?;
            Ok(match segment {
                Some(segment) => ControlFlow::Break(segment),
                None => ControlFlow::Continue(answered::<DB, _>(DB::stock_look(conn, &self.key)).await?.segments),
            })
        });
        let taken = taken.await;
        drop(single);
        let segments = match taken.map_err(Failed::into_error) {
            Ok(ControlFlow::Break(segment)) => return Ok(Taken::from_one(segment, amount)),
            Ok(ControlFlow::Continue(segments)) => segments,
            // On a database with one lock for all writers, the stock may be sold out all the same.
            Err(Error::Database { fault: Fault::Contended, .. }) if DB::ONE_WRITER => {
                Box::pin(self.look()).await?.segments
            }
            Err(Error::Database { fault: Fault::Contended, .. }) => return Err(self.contended(waiting)),
            Err(err) => return Err(err),
        };
        // Boxed: most of the future, and seldom needed.
        Box::pin(self.take_waiting(amount, &segments, waiting)).await
    }

    /// Takes in its own transaction, after these segments were seen.
    async fn take_waiting(&self, amount: u64, segments: &[Segment], waiting: &Waiting) -> Result<Taken> {
        // Uncommitted takes still count as left here, so this does not report sold out too early.
        let left = sum(segments);
        if left < amount {
            return Err(self.sold_out(amount, left));
        }
        let enough: Vec<_> = segments.iter().filter(|it| it.quantity >= amount).collect();
        if !enough.is_empty() {
            let number = enough[fastrand::usize(..enough.len())].number;
            let mut tx = self.begin(waiting).await?;
            match self.take_locked(&mut tx, number..=number, amount, waiting).await {
                // Release the segment's lock before waiting for others: locking it first would violate the lock order.
                Err(Error::SoldOut { .. }) => tx.undo().await,
                taken => return self.end(tx, taken, waiting).await,
            }
        }
        let mut tx = self.begin(waiting).await?;
        let taken = self.gather(&mut tx, amount, waiting).await;
        self.end(tx, taken, waiting).await
    }

    /// What is left, read on a connection of the pool.
    pub(super) async fn look(&self) -> Result<Look> {
        call(&self.pool, Reach::POOL, DOING, Some(&self.key), async |conn, _| {
            answered::<DB, _>(DB::stock_look(conn, &self.key)).await
        })
        .await
        .map_err(Failed::into_error)
    }

    /// Takes from one unlocked segment, without waiting.
    pub(super) async fn take_any(
        &self,
        conn: &mut DB::Connection,
        wanted: i64,
        waiting: &Waiting,
    ) -> Result<Option<u32>> {
        let first = self.random_segments();
        self.answered(waiting, DB::stock_take_any(conn, None, &self.key, wanted, first)).await
    }

    /// The segments to try first.
    pub(super) fn random_segments(&self) -> [u32; 4] {
        std::array::from_fn(|_| fastrand::u32(..self.segments))
    }

    /// Waits for all segments, and takes from as few as possible.
    pub(super) async fn gather(&self, conn: &mut DB::Connection, amount: u64, waiting: &Waiting) -> Result<Taken> {
        // Every operation that moves pieces between segments locks segment 0 first. So no pieces move after this, and
        // the next statement finds all pieces that are left.
        if self.lock(conn, FIRST, waiting).await?.is_empty() {
            return Err(self.sold_out(amount, 0));
        }
        self.take_locked(conn, ALL, amount, waiting).await
    }

    /// Waits for these segments, and takes from as few as possible. Sold out if the segments together hold too few.
    pub(super) async fn take_locked(
        &self,
        conn: &mut DB::Connection,
        segments: RangeInclusive<u32>,
        amount: u64,
        waiting: &Waiting,
    ) -> Result<Taken> {
        let mut segments = self.lock(conn, segments, waiting).await?;
        let left = sum(&segments);
        if left < amount {
            return Err(self.sold_out(amount, left));
        }
        segments.sort_by_key(|it| Reverse(it.quantity));
        let mut missing = amount;
        let mut parts = Vec::new();
        for Segment { number, quantity } in &mut segments {
            if missing == 0 {
                break;
            }
            let part = missing.min(*quantity);
            missing -= part;
            *quantity -= part;
            parts.push(Segment { number: *number, quantity: part });
        }
        segments.truncate(parts.len());
        self.answered(waiting, DB::stock_write(conn, &self.key, &segments)).await?;
        Ok(Taken { parts })
    }

    /// Spreads the pieces that are left plus `more` evenly over the segments, in its own transaction.
    pub(super) async fn spread(&self, more: u64) -> Result<()> {
        let waiting = &self.waiting();
        let mut tx = self.begin(waiting).await?;
        let spread = self.spread_in(&mut tx, more, waiting).await;
        self.end(tx, spread, waiting).await
    }

    async fn spread_in(&self, conn: &mut DB::Connection, more: u64, waiting: &Waiting) -> Result<()> {
        // Everything below needs this lock: a statement does not see segments that a concurrent transaction creates.
        if self.lock(conn, FIRST, waiting).await?.is_empty() {
            if more == 0 {
                return Ok(());
            }
            self.bounded(waiting, DB::stock_make(conn, &self.key)).await?;
            self.lock(conn, FIRST, waiting).await?;
        }
        let old = self.lock(conn, ALL, waiting).await?;
        let Some(last) = old.last() else {
            return Ok(());
        };
        let total = sum(&old).checked_add(more).filter(|it| *it < TOO_MANY).ok_or_else(|| {
            let reason = format!("would leave more than {} in the stock; nothing was added", i64::MAX);
            Error::InvalidOption { option: "put", reason }
        })?;
        let new: Vec<_> = even(total, self.segments).filter(|it| !old.contains(it)).collect();
        if !new.is_empty() {
            self.answered(waiting, DB::stock_write(conn, &self.key, &new)).await?;
        }
        if last.number >= self.segments {
            self.answered(waiting, DB::stock_remove(conn, &self.key, self.segments..=last.number)).await?;
        }
        Ok(())
    }

    async fn begin(&self, waiting: &Waiting) -> Result<Tx<DB>> {
        let wait = waiting.left(self.wait);
        let acquired = self.pool.options().get_acquire_timeout();
        // On a database with one lock for all writers, it waits for that too, and bounds the wait by itself.
        let limit = DB::IS_REMOTE.then(|| Instant::now() + acquired + ANSWER_LIMIT);
        let begun = until(limit, begin_within(&self.pool, Some(wait), None, Location::caller())).await;
        begun.unwrap_or_else(|| Err(no_answer(DOING, Some(&self.key))))
    }

    /// Commits if the result is `Ok`, and rolls back otherwise. Without an answer to the COMMIT the outcome is unknown.
    async fn end<T>(&self, tx: Tx<DB>, result: Result<T>, waiting: &Waiting) -> Result<T> {
        match result {
            Ok(done) => {
                let limit = DB::IS_REMOTE.then(|| Instant::now() + ANSWER_LIMIT);
                let committed = until(limit, tx.commit()).await;
                committed.unwrap_or_else(|| Err(Error::OutcomeUnknown { source: timed_out().into() })).map(|()| done)
            }
            Err(err) => {
                if waiting.is_answered() {
                    tx.undo().await;
                }
                Err(err)
            }
        }
    }

    pub(super) async fn lock(
        &self,
        conn: &mut DB::Connection,
        segments: RangeInclusive<u32>,
        waiting: &Waiting,
    ) -> Result<Vec<Segment>> {
        self.bounded(waiting, DB::stock_lock(conn, &self.key, segments, waiting.left(self.wait))).await
    }

    /// Runs a statement that may wait on the server.
    async fn bounded<T>(&self, waiting: &Waiting, work: impl Future<Output = sqlx::Result<T>> + Send) -> Result<T> {
        if let Some(result) = until(waiting.bound.map(|it| it.max(Instant::now()) + BACKSTOP), work).await {
            return result.map_err(|err| self.failed(waiting, err));
        }
        waiting.unanswered.store(true, Ordering::Relaxed);
        // The server may apply the bound to each segment, so it may wait for others all the same.
        Err(if answers(&self.pool).await { self.contended(waiting) } else { no_answer(DOING, Some(&self.key)) })
    }

    /// Runs a statement that waits for no segment.
    pub(super) async fn answered<T>(
        &self,
        waiting: &Waiting,
        work: impl Future<Output = sqlx::Result<T>> + Send,
    ) -> Result<T> {
        answered::<DB, _>(work).await.map_err(|err| self.failed(waiting, err))
    }

    pub(super) fn failed(&self, waiting: &Waiting, err: sqlx::Error) -> Error {
        match DB::fault(&err) {
            Fault::Contended => return self.contended(waiting),
            Fault::Unavailable => waiting.unanswered.store(true, Ordering::Relaxed),
            _ => {}
        }
        failed_on_own_table::<DB>(DOING, Some(&self.key), err)
    }

    fn contended(&self, waiting: &Waiting) -> Error {
        Error::Contended { key: self.key.clone(), waited: waiting.started.elapsed(), holder: None }
    }

    pub(super) fn sold_out(&self, wanted: u64, left: u64) -> Error {
        Error::SoldOut { key: self.key.clone(), wanted, left }
    }
}

/// The answer to a statement that takes without waiting, which an overloaded server still gives within this limit.
/// Without an answer the connection counts as broken.
pub(super) async fn answered<DB: StockOps, T>(work: impl Future<Output = sqlx::Result<T>> + Send) -> sqlx::Result<T> {
    let deadline = DB::IS_REMOTE.then(|| Instant::now() + ANSWER_LIMIT);
    until(deadline, work).await.unwrap_or_else(|| Err(timed_out().into()))
}

/// Start and deadline of an operation that waits for others.
#[derive(Debug)]
pub(super) struct Waiting {
    started: Instant,
    pub(super) bound: Option<Instant>,
    /// Whether a statement was not answered.
    unanswered: AtomicBool,
}

impl Waiting {
    /// When a take leaves the queue. On a server no batch waits for others.
    pub(super) fn leaves_queue<DB: StockOps>(&self) -> Option<Instant> {
        self.bound.filter(|_| DB::ONE_WRITER).map(|it| it.max(self.started + QUEUE_GRACE))
    }

    /// Whether all statements were answered.
    pub(super) fn is_answered(&self) -> bool {
        !self.unanswered.load(Ordering::Relaxed)
    }

    /// The time left of the wait.
    fn left(&self, wait: Wait) -> Wait {
        wait.cut(self.bound.map(|it| it.saturating_duration_since(Instant::now())))
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use sqlx::SqlitePool;

    use super::*;

    #[tokio::test]
    async fn a_wait_is_answered_until_the_server_is_unavailable() {
        let pool = SqlitePool::connect_lazy("sqlite::memory:").expect("it is an address");
        let stock = Stock::new(pool, "k");
        let waiting = stock.waiting();
        let refused = stock.failed(&waiting, sqlx::Error::RowNotFound);
        assert!(waiting.is_answered(), "{refused:?}");
        let broken = stock.failed(&waiting, timed_out().into());
        assert!(matches!(broken, Error::Database { fault: Fault::Unavailable, .. }), "{broken:?}");
        assert!(!waiting.is_answered());
    }
}
