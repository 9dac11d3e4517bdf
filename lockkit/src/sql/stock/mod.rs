//! Segmented stock: a hot counter spread over several rows, so that many callers can take from it at once.

use std::{fmt, sync::Arc};

use sqlx::Pool;

use self::{
    attempt::{DOING, FIRST, Waiting},
    batch::{Take, Takes, Took},
    segment::{column, sum},
};
use crate::{
    body::batch::{Leaves, Turn},
    policy::{RetryPolicy, Wait},
    sql::{AsConnection, StockOps, in_transaction, note_answer, pool_state::of_pool, tx::refuse_under_own_lock},
    value::{
        error::{Error, Result},
        key::Key,
    },
};

mod attempt;
mod batch;
mod notes;
pub(crate) mod ops;
pub(crate) mod segment;
mod taken;

pub use taken::Taken;

/// Default number of rows that a stock is spread over.
const SEGMENTS: u32 = 32;

/// Largest number of rows that a stock can be spread over.
const MOST_SEGMENTS: u32 = 1024;

/// A counter of pieces that many callers take from concurrently, without ever taking more than there are.
///
/// When all transactions update one row, only one of them commits per write to the disk. A stock is spread over several
/// rows, its segments, and a caller takes from a segment that no other transaction has locked. It tries a few random
/// segments first. Use a stock for one very hot counter that can be divided: pieces on sale, seats, quota. For an
/// ordinary counter one guarded `UPDATE … SET n = n - 1 WHERE id = … AND n >= 1` is simpler. To read, check and write
/// more than a number, lock the row with [`RowLock`](crate::RowLock).
///
/// A locked segment is skipped, but not counted as empty. Where no single unlocked segment has enough, the caller waits
/// for a segment that has, or for all segments in ascending order to gather from several. [`Error::SoldOut`] is
/// returned only after a check that counts the locked segments.
///
/// | database | [`take`](Self::take) when an unlocked segment has enough | otherwise |
/// |---|---|---|
/// | PostgreSQL | one statement: `FOR NO KEY UPDATE SKIP LOCKED` and the update | a read; then, unless sold out, a transaction that waits |
/// | MySQL, MariaDB | the same (`FOR UPDATE SKIP LOCKED`); a second statement if none of four random segments (MariaDB: one) has enough | the same |
/// | SQLite | one statement, which waits for the one lock of all writers; segments gain nothing | the same |
///
/// # Takes that arrive together
/// Calls of [`take`](Self::take) for one key become one statement when they arrive together: on any handles of one
/// pool, on one Tokio runtime. A call that finds no other in flight goes to the database at once. Calls that arrive
/// while a statement is in flight queue, and the next statement takes for up to 256 of them from one segment, the
/// oldest call first. A call that wants more than an unlocked segment has leaves the queue and gathers by itself, so it
/// keeps no smaller call from being served. Each call gets its own result. [`take_in`](Self::take_in) is never
/// combined.
///
/// On servers, the statement of a batch also writes a note, a row in `lockkit_stock_batch`. If the answer to the batch
/// is lost, lockkit reads from the note whether the batch was executed.
///
/// Use at least as many segments as there are concurrent transactions; the default is 32. Processes may use different
/// numbers. The number only sets how many rows [`put`](Self::put) and [`rebalance`](Self::rebalance) spread the pieces
/// over; callers take from all existing rows.
///
/// Needs the tables `lockkit_stock` and, on servers, `lockkit_stock_batch`; see [`migrate`](crate::migrate()). A handle
/// is cheap to clone.
///
/// # Example
/// ```
/// use lockkit::{Error, Stock};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # lockkit::migrate(&pool).await?;
/// let stock = Stock::new(pool, "sku:42").segments(10);
/// stock.put(200).await?;
/// stock.take(3).await?;
/// match stock.take(198).await {
///     Err(Error::SoldOut { wanted: 198, left: 197, .. }) => {}
///     other => panic!("{other:?}"),
/// }
/// assert_eq!(stock.left().await?, 197);
/// # Ok(()) }
/// ```
pub struct Stock<DB: StockOps> {
    pool: Pool<DB>,
    key: Key,
    segments: u32,
    wait: Wait,
    /// Those of the pool, kept here for speed.
    takes: Arc<Takes>,
}

