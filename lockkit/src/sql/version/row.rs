//! Reads a row with its version, and updates the version explicitly.

use std::{fmt, ops::Deref};

use sqlx::{Database, Encode, FromRow, Type};

use crate::{
    retry::context,
    sql::{
        AsConnection, By, Values, VersionOps, VersionQuery,
        conn::{Finish, On},
        depth, failed,
        ident::{Ident, TableName},
        note_answer,
        version::{
            bump::{Bumped, Expected},
            contention::{conflict, row_of, stand_back},
        },
    },
    value::{
        error::{Error, Result},
        key::Key,
        version::{Row, Version},
    },
};

/// A row together with the version that it had when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Versioned<T> {
    /// The row.
    pub row: T,
    /// Its version.
    pub version: Version,
}

impl<T> Deref for Versioned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.row
    }
}

/// Reads a row with its version, and later replaces the version if it is still the same.
///
/// The version column may be an integer or a timestamp. An integer counts up. A timestamp is set to the database's
/// current time and always increases, at the precision of the column.
///
/// Use it where conflicts are rare and reads dominate; on a hot row [`RowLock`](crate::RowLock) wastes less work. It
/// locks nothing between the read and the write. Retry conflicts with [`RetryPolicy::retry`](crate::RetryPolicy::retry)
/// or `#[with_lock(version, …)]`, each attempt in its own transaction: inside one REPEATABLE READ transaction every
/// read would return the old version again.
///
/// # Example
/// ```
/// use lockkit::{Versioned, VersionedRow};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1)").execute(&pool).await?;
/// #[derive(sqlx::FromRow)]
/// struct Item {
///     stock: i64,
/// }
/// let item = || VersionedRow::table("t_items").by("item_id", 7).version("version");
///
/// let mut tx = lockkit::begin(&pool).await?;
/// let found: Versioned<Item> = item().read(&mut *tx).await?;
/// item().expected(found.version.clone()).bump(&mut *tx).await?; // Err(Conflict) if another writer was faster
/// sqlx::query("UPDATE t_items SET stock = ? WHERE item_id = 7").bind(found.stock - 1).execute(&mut *tx).await?;
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[must_use = "a versioned row does nothing until `read`, `bump` or `delete` is awaited"]
pub struct VersionedRow<DB: Database> {
    table: Result<TableName>,
    by: Vec<By>,
    values: Values<DB>,
    version: Option<Ident>,
    expected: Option<Expected>,
}

impl<DB: VersionOps> VersionedRow<DB> {
    /// Selects a row of this table. Write the name as the database stores it (letters, digits, `_`), with its schema if
    /// that is not the connection's: `"app.items"`.
    pub fn table(name: &str) -> Self {
        Self { table: TableName::new(name), by: Vec::new(), values: Values::new(), version: None, expected: None }
    }

