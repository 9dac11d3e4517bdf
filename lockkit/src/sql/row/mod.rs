//! Row locks: `SELECT … FOR UPDATE` on the caller's own rows, bounded by the server, refused when it would scan.

pub(crate) mod ops;
pub(crate) mod plan;

pub use self::plan::PlanCheck;

use std::fmt;

use sqlx::{Database, Encode, FromRow, Type};
use tokio::time::Instant;

use crate::{
    error::{Error, Fault, Result},
    key::Key,
    lease::wait::observed,
    observe::Strategy,
    policy::Wait,
    sql::{
        AsConnection, By, Columns, RowOps, RowQuery, Strength, Values, depth, failed, holder,
        ident::{Ident, TableName},
    },
};

/// Locks rows of a table of yours for the rest of a transaction.
///
/// Use it for read-check-write on rows that exist. When there is no row yet, use [`NamedLock`](crate::NamedLock); when
/// the work calls other services, a [lease](crate::Leases); when conflicts are rare, [`VersionedRow`](crate::VersionedRow).
///
/// | database | lock | bounded wait |
/// |---|---|---|
/// | PostgreSQL | `FOR NO KEY UPDATE`: stops writers, not those who only refer to the row by a foreign key | `lock_timeout` for this statement alone |
/// | MySQL | `FOR UPDATE` | `MAX_EXECUTION_TIME` for this statement alone |
/// | MariaDB | `FOR UPDATE` | `max_statement_time` for this statement alone |
/// | SQLite | the write lock of the whole database, as `BEGIN IMMEDIATE` takes it; there are no row locks | busy timeout |
///
/// One round trip on every server, with a bound or without. On PostgreSQL the bound is for each row that is waited for, on
/// the others for all of them together. On SQLite `begin` is what waits for the write lock; a bounded lock in another
/// transaction changes the connection's busy timeout for the moment, so let it finish.
///
/// **The plan check.** Without an index that serves the columns, InnoDB locks every row of the table and PostgreSQL reads
/// all of it. Before a statement is run for the first time, lockkit asks the database for its plan (one statement more, up
/// to five) and refuses with [`Error::FullScan`]; statements that passed are remembered by the process.
/// SQLite refuses too, so that what is tested on it is true on a server. On MySQL and MariaDB the lock then names the indexes
/// to use, since the optimizer would scan a small table. A partial index (`WHERE state = 'ready'`) serves if it has all rows
/// that `by` selects.
///
/// A view has no rows of its own to lock, and is refused with [`Error::InvalidOption`]; MySQL and MariaDB lock through a view
/// that they merge into the query.
///
/// **A queue of jobs** needs no column to choose by. `order_by`, `limit` and `skip_locked` together take the first rows that
/// nobody else has, if an index has that order:
///
/// ```
/// # use lockkit::RowLock;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_jobs (id INTEGER PRIMARY KEY, name TEXT)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_jobs VALUES (1, 'first'), (2, 'second')").execute(&pool).await?;
/// let mut tx = lockkit::begin(&pool).await?;
/// let job: Option<(i64, String)> =
///     RowLock::table("t_jobs").order_by("id").limit(1).skip_locked().fetch_optional(&mut tx).await?;
/// if let Some((id, _name)) = job {
///     sqlx::query("DELETE FROM t_jobs WHERE id = ?").bind(id).execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
///
/// **After an error** roll the transaction back. PostgreSQL lets nothing else happen in it, and on MySQL or MariaDB it may
/// be gone (deadlock) or half done. [`Tx::commit`](crate::Tx::commit) refuses such a transaction where the database says so.
///
/// # Example
/// ```
/// use lockkit::{RowLock, Wait};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER PRIMARY KEY, stock INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 3)").execute(&pool).await?;
/// let mut tx = lockkit::begin(&pool).await?;
/// let (stock,): (i64,) = sqlx::query_as("SELECT 0").fetch_one(&mut *tx).await?; // any other work
/// let (_id, stock): (i64, i64) = RowLock::table("t_items")
///     .by("item_id", 7_i64)
///     .wait(Wait::AtMost(Duration::from_millis(500)))
///     .fetch_one(&mut *tx)
///     .await?;
/// if stock > 0 {
///     sqlx::query("UPDATE t_items SET stock = stock - 1 WHERE item_id = 7").execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[must_use = "a row lock does nothing until `lock` or `fetch_…` is awaited"]
pub struct RowLock<DB: Database> {
    table: Result<TableName>,
    by: Vec<By>,
    order_by: Vec<Ident>,
    values: Values<DB>,
    limit: Option<u32>,
    skip_locked: bool,
    strength: Strength,
    wait: Option<Wait>,
    check: PlanCheck,
}