impl<DB: StockOps> Stock<DB> {
    /// Creates a handle to the stock with this name. The first [`put`](Self::put) creates the stock itself.
    pub fn new(pool: Pool<DB>, key: impl Into<Key>) -> Self {
        let takes = of_pool(&pool);
        Self { pool, key: key.into(), segments: SEGMENTS, wait: Wait::DEFAULT, takes }
    }

    /// Number of rows to spread the pieces over, 1 to 1024. Defaults to 32.
    #[must_use]
    pub fn segments(mut self, segments: u32) -> Self {
        self.segments = segments;
        self
    }

    /// Longest wait for segments that others have locked. Defaults to [`Wait::DEFAULT`], 10 s.
    #[must_use]
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// The name of the stock.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Adds pieces, and creates the stock if it does not exist.
    ///
    /// This locks all segments and spreads the new sum evenly over them. It waits for transactions that are taking, so
    /// use it to fill a stock, not as often as `take`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for zero, or when the stock would hold more than `i64::MAX`; nothing is added then.
    /// [`Error::Contended`] after the wait; [`Error::RetriesExhausted`] when the database rolled back every attempt;
    /// [`Error::InvalidKey`]; [`Error::NotMigrated`]; [`Error::OutcomeUnknown`] when the connection broke during the
    /// commit; [`Error::Database`].
    ///
    /// # Cancel safety
    /// If this future is dropped, either all pieces were added or none; the outcome is unknown, as with any commit.
    pub async fn put(&self, amount: u64) -> Result<()> {
        self.check()?;
        column(amount)?;
        RetryPolicy::new().retry(|_| self.spread(amount)).await
    }

    /// Takes this many pieces, from one segment if possible, otherwise from several. Calls that arrive together become
    /// [one statement](Self#takes-that-arrive-together).
    ///
    /// # Errors
    /// [`Error::SoldOut`] when fewer pieces are left than wanted, or the stock does not exist; [`Error::Contended`]
    /// after the wait; [`Error::InvalidOption`] for zero or more than `i64::MAX`; otherwise as [`put`](Self::put).
    /// After an error nothing was taken, with two exceptions: after [`Error::OutcomeUnknown`], and after an
    /// [`Error::Database`] with a broken connection, the outcome is unknown. A connection without an answer for 10 s
    /// counts as broken; without the answer to a COMMIT for 10 s, the error is `OutcomeUnknown`. When the connection
    /// breaks during a statement for several calls, each call is told what happened; only if the database does not tell
    /// within another 10 s, the error is `OutcomeUnknown`.
    ///
    /// # Cancel safety
    /// If this future is dropped while it is queued, nothing is taken. If it is dropped later, either all pieces were
    /// taken or none; the outcome is unknown, as with any commit. Pieces that were taken for a dropped call are not put
    /// back. Other calls in the same statement are not affected. No transaction and no lock remains.
    pub async fn take(&self, amount: u64) -> Result<Taken> {
        self.check()?;
        let wanted = column(amount)?;
        refuse_under_own_lock(&self.pool)?;
        let waiting = &self.waiting();
        let call = Take { amount, wait_ends: waiting.bound };
        let run = |runner| batch::run(self.clone(), runner);
        let (leaves, doing) = (Leaves::At(waiting.leaves_queue::<DB>()), (DOING, &self.key));
        let mut single = match self.takes.enter(self.key.clone(), call, 1, leaves, doing, run).await? {
            Turn::Answered(Took::Taken(taken)) => return Ok(taken),
            Turn::Answered(Took::SoldOut { left }) => return Err(self.sold_out(amount, left)),
            Turn::Alone(single) => single,
        };
        RetryPolicy::new().retry(|_| self.take_alone(amount, wanted, waiting, single.take())).await
    }