    /// Selects the row whose column has this value. Call it once for every column of a composite key. The same column
    /// twice is an error. `None` is an error too: NULL equals nothing in SQL, so no row would ever match.
    pub fn by<'v, T>(mut self, column: &str, value: T) -> Self
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        let added = Ident::new(column).and_then(|column| {
            self.values.add_compared("by", &column, value)?;
            Ok(column)
        });
        match added {
            Ok(column) if self.by.iter().any(|it| it.column == column) => {
                let reason = format!("names the column `{column}` twice, and no row has two values in one column");
                self.fail(Error::InvalidOption { option: "by", reason });
            }
            Ok(column) => self.by.push(By { column, values: 1 }),
            Err(err) => self.fail(err),
        }
        self
    }

    /// Names the column of the version: an integer or a timestamp. Defaults to `version`.
    pub fn version(mut self, column: &str) -> Self {
        match Ident::new(column) {
            Ok(column) => self.version = Some(column),
            Err(err) => self.fail(err),
        }
        self
    }

    /// Sets the version that [`bump`](Self::bump) expects: the version that was read, or the result of the previous
    /// bump in the same transaction.
    pub fn expected(mut self, version: impl Into<Expected>) -> Self {
        self.expected = Some(version.into());
        self
    }

    /// Reads the row and its version, without locking anything.
    ///
    /// In a transaction that has already changed the row, this returns the version of that change. No database reports
    /// that the version is not committed yet, so do not use it after the transaction.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`]; [`Error::InvalidIdentifier`]; [`Error::InvalidOption`]; [`Error::Database`], also when the
    /// row does not fit `T`, or its version is NULL or neither an integer nor a timestamp. [`Error::Conflict`] in an
    /// attempt of a retry, where the retry first waits for its turn: [`RetryPolicy::retry`](crate::RetryPolicy::retry).
    ///
    /// # Cancel safety
    /// Cancel safe: this only reads.
    pub async fn read<T>(self, conn: &mut impl AsConnection<DB>) -> Result<Versioned<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let read = self.read_on(conn.for_query(), true).await;
        note_answer(conn, read)
    }

    /// On the caller's connection, the attempt of a retry may have to wait for its turn first.
    async fn read_on<T>(self, conn: &mut DB::Connection, is_the_callers: bool) -> Result<Versioned<T>>
    where
        T: for<'r> FromRow<'r, DB::Row>,
    {
        let (query, table, values, _) = self.query()?;
        let doing = "reading the version of a row of";
        if is_the_callers {
            stand_back(&query, &table, &values)?;
        }
        let found = DB::version_read(conn, &query, values).await;
        let found = found.map_err(|err| failed::<DB>(doing, Some(&table), err))?;
        let Some((row, version)) = found else {
            return Err(Error::NoSuchRow { table });
        };
        let row = T::from_row(&row).map_err(|err| failed::<DB>(doing, Some(&table), err))?;
        Ok(Versioned { row, version })
    }

    /// Replaces the expected version by its successor, if the row still has it. Inside a transaction the row is locked
    /// from then on, so write the other columns in the same transaction.
    ///
    /// The result has the new version. Use that version elsewhere only once it is committed: see [`Bumped`].
    ///
    /// # Errors
    /// [`Error::Conflict`] when the row has another version, or does not exist (`found` is `None` then);
    /// [`Error::InvalidOption`] without [`expected`](Self::expected), for a [`Bumped`] of a transaction that has ended,
    /// and for a timestamp outside a transaction; [`Error::InvalidIdentifier`]; [`Error::Database`], also when the
    /// version is NULL.
    ///
    /// # Cancel safety
    /// Outside a transaction the version may or may not have been replaced.
    pub async fn bump(self, conn: &mut impl AsConnection<DB>) -> Result<Bumped> {
        let bumped = self.bump_on(conn.for_query()).await;
        note_answer(conn, bumped)
    }

    async fn bump_on(self, conn: &mut DB::Connection) -> Result<Bumped> {
        let (query, table, values, expected) = self.query()?;
        let Some(expected) = expected else {
            return Err(not_expected("bump"));
        };
        let depth = depth::<DB>(conn).await?;
        let expected = expected.at(depth)?;
        if matches!(expected, Version::Timestamp(_)) && depth == 0 {
            let reason =
                "of a timestamp needs a transaction: MySQL returns the new value in a second statement".to_owned();
            return Err(Error::InvalidOption { option: "bump", reason });
        }
        let doing = "moving the version of a row of";
        let again = values.clone();
        let bumped = DB::version_bump(conn, &query, values, &expected).await;
        if let Some(version) = bumped.map_err(|err| failed::<DB>(doing, Some(&table), err))? {
            return Ok(Bumped::new(version, depth));
        }
        Err(conflict::<DB>(conn, &query, again, &table, expected, doing).await)
    }

    /// Deletes the row if it still has the expected version, in one statement.
    ///
    /// Inside a transaction the deletion becomes visible to others with the commit; a rollback undoes it.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the row has another version, or does not exist (`found` is `None` then);
    /// [`Error::InvalidOption`] without [`expected`](Self::expected), and for a [`Bumped`] of a transaction that has
    /// ended; [`Error::InvalidIdentifier`]; [`Error::Database`].
    ///
    /// # Cancel safety
    /// Outside a transaction the row may or may not have been deleted.
    ///
    /// # Example
    /// ```
    /// use lockkit::{Versioned, VersionedRow};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
    /// # sqlx::query("CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
    /// # sqlx::query("INSERT INTO t_items VALUES (7, 0, 1)").execute(&pool).await?;
    /// let item = || VersionedRow::table("t_items").by("item_id", 7);
    /// let mut conn = pool.acquire().await?;
    /// let found: Versioned<(i64, i64, i64)> = item().read(&mut conn).await?;
    /// if found.row.1 == 0 {
    ///     item().expected(found.version).delete(&mut conn).await?; // Err(Conflict) if another writer has put some in
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn delete(self, conn: &mut impl AsConnection<DB>) -> Result<()> {
        let deleted = self.delete_on(conn.for_query()).await;
        note_answer(conn, deleted)
    }

    async fn delete_on(self, conn: &mut DB::Connection) -> Result<()> {
        let (query, table, values, expected) = self.query()?;
        let Some(expected) = expected else {
            return Err(not_expected("delete"));
        };
        let expected = expected.at(depth::<DB>(conn).await?)?;
        delete_row::<DB>(conn, &query, &table, values, expected).await
    }

    fn query(self) -> Result<(VersionQuery, Key, Values<DB>, Option<Expected>)> {
        let Self { table, by, values, version, expected } = self;
        let table = table?;
        if by.is_empty() {
            let reason = "names no row; give at least one column and value".to_owned();
            return Err(Error::InvalidOption { option: "by", reason });
        }
        let version = version.map_or_else(|| Ident::new("version"), Ok)?;
        let key = Key::from(table.to_string());
        Ok((VersionQuery { table, by, version }, key, values, expected))
    }

    /// The row that it selects. `None` where reading it is an error.
    pub(crate) fn which(&self) -> Option<Row> {
        let (table, version) = (self.table.as_ref().ok()?.clone(), Ident::new("version").ok()?);
        Some(row_of(&VersionQuery { table, by: self.by.clone(), version }, &self.values))
    }

    fn fail(&mut self, err: Error) {
        if self.table.is_ok() {
            self.table = Err(err);
        }
    }
}