impl<DB: RowOps> RowLock<DB> {
    /// Rows of this table. The name as the database stores it (letters, digits, `_`), with its schema if that is not the
    /// connection's: `"app.items"` (on MySQL and MariaDB the database, on SQLite the attached file).
    pub fn table(name: &str) -> Self {
        Self {
            table: TableName::new(name),
            by: Vec::new(),
            order_by: Vec::new(),
            values: Values::new(),
            limit: None,
            skip_locked: false,
            strength: Strength::Update,
            wait: None,
            check: PlanCheck::Deny,
        }
    }

    /// Rows whose column has this value. Call it again for every column of a composite key; the same column twice is an
    /// error. So is `None`: NULL equals nothing in SQL, and no row would ever match.
    pub fn by<'v, T>(self, column: &str, value: T) -> Self
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        self.by_values("by", column, [value])
    }

    /// Rows whose column has one of these values. They are locked in the order of the column, whatever the order of the
    /// values, so that two transactions that want the same rows cannot deadlock.
    ///
    /// [`lock`](Self::lock) fails with [`Error::NoSuchRow`] when a value of a unique column has no row (it counts rows).
    pub fn by_any<'v, T>(self, column: &str, values: impl IntoIterator<Item = T>) -> Self
    where
        T: Encode<'v, DB> + Type<DB> + Ord,
    {
        let mut values: Vec<T> = values.into_iter().collect();
        values.sort_unstable();
        values.dedup();
        self.by_values("by_any", column, values)
    }

    fn by_values<'v, T>(mut self, option: &'static str, column: &str, values: impl IntoIterator<Item = T>) -> Self
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        let Some(column) = self.ident(column) else { return self };
        let before = self.values.len();
        for value in values {
            if let Err(err) = self.values.add_compared(option, &column, value) {
                self.fail(|| err);
            }
        }
        let values = self.values.len() - before;
        if values == 0 {
            self.fail(|| no_values(option));
        }
        if self.by.iter().any(|it| it.column == column) {
            self.fail(|| named_twice(&column));
        }
        self.by.push(By { column, values });
        self
    }

    /// Locks in the order of this column; call it again for more. Without it, in the order of the columns of `by`.
    ///
    /// Give it where `by` matches many rows and the lock waits: rows locked in different orders can deadlock. MySQL and
    /// MariaDB lock rows as they read them, so there an index must deliver this order, after the columns of `by`.
    pub fn order_by(mut self, column: &str) -> Self {
        let column = self.ident(column);
        self.order_by.extend(column);
        self
    }

    /// Locks at most this many rows. On MySQL and MariaDB an index must deliver the order: where they have to sort, they
    /// lock every row that matches before they pick.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = Some(rows);
        self
    }

    /// Passes over rows that are locked by somebody else, as a queue of jobs does. On SQLite nothing is ever passed over.
    pub fn skip_locked(mut self) -> Self {
        self.skip_locked = true;
        self
    }

    /// Lets others read and share, but not write. The default stops other writers and other locks of its kind.
    pub fn share(mut self) -> Self {
        self.strength = Strength::Share;
        self
    }

    /// Takes the strongest lock: for deleting rows or changing their key. Differs from the default on PostgreSQL only.
    pub fn for_key_change(mut self) -> Self {
        self.strength = Strength::KeyChange;
        self
    }

    /// How long to wait for rows that are locked. Defaults to [`Wait::DEFAULT`], 10 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = Some(wait.into());
        self
    }

    /// What to do when the lock would scan the table. Defaults to [`PlanCheck::Deny`].
    pub fn check_plan(mut self, check: PlanCheck) -> Self {
        self.check = check;
        self
    }

    /// This lock, with its wait cut to what is left until a deadline.
    pub(crate) fn until(mut self, deadline: Option<Instant>) -> Self {
        self.wait = Some(Wait::within(self.wait, deadline.map(|it| it.saturating_duration_since(Instant::now()))));
        self
    }

    pub(crate) fn bound(&self) -> Option<Wait> {
        self.wait
    }

    /// Locks the rows and returns how many they are.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`] when no row matches, or a value of [`by_any`](Self::by_any) has none;
    /// [`Error::Contended`] after the wait, with the holder where the server knows it (MySQL; PostgreSQL under `#[with_lock]`):
    /// while just one other transaction has rows of the table locked; [`Error::FullScan`]; [`Error::InvalidIdentifier`];
    /// [`Error::InvalidOption`], also for a view, for a value that is NULL and outside a transaction; [`Error::Database`].
    ///
    /// # Cancel safety
    /// The rows may or may not be locked, until the transaction ends; roll it back.
    pub async fn lock(self, conn: &mut impl AsConnection<DB>) -> Result<u64> {
        let least = self.least();
        let (table, rows) = self.select(conn.as_connection(), Columns::None).await?;
        if rows.len() < least {
            return Err(Error::NoSuchRow { table });
        }
        Ok(rows.len() as u64)
    }

    /// As [`lock`](Self::lock), and returns the rows. A lock that skips locked rows is contended when it finds none.
    pub(crate) async fn lock_and_fetch<T>(self, conn: &mut DB::Connection) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (least, skips, started) = (self.least(), self.skip_locked, Instant::now());
        let (table, rows) = self.select(conn, Columns::All).await?;
        if rows.is_empty() && skips {
            return Err(Error::Contended { key: table, waited: started.elapsed(), holder: None });
        }
        if rows.len() < least {
            return Err(Error::NoSuchRow { table });
        }
        rows.iter().map(|row| decode::<DB, T>(&table, row)).collect()
    }

    /// The least number of rows that must match. With a limit or a skip it is not an error that some are missing.
    fn least(&self) -> usize {
        let all = self.limit.is_none() && !self.skip_locked;
        if all { self.by.iter().map(|it| it.values).product() } else { 1 }
    }

    /// Locks one row and returns it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock); [`Error::Database`] too when the row does not fit `T`.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_one<T>(self, conn: &mut impl AsConnection<DB>) -> Result<T>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.limit(1).select(conn.as_connection(), Columns::All).await?;
        let row = rows.first().ok_or_else(|| Error::NoSuchRow { table: table.clone() })?;
        decode::<DB, T>(&table, row)
    }

    /// Locks one row, if there is one, and returns it.
    ///
    /// # Errors
    /// As [`fetch_one`](Self::fetch_one), but `None` when no row matches.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_optional<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Option<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.limit(1).select(conn.as_connection(), Columns::All).await?;
        rows.first().map(|row| decode::<DB, T>(&table, row)).transpose()
    }

    /// Locks all rows that match and returns them; none is not an error.
    ///
    /// # Errors
    /// As [`fetch_one`](Self::fetch_one), but an empty list when no row matches.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_all<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.select(conn.as_connection(), Columns::All).await?;
        rows.iter().map(|row| decode::<DB, T>(&table, row)).collect()
    }

    async fn select(self, conn: &mut DB::Connection, columns: Columns) -> Result<(Key, Vec<DB::Row>)> {
        let Self { table, by, mut order_by, values, limit, skip_locked, strength, wait, check } = self;
        let table = table?;
        if by.is_empty() && (order_by.is_empty() || limit.is_none() || !skip_locked) {
            return Err(no_values("by"));
        }
        let wait = wait.unwrap_or_default();
        wait.check()?;
        if depth::<DB>(conn).await? == 0 {
            let reason = "needs a transaction: outside of one the rows would be unlocked at once".to_owned();
            return Err(Error::InvalidOption { option: "row lock", reason });
        }
        if order_by.is_empty() {
            order_by.extend(by.iter().map(|it| it.column.clone()));
        }
        let key = Key::from(table.to_string());
        let query = RowQuery { table, by, order_by, limit, skip_locked, strength, wait, columns };
        let access = plan::access::<DB>(conn, &query, &values, &key, check).await?;
        let started = Instant::now();
        let taking = async {
            let again = values.clone();
            let mut locked = DB::row_lock(conn, &query, values, &access).await;
            if let Err(err) = &locked
                && DB::row_plan_is_old(err)
            {
                plan::forget::<DB>(&query, &again);
                let access = plan::access::<DB>(conn, &query, &again, &key, check).await?;
                locked = DB::row_lock(conn, &query, again, &access).await;
            }
            let err = match locked {
                Ok(rows) => return Ok(rows),
                Err(err) => err,
            };
            if DB::fault(&err) != Fault::Contended {
                return Err(failed::<DB>("locking rows of", Some(&key), err));
            }
            let waited = started.elapsed();
            let holder = holder::seen(DB::row_holder(conn, &key)).await;
            Err(Error::Contended { key: key.clone(), waited, holder })
        };
        let rows = observed(Strategy::Row, &key, taking).await?;
        Ok((key, rows))
    }

    /// A checked name, or the first failure kept for when the lock is asked for.
    fn ident(&mut self, name: &str) -> Option<Ident> {
        Ident::new(name).map_err(|err| self.fail(|| err)).ok()
    }

    fn fail(&mut self, err: impl FnOnce() -> Error) {
        if self.table.is_ok() {
            self.table = Err(err());
        }
    }
}

fn no_values(option: &'static str) -> Error {
    let reason =
        "names no row; give at least one column and value to lock by, or all of `order_by`, `limit` and `skip_locked` \
                  for the first rows of a queue"
            .to_owned();
    Error::InvalidOption { option, reason }
}

fn named_twice(column: &Ident) -> Error {
    let reason = format!(
        "names the column `{column}` twice, and no row has two values in one column; for rows that have one of several \
         values write `by_any(\"{column}\", …)`"
    );
    Error::InvalidOption { option: "by", reason }
}

fn decode<DB: RowOps, T: for<'r> FromRow<'r, DB::Row>>(table: &Key, row: &DB::Row) -> Result<T> {
    T::from_row(row).map_err(|err| failed::<DB>("reading the locked row of", Some(table), err))
}

impl<DB: Database> fmt::Debug for RowLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowLock")
            .field("table", &self.table)
            .field("by", &self.by)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}
