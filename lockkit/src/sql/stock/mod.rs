//! Segmented stock: a very hot counter, spread over several rows so that many can take from it at once.

use std::fmt;

use sqlx::Pool;

use self::{
    attempt::{DOING, FIRST},
    segment::{Segment, column, sum},
};
use crate::{
    error::{Error, Result},
    key::Key,
    policy::{RetryPolicy, Wait},
    sql::{AsConnection, StockOps, connection, depth},
};

mod attempt;
pub(crate) mod ops;
pub(crate) mod segment;

/// Default number of rows that a stock is spread over.
const SEGMENTS: u32 = 32;

/// The most rows that a stock can be spread over.
const MOST_SEGMENTS: u32 = 1024;

/// A number of pieces that many callers take from at once, never more than there are.
///
/// When all transactions update one row, one of them commits per write to the disk. A stock is spread over several
/// rows, its segments: a caller takes from one that no other transaction has locked, trying some random ones first.
/// Use it for one very hot counter that can be divided: pieces on sale, seats, quota. For an ordinary counter one
/// guarded `UPDATE … SET n = n - 1 WHERE id = … AND n >= 1` is simpler; to read, check and write more than a number,
/// lock the row with [`RowLock`](crate::RowLock).
///
/// A locked segment is skipped, but it is not empty. Where no single free segment has enough, the caller waits: for
/// one that has, or for all of them in their order, to gather from several. [`Error::SoldOut`] is returned only after
/// a check that counts the locked segments.
///
/// | database | [`take`](Self::take) when a free segment has enough | when not |
/// |---|---|---|
/// | PostgreSQL | one statement: `FOR NO KEY UPDATE SKIP LOCKED` and the update | a look; then, unless it is sold out, a transaction that waits |
/// | MySQL, MariaDB | the same (`FOR UPDATE SKIP LOCKED`); a second one if none of four random ones is | the same |
/// | SQLite | a look and a transaction: there is one lock for all writers, so segments gain nothing | the same |
///
/// Give it at least as many segments as transactions take from it at once; the default is 32. Every process may have
/// another number: it only says over how many rows [`put`](Self::put) and [`rebalance`](Self::rebalance) spread, and
/// whatever rows there are, are taken from.
///
/// Needs the table `lockkit_stock`; see [`migrate`](crate::migrate()). A handle is cheap to clone.
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
}

/// What was taken from a stock. Dropping it gives nothing back; [`Stock::put`] does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Taken {
    parts: Vec<Segment>,
}

impl Taken {
    fn from_one(number: u32, quantity: u64) -> Self {
        Self { parts: vec![Segment { number, quantity }] }
    }

    /// How many.
    pub fn amount(&self) -> u64 {
        sum(&self.parts)
    }

    /// From which segments, and how many from each; one unless none had enough.
    pub fn segments(&self) -> impl Iterator<Item = (u32, u64)> {
        self.parts.iter().map(|it| (it.number, it.quantity))
    }
}

impl<DB: StockOps> Stock<DB> {
    /// The stock of this name. It is made by the first [`put`](Self::put).
    pub fn new(pool: Pool<DB>, key: impl Into<Key>) -> Self {
        Self { pool, key: key.into(), segments: SEGMENTS, wait: Wait::DEFAULT }
    }

    /// Over how many rows to spread what is put, 1 to 1024. Defaults to 32.
    #[must_use]
    pub fn segments(mut self, segments: u32) -> Self {
        self.segments = segments;
        self
    }

    /// How long to wait for segments that others have locked, where waiting is needed. Defaults to
    /// [`Wait::DEFAULT`], 10 s.
    #[must_use]
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// The name of the stock.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Adds pieces, and makes the stock if there is none.
    ///
    /// It locks all segments and spreads the new sum evenly over them. It waits for transactions that are taking, so
    /// use it to fill a stock, not as often as `take`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for zero, or when the stock would hold more than `i64::MAX`: nothing was added then.
    /// [`Error::Contended`] after the wait; [`Error::RetriesExhausted`] when the database undid it time and again;
    /// [`Error::InvalidKey`]; [`Error::NotMigrated`]; [`Error::OutcomeUnknown`] when the connection broke during the
    /// commit; [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropping this future leaves it unknown whether the pieces were added, as with any commit: all of them or none.
    pub async fn put(&self, amount: u64) -> Result<()> {
        self.check()?;
        column(amount)?;
        RetryPolicy::new().retry(|_| self.spread(amount)).await
    }