fn not_expected(caller: &str) -> Error {
    let reason = format!("was not called; `{caller}` needs the version that was read");
    Error::InvalidOption { option: "expected", reason }
}

/// Deletes the row if it has the expected version.
pub(crate) async fn delete_row<DB: VersionOps>(
    conn: &mut DB::Connection,
    query: &VersionQuery,
    table: &Key,
    values: Values<DB>,
    expected: Version,
) -> Result<()> {
    let doing = "deleting a row of";
    let again = values.clone();
    let deleted = DB::version_delete(conn, query, values, &expected).await;
    if deleted.map_err(|err| failed::<DB>(doing, Some(table), err))? {
        return Ok(());
    }
    Err(conflict::<DB>(conn, query, again, table, expected, doing).await)
}

/// Reads the row like [`VersionedRow::read`], but also accepts a pool.
///
/// # Errors
/// The errors of [`VersionedRow::read`].
pub async fn load<DB, T, O>(on: O, row: VersionedRow<DB>) -> Result<T>
where
    DB: VersionOps,
    T: for<'r> FromRow<'r, DB::Row>,
    O: On<DB>,
{
    if O::IS_POOL {
        context::turn(|| row.which()).await;
    }
    let mut conn = on.reach("reading the version of a row of").await?;
    let found = row.read_on(&mut conn, !O::IS_POOL).await;
    conn.finish();
    found.map(|it| it.row)
}

impl<DB: Database> fmt::Debug for VersionedRow<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VersionedRow")
            .field("table", &self.table)
            .field("by", &self.by)
            .field("version", &self.version)
            .field("expected", &self.expected)
            .finish_non_exhaustive()
    }
}
