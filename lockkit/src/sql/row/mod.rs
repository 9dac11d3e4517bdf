//! Row locks: `SELECT … FOR UPDATE` on the caller's own rows. The server bounds the wait, and a lock that would scan
//! the table is refused.
//!
//! A queue without `by` needs all of `order_by`, `limit` and `skip_locked`. Without the limit the lock takes the whole
//! table, without `skip_locked` the workers wait in single file, and without an order the selected rows are undefined.
//! A view is refused because it has no indexes: the advice to create one would be wrong. NULL in `by` is an error
//! because an `Option` that happens to be `None` would look like a missing row.

pub(crate) mod ops;
pub(crate) mod plan;

pub use self::plan::PlanCheck;

use std::fmt;

use sqlx::{Database, Encode, FromRow, Type};
use tokio::time::Instant;

use crate::{
    observe::{Strategy, observed},
    policy::Wait,
    sql::{
        Access, AsConnection, By, Columns, RowOps, RowQuery, Strength, Values, failed, holder,
        ident::{Ident, TableName},
        in_transaction, note_answer, still_in_transaction,
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// Locks rows of your table for the rest of a transaction.
///
/// Use it for read-check-write on rows that exist. When the row does not exist yet, use
/// [`NamedLock`](crate::NamedLock); when the work calls other services, a [lease](crate::Leases); when conflicts are
/// rare, [`VersionedRow`](crate::VersionedRow).
///
/// | database | lock | bounded wait |
/// |---|---|---|
/// | PostgreSQL | `FOR NO KEY UPDATE`: blocks writers, but not inserts that only reference the row by a foreign key | `lock_timeout` for this statement alone |
/// | MySQL | `FOR UPDATE` | `MAX_EXECUTION_TIME` for this statement alone |
/// | MariaDB | `FOR UPDATE` | `max_statement_time` for this statement alone |
/// | SQLite | the write lock of the whole database, as `BEGIN IMMEDIATE` takes it; there are no row locks | busy timeout |
///
/// One round trip on every server, bounded or not. On PostgreSQL the bound applies to each locked row separately; on
/// the other databases it applies to all rows together. On SQLite `begin` waits for the write lock. A bounded lock in
/// any other SQLite transaction changes the connection's busy timeout while it runs, so do not drop its future early.
///
/// **Lock first, then read**, in a transaction from [`begin`](crate::begin). That transaction is READ COMMITTED, so
/// reads after the lock see the commits of the previous holder. A transaction that sqlx began on MySQL or MariaDB is
/// REPEATABLE READ unless set otherwise. If it has read before, plain reads after the lock return rows from before that
/// commit. Only the rows that [`fetch_one`](Self::fetch_one) and the like return with the lock are current.
///
/// **The plan check.** Without an index on the columns, InnoDB locks every row of the table and PostgreSQL reads the
/// whole table. Before a statement runs for the first time, lockkit requests its plan (one extra
/// statement, up to five) and refuses a scan with [`Error::FullScan`]. The process remembers the statements that
/// passed. SQLite refuses scans too, so tests on SQLite also detect a missing index. On MySQL and MariaDB the lock then
/// names the indexes to use, because the optimizer would scan a small table. A partial index (`WHERE state = 'ready'`)
/// serves if it contains all rows that `by` selects.
///
/// A view has no rows of its own to lock, so it is refused with [`Error::InvalidOption`]. MySQL and MariaDB lock
/// through a view that they merge into the query.
///
/// **A job queue** needs no column to select by. `order_by`, `limit` and `skip_locked` together take the first rows
/// that are not locked, if an index has that order:
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
/// **After an error** roll the transaction back. PostgreSQL refuses every further statement in it. On MySQL or MariaDB
/// the transaction may be gone (deadlock) or half done. [`Tx::commit`](crate::Tx::commit) refuses such a transaction
/// where the database reports it.
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
///     .fetch_one(&mut tx)
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
    /// Selects rows of this table. Write the name as the database stores it (letters, digits, `_`), with its schema if
    /// that is not the connection's: `"app.items"`. The schema is a database on MySQL and MariaDB, and an attached file
    /// on SQLite.
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

    /// Selects rows whose column has this value. Call it once for every column of a composite key. The same column
    /// twice is an error. `None` is an error too: NULL equals nothing in SQL, so no row would ever match.
    pub fn by<'v, T>(self, column: &str, value: T) -> Self
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        self.by_values("by", column, [value])
    }

    /// Selects rows whose column has one of these values. The rows are locked in the order of the column, not of the
    /// values, so two transactions that lock the same rows cannot deadlock.
    ///
    /// [`lock`](Self::lock) fails with [`Error::NoSuchRow`] when a value of a unique column has no row. It compares the
    /// number of rows.
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

    /// Locks in the order of this column. Call it again for more columns. Defaults to the order of the columns of `by`.
    ///
    /// Set it where `by` matches many rows and the lock waits: two transactions that lock rows in different orders can
    /// deadlock. MySQL and MariaDB lock rows as they read them, so there an index must deliver this order, after the
    /// columns of `by`.
    pub fn order_by(mut self, column: &str) -> Self {
        let column = self.ident(column);
        self.order_by.extend(column);
        self
    }

    /// Locks at most this many rows. On MySQL and MariaDB an index must deliver the order. Where they have to sort,
    /// they lock every matching row before they apply the limit.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = Some(rows);
        self
    }

    /// Skips rows that another transaction has locked, as a job queue does. On SQLite no row is skipped.
    pub fn skip_locked(mut self) -> Self {
        self.skip_locked = true;
        self
    }

    /// Lets other transactions read and share the rows, but not write them. The default lock blocks other writers and
    /// other locks of its kind.
    pub fn share(mut self) -> Self {
        self.strength = Strength::Share;
        self
    }

    /// Takes the strongest lock: for deleting rows or changing their key. Differs from the default on PostgreSQL only.
    pub fn for_key_change(mut self) -> Self {
        self.strength = Strength::KeyChange;
        self
    }

    /// Longest wait for locked rows. Defaults to [`Wait::DEFAULT`], 10 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = Some(wait.into());
        self
    }

    /// Sets what happens when the lock would scan the table. Defaults to [`PlanCheck::Deny`].
    pub fn check_plan(mut self, check: PlanCheck) -> Self {
        self.check = check;
        self
    }

    /// This lock, with its wait limited to the time left until a deadline.
    pub(crate) fn until(mut self, deadline: Option<Instant>) -> Self {
        self.wait = Some(Wait::within(self.wait, deadline.map(|it| it.saturating_duration_since(Instant::now()))));
        self
    }

    pub(crate) fn bound(&self) -> Option<Wait> {
        self.wait
    }

    /// Locks the rows and returns their number.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`] when no row matches, or a value of [`by_any`](Self::by_any) has no row;
    /// [`Error::Contended`] after the wait; [`Error::FullScan`]; [`Error::InvalidIdentifier`];
    /// [`Error::InvalidOption`], also for a view, for a NULL value and outside a transaction; [`Error::Database`].
    ///
    /// [`Error::Contended`] names the holder on MySQL, and on PostgreSQL under `#[with_lock]`, if exactly one other
    /// transaction has rows of the table locked.
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the rows; roll it back.
    pub async fn lock(self, conn: &mut impl AsConnection<DB>) -> Result<u64> {
        let least = self.least();
        let (table, rows) = self.select(conn, Columns::None).await?;
        if rows.len() < least {
            return Err(Error::NoSuchRow { table });
        }
        Ok(rows.len() as u64)
    }

    /// As [`lock`](Self::lock), and returns the rows. A lock that skips locked rows is contended when it finds no row.
    pub(crate) async fn lock_and_fetch<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Vec<T>>
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

    /// The least number of rows that must match. With a limit or a skip, missing rows are not an error.
    fn least(&self) -> usize {
        let all = self.limit.is_none() && !self.skip_locked;
        if all { self.by.iter().map(|it| it.values).product() } else { 1 }
    }

    /// Locks one row and returns it.
    ///
    /// # Errors
    /// The errors of [`lock`](Self::lock); [`Error::Database`] too when the row does not fit `T`.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_one<T>(self, conn: &mut impl AsConnection<DB>) -> Result<T>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.limit(1).select(conn, Columns::All).await?;
        let row = rows.first().ok_or_else(|| Error::NoSuchRow { table: table.clone() })?;
        decode::<DB, T>(&table, row)
    }

    /// Locks one row and returns it, or `None` when no row matches.
    ///
    /// # Errors
    /// The errors of [`fetch_one`](Self::fetch_one), except that a missing row is `None`.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_optional<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Option<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.limit(1).select(conn, Columns::All).await?;
        rows.first().map(|row| decode::<DB, T>(&table, row)).transpose()
    }

    /// Locks all rows that match and returns them.
    ///
    /// # Errors
    /// The errors of [`fetch_one`](Self::fetch_one), except that no match is an empty list.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn fetch_all<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (table, rows) = self.select(conn, Columns::All).await?;
        rows.iter().map(|row| decode::<DB, T>(&table, row)).collect()
    }

    async fn select(self, conn: &mut impl AsConnection<DB>, columns: Columns) -> Result<(Key, Vec<DB::Row>)> {
        let Self { table, by, mut order_by, values, limit, skip_locked, strength, wait, check } = self;
        let table = table?;
        if by.is_empty() && (order_by.is_empty() || limit.is_none() || !skip_locked) {
            return Err(no_values("by"));
        }
        let wait = wait.unwrap_or_default();
        wait.check()?;
        if order_by.is_empty() {
            order_by.extend(by.iter().map(|it| it.column.clone()));
        }
        let key = Key::from(table.to_string());
        let query = RowQuery { table, by, order_by, limit, skip_locked, strength, wait, columns };
        let is_begun = conn.is_begun();
        // A transaction of `begin` already has the write lock, except that of a file attached later.
        let has_lock = is_begun && DB::ONE_WRITER && query.table.schema().is_none();
        let query = RowQuery { wait: if has_lock { Wait::Unbounded } else { wait }, ..query };
        let access = access(conn.for_query(), is_begun, &query, &values, &key, check).await;
        let access = note_answer(conn, access)?;
        let started = Instant::now();
        let taking = async {
            let locked = locked(conn.for_query(), &query, values, &access, &key, check).await;
            if let Some(rows) = note_answer(conn, locked)? {
                return Ok(rows);
            }
            let waited = started.elapsed();
            let holder = holder::seen(conn, async |conn| DB::row_holder(conn, &key).await).await;
            Err(Error::Contended { key: key.clone(), waited, holder })
        };
        let rows = observed(Strategy::Row, &key, taking).await?;
        conn.locked("row lock of", &key);
        Ok((key, rows))
    }

    /// Checks a name. Keeps the first failure, which is returned when the lock is taken.
    fn ident(&mut self, name: &str) -> Option<Ident> {
        Ident::new(name).map_err(|err| self.fail(|| err)).ok()
    }

    fn fail(&mut self, err: impl FnOnce() -> Error) {
        if self.table.is_ok() {
            self.table = Err(err());
        }
    }
}