    /// Takes this many pieces, from one segment if one has as many, or else from several.
    ///
    /// # Errors
    /// [`Error::SoldOut`] when fewer are left than wanted, also when there is no such stock;
    /// [`Error::Contended`] after the wait; [`Error::InvalidOption`] for zero or more than `i64::MAX`; otherwise as
    /// [`put`](Self::put). After an error nothing was taken, except that it is not known after
    /// [`Error::OutcomeUnknown`] and an [`Error::Database`] whose connection broke.
    ///
    /// # Cancel safety
    /// Dropping this future leaves it unknown whether the pieces were taken, as with any commit: all of them or none. No
    /// transaction and no lock stays.
    pub async fn take(&self, amount: u64) -> Result<Taken> {
        self.check()?;
        let wanted = column(amount)?;
        RetryPolicy::new().retry(|_| self.take_alone(amount, wanted)).await
    }

    /// Takes this many pieces as a part of your transaction: they are back if it rolls back.
    ///
    /// The segment stays locked until the transaction ends, and others pass over it meanwhile; so take last, and commit.
    /// A transaction that takes from several stocks, or twice from one, can deadlock with another one that does when they
    /// run low, and on MySQL and MariaDB, which may keep the lock of a segment that was passed over, one that takes once
    /// can too. Run the transaction again when [`is_retryable`](crate::is_retryable) says so.
    ///
    /// Use a transaction from [`begin`](crate::begin). In a REPEATABLE READ one the database may undo it
    /// because somebody else took first.
    ///
    /// # Errors
    /// As [`take`](Self::take), but nothing is retried; [`Error::InvalidOption`] also outside a transaction. Nothing was
    /// taken after [`Error::SoldOut`], and the transaction goes on. Roll it back after any other error.
    ///
    /// # Cancel safety
    /// The pieces may or may not be taken, until the transaction ends; roll it back.
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
    /// stock.take_in(&mut *tx, 3).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn take_in(&self, conn: &mut impl AsConnection<DB>, amount: u64) -> Result<Taken> {
        let conn = conn.as_connection();
        self.check()?;
        let wanted = column(amount)?;
        if depth::<DB>(conn).await? == 0 {
            let reason = "needs a transaction; outside of one use `take`".to_owned();
            return Err(Error::InvalidOption { option: "take_in", reason });
        }
        let waiting = self.waiting();
        if DB::ONE_WRITER {
            // The statement that takes would wait for it as long as the connection does.
            self.lock(conn, FIRST, waiting).await?;
        }
        if let Some(number) = self.take_any(conn, wanted, waiting).await? {
            return Ok(Taken::from_one(number, amount));
        }
        let look = DB::stock_look(conn, &self.key).await.map_err(|err| self.failed(waiting, err))?;
        let left = sum(&look.segments);
        if look.is_current && left < amount {
            return Err(self.sold_out(amount, left));
        }
        // The first segments that together have enough: what this locks it keeps until the transaction ends, so it must
        // go by the order, and should leave the others to the others.
        let mut missing = amount;
        let last = look.segments.iter().find(|it| {
            missing = missing.saturating_sub(it.quantity);
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

    /// How many are left. What others have taken but not committed counts as left.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; [`Error::NotMigrated`]; [`Error::Database`].
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn left(&self) -> Result<u64> {
        self.check()?;
        let mut conn = connection(&self.pool, DOING, Some(&self.key)).await?;
        let look = DB::stock_look(&mut conn, &self.key).await.map_err(|err| self.failed(self.waiting(), err))?;
        Ok(sum(&look.segments))
    }

    /// Spreads what is left evenly over the segments, and removes those beyond their number.
    ///
    /// Not needed for correctness: callers find the pieces in any segment. Use it when the number of segments was
    /// changed, or when large amounts are wanted from a stock that has become uneven. Like [`put`](Self::put) it
    /// locks all of them for the moment.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    ///
    /// # Cancel safety
    /// Dropping this future leaves the sum as it is, spread as before or evenly.
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
        let Self { pool, key, segments, wait } = self;
        Self { pool: pool.clone(), key: key.clone(), segments: *segments, wait: *wait }
    }
}

impl<DB: StockOps> fmt::Debug for Stock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool: _, key, segments, wait } = self;
        f.debug_struct("Stock").field("key", key).field("segments", segments).field("wait", wait).finish()
    }
}