    /// Takes this many pieces as part of your transaction. A rollback returns them.
    ///
    /// The segment stays locked until the transaction ends, and other callers skip it meanwhile. So take last, then
    /// commit.
    ///
    /// When stocks run low, two transactions that each take from several stocks, or twice from one stock, can deadlock.
    /// MySQL and MariaDB may keep the lock of a skipped segment, so there a transaction that takes once can deadlock
    /// too. Run the transaction again when [`is_retryable`](crate::is_retryable) returns `true`.
    ///
    /// Use a transaction from [`begin`](crate::begin). The database may abort a REPEATABLE READ transaction when
    /// another one took first.
    ///
    /// # Errors
    /// As [`take`](Self::take), but nothing is retried; [`Error::InvalidOption`] also outside a transaction. After
    /// [`Error::SoldOut`] nothing was taken, and the transaction can continue. Roll it back after any other error.
    ///
    /// # Cancel safety
    /// The transaction may or may not have taken the pieces; roll it back.
    ///
    /// # Example
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # lockkit::migrate(&pool).await?;
    /// # sqlx::query("CREATE TABLE orders (user_id INTEGER, pieces INTEGER)").execute(&pool).await?;
    /// # let stock = lockkit::Stock::new(pool.clone(), "sku:42");
    /// # stock.put(200).await?;
    /// let mut tx = lockkit::begin(&pool).await?;
    /// sqlx::query("INSERT INTO orders VALUES (7, 3)").execute(&mut *tx).await?;
    /// stock.take_in(&mut tx, 3).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn take_in(&self, conn: &mut impl AsConnection<DB>, amount: u64) -> Result<Taken> {
        self.check()?;
        let (wanted, is_begun, waiting) = (column(amount)?, conn.is_begun(), self.waiting());
        let taken = self.take_inside(conn.for_query(), is_begun, amount, wanted, &waiting).await;
        if waiting.is_answered() { note_answer(conn, taken) } else { taken }
    }

    async fn take_inside(
        &self,
        conn: &mut DB::Connection,
        is_begun: bool,
        amount: u64,
        wanted: i64,
        waiting: &Waiting,
    ) -> Result<Taken> {
        in_transaction::<DB>(conn, false, "take_in", "needs a transaction; outside of one use `take`").await?;
        if DB::ONE_WRITER && !is_begun {
            // The statement that takes would wait for the write lock as long as the connection's busy timeout.
            self.lock(conn, FIRST, waiting).await?;
        }
        if let Some(number) = self.take_any(conn, wanted, waiting).await? {
            return Ok(Taken::from_one(number, amount));
        }
        let look = self.answered(waiting, DB::stock_look(conn, &self.key)).await?;
        let left = sum(&look.segments);
        if look.is_current && left < amount {
            return Err(self.sold_out(amount, left));
        }
        // Lock the first segments that together have enough. The locks stay until the transaction ends, so they must be
        // taken in ascending order, and should leave the remaining segments to other callers.
        let mut missing = amount;
        let last = look.segments.iter().find(|segment| {
            missing = missing.saturating_sub(segment.quantity);
            missing == 0
        });
        if let Some(last) = last {
            match self.take_locked(conn, 0..=last.number, amount, waiting).await {
                Err(Error::SoldOut { .. }) => {}
                taken => return taken,
            }
        }
        self.gather(conn, amount, waiting).await
    }

    /// Number of pieces left. Uncommitted takes still count as left.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; [`Error::NotMigrated`]; [`Error::Database`].
    ///
    /// # Cancel safety
    /// Cancel safe: this only reads.
    pub async fn left(&self) -> Result<u64> {
        self.check()?;
        Ok(sum(&self.look().await?.segments))
    }

    /// Spreads the pieces that are left evenly over the segments, and removes segments beyond their number.
    ///
    /// Correctness does not need it: callers find the pieces in any segment. Use it after the number of segments was
    /// changed, or before large takes from a stock that has become uneven. Like [`put`](Self::put), it locks all
    /// segments while it runs.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    ///
    /// # Cancel safety
    /// If this future is dropped, the sum is unchanged; the pieces are spread as before or evenly.
    pub async fn rebalance(&self) -> Result<()> {
        self.check()?;
        RetryPolicy::new().retry(|_| self.spread(0)).await
    }

    fn check(&self) -> Result<()> {
        self.key.check()?;
        self.wait.check()?;
        if (1..=MOST_SEGMENTS).contains(&self.segments) {
            return Ok(());
        }
        let reason = format!("is {}; give it a number from 1 to {MOST_SEGMENTS}", self.segments);
        Err(Error::InvalidOption { option: "segments", reason })
    }
}

impl<DB: StockOps> Clone for Stock<DB> {
    fn clone(&self) -> Self {
        let Self { pool, key, segments, wait, takes } = self;
        Self { pool: pool.clone(), key: key.clone(), segments: *segments, wait: *wait, takes: takes.clone() }
    }
}

impl<DB: StockOps> fmt::Debug for Stock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool: _, key, segments, wait, takes: _ } = self;
        f.debug_struct("Stock").field("key", key).field("segments", segments).field("wait", wait).finish()
    }
}