/// The access path of the rows, which lie inside the transaction of the connection.
async fn access<DB: RowOps>(
    conn: &mut DB::Connection,
    is_begun: bool,
    query: &RowQuery,
    values: &Values<DB>,
    key: &Key,
    check: PlanCheck,
) -> Result<Access> {
    in_transaction::<DB>(conn, is_begun, "row lock", OUTSIDE).await?;
    plan::access::<DB>(conn, query, values, key, check).await
}

/// Locks the rows. `None` when others hold them to the end of the wait.
async fn locked<DB: RowOps>(
    conn: &mut DB::Connection,
    query: &RowQuery,
    values: Values<DB>,
    access: &Access,
    key: &Key,
    check: PlanCheck,
) -> Result<Option<Vec<DB::Row>>> {
    let again = values.clone();
    let mut locked = DB::row_lock(conn, query, values, access).await;
    if let Err(err) = &locked
        && DB::row_plan_is_old(err)
    {
        plan::forget::<DB>(query, &again);
        let access = plan::access::<DB>(conn, query, &again, key, check).await?;
        locked = Box::pin(DB::row_lock(conn, query, again, &access)).await;
    }
    match locked {
        Ok(rows) => still_in_transaction::<DB>(conn, "row lock", OUTSIDE).map(|()| Some(rows)),
        Err(err) if DB::fault(&err) == Fault::Contended => Ok(None),
        Err(err) => Err(failed::<DB>("locking rows of", Some(key), err)),
    }
}

const OUTSIDE: &str = "needs a transaction: outside of one the rows would be unlocked at once";

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
