//! Segmented stock: a very hot counter, spread over several rows so that many can take from it at once.

use std::{cmp::Reverse, fmt, ops::RangeInclusive, time::Duration};

use sqlx::Pool;
use tokio::time::Instant;

use crate::{
    error::{Error, Fault, Result},
    key::Key,
    policy::{Policy, Wait},
    sql::{
        AsConnection, Segment, StockOps, connection, depth, failed_on_own_table,
        tx::{Tx, begin_within},
    },
    task::until,
};

pub(crate) mod ops;

/// How many rows a stock is spread over unless it is told.
const SEGMENTS: u32 = 32;

/// The most rows that a stock can be spread over.
const MOST_SEGMENTS: u32 = 1024;

/// How much longer than the bound a server may take: it may keep the bound for each row anew, and MySQL keeps none for
/// the statement that makes a stock.
const BACKSTOP: Duration = Duration::from_secs(1);

/// For errors.
const DOING: &str = "using stock";

/// More than any stock can hold.
const TOO_MANY: u64 = 1 << 63;

const FIRST: RangeInclusive<u32> = 0..=0;
const ALL: RangeInclusive<u32> = 0..=u32::MAX;

/// A number of pieces that many callers take from at once, never more than there are.
///
/// One row that everybody updates lets one transaction through per write to the disk. A stock is spread over several
/// rows, its segments: a caller takes from one that nobody has locked, looking at some random ones first. Use it for one very
/// hot counter that can be divided: pieces on sale, seats, quota. For an ordinary counter one guarded
/// `UPDATE … SET n = n - 1 WHERE id = … AND n >= 1` is simpler; to read, check and write more than a number, lock the
/// row with [`RowLock`](crate::RowLock).
///
/// A segment that somebody has locked is passed over, but it is not empty. Where no single free segment has enough, the
/// caller waits: for one that has, or for all of them in their order, to gather from several or to see under lock that
/// too few are left. [`Error::SoldOut`] is therefore never said too early.
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
/// Needs the table `lockkit_stock`; see [`migrate`](crate::sql::schema). A handle is cheap to clone.
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
    /// The new sum is spread evenly over the segments, which are all locked for it: it waits for whoever is taking, and
    /// is for filling a stock, not for being called as often as `take`.
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
        Policy::new().retry(|_| self.spread(amount)).await
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
        Policy::new().retry(|_| self.take_alone(amount, wanted)).await
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
    /// Never needed for being right: callers find what is left wherever it is. Use it when the number of segments was
    /// changed, or when large amounts are wanted from a stock that has become uneven. Like [`put`](Self::put) it locks all
    /// of them for the moment.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    ///
    /// # Cancel safety
    /// Dropping this future leaves the sum as it is, spread as before or evenly.
    pub async fn rebalance(&self) -> Result<()> {
        self.check()?;
        Policy::new().retry(|_| self.spread(0)).await
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

    fn waiting(&self) -> Waiting {
        let started = Instant::now();
        let bound = self.wait.millis().map(|it| started + Duration::from_millis(it));
        Waiting { started, bound }
    }

    /// Takes in one statement, or else in a transaction of its own.
    async fn take_alone(&self, amount: u64, wanted: i64) -> Result<Taken> {
        let waiting = self.waiting();
        let segments = {
            let mut conn = connection(&self.pool, DOING, Some(&self.key)).await?;
            if let Some(number) = self.take_any(&mut conn, wanted, waiting).await? {
                return Ok(Taken::from_one(number, amount));
            }
            DB::stock_look(&mut conn, &self.key).await.map_err(|err| self.failed(waiting, err))?.segments
        };
        // What others are taking counts as left here, so this is not said too early.
        let left = sum(&segments);
        if left < amount {
            return Err(self.sold_out(amount, left));
        }
        let enough: Vec<_> = segments.iter().filter(|it| it.quantity >= amount).collect();
        if !enough.is_empty() {
            let number = enough[fastrand::usize(..enough.len())].number;
            let mut tx = self.begin(waiting).await?;
            match self.take_locked(&mut tx, number..=number, amount, waiting).await {
                // Its lock must not be kept while others are waited for: that would be in no order.
                Err(Error::SoldOut { .. }) => tx.rollback().await?,
                taken => return self.end(tx, taken).await,
            }
        }
        let mut tx = self.begin(waiting).await?;
        let taken = self.gather(&mut tx, amount, waiting).await;
        self.end(tx, taken).await
    }

    /// Takes from one free segment, without waiting.
    async fn take_any(&self, conn: &mut DB::Connection, wanted: i64, waiting: Waiting) -> Result<Option<u32>> {
        let first = std::array::from_fn(|_| fastrand::u32(..self.segments));
        DB::stock_take_any(conn, &self.key, wanted, first).await.map_err(|err| self.failed(waiting, err))
    }

    /// Waits for all segments, and takes from as few as have enough.
    async fn gather(&self, conn: &mut DB::Connection, amount: u64, waiting: Waiting) -> Result<Taken> {
        // Whoever moves pieces between segments locks the first one first, so after this nobody moves any: what the next
        // statement finds is all that there is.
        if self.lock(conn, FIRST, waiting).await?.is_empty() {
            return Err(self.sold_out(amount, 0));
        }
        self.take_locked(conn, ALL, amount, waiting).await
    }

    /// Waits for these segments, and takes from as few as have enough; sold out if they have less together.
    async fn take_locked(
        &self,
        conn: &mut DB::Connection,
        segments: RangeInclusive<u32>,
        amount: u64,
        waiting: Waiting,
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
        DB::stock_write(conn, &self.key, &segments).await.map_err(|err| self.failed(waiting, err))?;
        Ok(Taken { parts })
    }

    /// Spreads what is left and `more` evenly over the segments, in a transaction of its own.
    async fn spread(&self, more: u64) -> Result<()> {
        let waiting = self.waiting();
        let mut tx = self.begin(waiting).await?;
        let spread = self.spread_in(&mut tx, more, waiting).await;
        self.end(tx, spread).await
    }

    async fn spread_in(&self, conn: &mut DB::Connection, more: u64, waiting: Waiting) -> Result<()> {
        // Nothing below may run without this lock: a statement does not see the segments that another one makes meanwhile.
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
            DB::stock_write(conn, &self.key, &new).await.map_err(|err| self.failed(waiting, err))?;
        }
        if last.number >= self.segments {
            DB::stock_remove(conn, &self.key, self.segments..=last.number)
                .await
                .map_err(|err| self.failed(waiting, err))?;
        }
        Ok(())
    }

    async fn begin(&self, waiting: Waiting) -> Result<Tx<DB>> {
        begin_within(&self.pool, Some(waiting.left(self.wait)), None).await
    }

    /// Commits what went well.
    async fn end<T>(&self, tx: Tx<DB>, result: Result<T>) -> Result<T> {
        match result {
            Ok(done) => tx.commit().await.map(|()| done),
            Err(err) => {
                tx.undo().await;
                Err(err)
            }
        }
    }

    async fn lock(
        &self,
        conn: &mut DB::Connection,
        segments: RangeInclusive<u32>,
        waiting: Waiting,
    ) -> Result<Vec<Segment>> {
        self.bounded(waiting, DB::stock_lock(conn, &self.key, segments, waiting.left(self.wait))).await
    }

    /// Runs what may wait on the server.
    async fn bounded<T>(&self, waiting: Waiting, work: impl Future<Output = sqlx::Result<T>> + Send) -> Result<T> {
        match until(waiting.bound.map(|it| it + BACKSTOP), work).await {
            Some(result) => result.map_err(|err| self.failed(waiting, err)),
            None => Err(self.contended(waiting)),
        }
    }

    fn failed(&self, waiting: Waiting, err: sqlx::Error) -> Error {
        if DB::fault(&err) == Fault::Contended {
            return self.contended(waiting);
        }
        failed_on_own_table::<DB>(DOING, Some(&self.key), err)
    }

    fn contended(&self, waiting: Waiting) -> Error {
        Error::Contended { key: self.key.clone(), waited: waiting.started.elapsed(), holder: None }
    }

    fn sold_out(&self, wanted: u64, left: u64) -> Error {
        Error::SoldOut { key: self.key.clone(), wanted, left }
    }
}

/// When an operation began, and until when it waits for others.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    started: Instant,
    bound: Option<Instant>,
}

impl Waiting {
    /// What is left of the wait.
    fn left(self, wait: Wait) -> Wait {
        wait.cut(self.bound.map(|it| it.saturating_duration_since(Instant::now())))
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

/// How many these are together; more than can be are as many as can be.
fn sum(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum, it| sum.saturating_add(it.quantity))
}

/// So many pieces in so many segments, none with more than one more than another.
fn even(total: u64, segments: u32) -> impl Iterator<Item = Segment> {
    let (each, rest) = (total / u64::from(segments), total % u64::from(segments));
    (0..segments).map(move |number| Segment { number, quantity: each + u64::from(u64::from(number) < rest) })
}

/// An amount as the database has it.
fn column(amount: u64) -> Result<i64> {
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
