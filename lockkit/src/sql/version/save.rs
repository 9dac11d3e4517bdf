//! Saves structs. The version in memory changes once the database has committed the new one.
//!
//! `save` writes every column but the key, so one statement per struct serves every save, and the server and sqlx
//! prepare it once. Since the version always changes, it makes no difference whether MySQL counts matched or changed
//! rows.
//!
//! A version made in a transaction reaches the struct in `Saved::commit`, after COMMIT was answered. This is sound: a
//! rollback consumes the transaction, so one that can still be committed has not been rolled back, and writes at its
//! outermost level are undone only with all of it. Writes in a nested transaction may have been undone alone, so
//! `commit` refuses them. `delete` makes no version, and so returns nothing in a transaction.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    ops::{Deref, DerefMut},
};

use sqlx::Database;

use crate::{
    sql::{
        By, SaveQuery, Values, VersionOps, VersionQuery,
        conn::{Finish, On},
        depth, failed,
        ident::{Ident, TableName},
        tx::AnyTx,
        version::{
            bump::{self, Made},
            contention::conflict,
            record::{Columns, VersionField, VersionedStruct},
            row::delete_row,
        },
    },
    value::{
        error::{Error, Result},
        key::Key,
        version::Version,
    },
};

/// A struct that was saved and whose new version may not be committed yet.
///
/// A save on `&pool` returns no `Saved`: it is committed, and the struct has its new version. After a save on a
/// connection outside a transaction the struct has its new version too; drop the `Saved` then. Inside a transaction the
/// struct keeps the committed version, and gets the new one from [`commit`](Self::commit). If the transaction ends in
/// any other way, the struct keeps its version: it can be saved again after a rollback, and the next save is a conflict
/// after a commit by other code. No write of another transaction is overwritten.
///
/// If other code commits the transaction, as under `#[with_lock(version, tx = tx)]`, and the struct is not used
/// afterwards, write `let _ = item.save(&mut *tx).await?;`.
///
/// The struct is borrowed until then. It can be changed and saved again through the `Saved`.
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1), (8, 5, 1)").execute(&pool).await?;
/// #[derive(sqlx::FromRow, lockkit::Versioned)]
/// #[versioned(table = "t_items", key = "item_id")]
/// struct Item {
///     item_id: i64,
///     stock: i64,
///     version: i64,
/// }
///
/// let (mut from, mut to) = (Item::load(&pool, 7).await?, Item::load(&pool, 8).await?);
/// from.stock -= 2;
/// to.stock += 2;
/// let mut tx = lockkit::begin(&pool).await?;
/// let saved = from.save(&mut *tx).await?.and(to.save(&mut *tx).await?);
/// saved.commit(tx).await?;
/// assert_eq!((from.version, to.version), (2, 2));
/// # Ok(()) }
/// ```
#[must_use = "in a transaction the struct keeps its old version, and its next save is a conflict, unless this commits: \
              write `item.save(&mut *tx).await?.commit(tx).await?`; or `let _ = item.save(&mut *tx).await?` where the \
              transaction is committed elsewhere and the struct is not used after it"]
pub struct Saved<'a, DB: Database, T> {
    row: &'a mut T,
    /// The new version, until the struct has it.
    pending: Option<Pending<T>>,
    also: Vec<Box<dyn Settle + 'a>>,
    database: PhantomData<fn() -> DB>,
}

struct Pending<T> {
    number: i64,
    made: Made,
    /// Sets the new version on the struct.
    settle: fn(&mut T, i64),
}

impl<'a, DB: VersionOps, T> Saved<'a, DB, T> {
    /// Saves the struct again in the same transaction, like [`VersionedStruct::save`].
    ///
    /// # Errors
    /// The errors of [`VersionedStruct::save`]. [`Error::InvalidOption`] when the transaction of the save, or a nested
    /// one, has ended.
    ///
    /// # Cancel safety
    /// As [`VersionedStruct::save`].
    pub async fn save(self, on: impl On<DB>) -> Result<Self>
    where
        T: VersionedStruct<DB> + Send,
    {
        let (expected, made) = self.expected();
        let Self { row, also, .. } = self;
        Ok(Self { also, ..write(row, expected, made, on).await? })
    }

    /// Deletes the row of the struct in the same transaction, like [`VersionedStruct::delete`]. The result then only
    /// commits the structs that were added with [`and`](Self::and).
    ///
    /// # Errors
    /// The errors of [`VersionedStruct::delete`]. [`Error::InvalidOption`] when the transaction of the save, or a
    /// nested one, has ended.
    ///
    /// # Cancel safety
    /// As [`VersionedStruct::delete`].
    pub async fn delete(self, on: impl On<DB>) -> Result<Self>
    where
        T: VersionedStruct<DB> + Send,
    {
        let (expected, made) = self.expected();
        let which = Which::new(&*self.row)?;
        which.delete(expected, made, on).await?;
        Ok(Self { pending: None, ..self })
    }

    /// The version that the row has in this transaction, and the depth at which it was made.
    fn expected(&self) -> (i64, Made)
    where
        T: VersionedStruct<DB>,
    {
        match &self.pending {
            Some(Pending { number, made, .. }) => (*number, *made),
            None => (self.row.version().number(), Made { depth: 0 }),
        }
    }

    /// Combines this save with another one, to commit both together.
    #[must_use = "the structs do not have their new versions until `commit` is awaited"]
    pub fn and<U: Send>(mut self, other: Saved<'a, DB, U>) -> Self {
        self.also.push(Box::new(other));
        self
    }

    /// Commits the transaction of the save, and sets the new version on the struct once the commit has succeeded.
    ///
    /// # Errors
    /// The errors of [`Tx::commit`](crate::Tx::commit). [`Error::InvalidOption`] when the struct was saved in a nested
    /// transaction, which may have been rolled back on its own; the whole transaction is rolled back then. In that case
    /// load the struct again after the commit instead. The struct keeps its version after an error.
    ///
    /// # Cancel safety
    /// As [`Tx::commit`](crate::Tx::commit). The struct keeps its version.
    pub async fn commit(self, tx: impl AnyTx<DB>) -> Result<()>
    where
        T: Send,
    {
        let saves: Box<dyn Settle + 'a> = Box::new(self);
        let mut made = Vec::new();
        saves.made(&mut made);
        bump::commit(&made, tx).await?;
        saves.settle();
        Ok(())
    }
}

/// Operations on saves of structs of any type.
trait Settle: Send {
    /// Lists the transaction depths at which the versions were made.
    fn made(&self, list: &mut Vec<Made>);

    /// Sets the new versions on the structs.
    fn settle(self: Box<Self>);
}

impl<DB: Database, T: Send> Settle for Saved<'_, DB, T> {
    fn made(&self, list: &mut Vec<Made>) {
        list.extend(self.pending.as_ref().map(|it| it.made));
        for other in &self.also {
            other.made(list);
        }
    }

    fn settle(self: Box<Self>) {
        let Self { row, pending, also, .. } = *self;
        if let Some(Pending { number, settle, .. }) = pending {
            settle(row, number);
        }
        for other in also {
            other.settle();
        }
    }
}

/// Saves a struct whose version is committed.
pub(crate) async fn save<DB, T, O>(row: &mut T, on: O) -> Result<O::Written<Saved<'_, DB, T>>>
where
    DB: VersionOps,
    T: VersionedStruct<DB> + Send,
    O: On<DB>,
{
    let expected = row.version().number();
    Ok(O::written(write(row, expected, Made { depth: 0 }, on).await?))
}

/// Deletes the row of a struct whose version is committed.
pub(crate) fn delete<DB, T>(row: &T, on: impl On<DB>) -> impl Future<Output = Result<()>> + Send
where
    DB: VersionOps,
    T: VersionedStruct<DB>,
{
    // The task that runs this must not hold a reference to the struct.
    let (which, expected) = (Which::new(row), row.version().number());
    async move { which?.delete(expected, Made { depth: 0 }, on).await }
}

async fn write<DB, T>(row: &mut T, expected: i64, made: Made, on: impl On<DB>) -> Result<Saved<'_, DB, T>>
where
    DB: VersionOps,
    T: VersionedStruct<DB> + Send,
{
    let next = expected.checked_add(1).filter(|it| T::Version::from_number(*it).is_some());
    let Some(next) = next else {
        let reason = format!("is {expected}, and its type has no room for a higher one");
        return Err(Error::InvalidOption { option: "version", reason });
    };
    let save = Statement::new(row)?;
    let doing = "saving a row of";
    let mut conn = on.reach(doing).await?;
    let depth = depth::<DB>(&mut conn).await?;
    if let Err(err) = made.check_open(depth) {
        conn.finish();
        return Err(err);
    }
    let written = save.run(&mut conn, expected, doing).await;
    conn.finish();
    written?;
    let pending = Pending { number: next, made: Made { depth }, settle: set_version::<DB, T> };
    let pending = if pending.made.is_committed() {
        set_version::<DB, T>(row, next);
        None
    } else {
        Some(pending)
    };
    Ok(Saved { row, pending, also: Vec::new(), database: PhantomData })
}

fn set_version<DB: VersionOps, T: VersionedStruct<DB>>(row: &mut T, number: i64) {
    if let Some(version) = T::Version::from_number(number) {
        *row.version_mut() = version;
    }
}

/// The table and key that identify the row of a struct.
struct Which<DB: Database> {
    key: Key,
    query: VersionQuery,
    values: Values<DB>,
}

impl<DB: VersionOps> Which<DB> {
    fn new<T: VersionedStruct<DB>>(row: &T) -> Result<Self> {
        let (table, version) = (TableName::new(T::TABLE)?, Ident::new(T::VERSION)?);
        let mut columns = Columns::<DB>::of_key();
        row.key(&mut columns);
        let Columns { names, values, .. } = columns.checked()?;
        if names.is_empty() {
            let reason = "names no row; add at least one column".to_owned();
            return Err(Error::InvalidOption { option: "key", reason });
        }
        let by = names.into_iter().map(|column| By { column, values: 1 }).collect();
        Ok(Self { key: Key::from(table.to_string()), query: VersionQuery { table, by, version }, values })
    }

    async fn delete(self, expected: i64, made: Made, on: impl On<DB>) -> Result<()> {
        let Self { key, query, values } = self;
        let mut conn = on.reach("deleting a row of").await?;
        let depth = depth::<DB>(&mut conn).await?;
        let deleted = match made.check_open(depth) {
            Ok(()) => delete_row::<DB>(&mut conn, &query, &key, values, Version::Number(expected)).await,
            Err(err) => Err(err),
        };
        conn.finish();
        deleted
    }
}

/// The statement and values that save a struct.
struct Statement<DB: Database> {
    key: Key,
    query: SaveQuery,
    /// The values of the columns, then the values of the key.
    values: Values<DB>,
    /// The values of the key.
    which: Values<DB>,
}

impl<DB: VersionOps> Statement<DB> {
    fn new<T: VersionedStruct<DB>>(row: &T) -> Result<Self> {
        let Which { key, query, values: which } = Which::new(row)?;
        let mut columns = Columns::<DB>::new();
        row.values(&mut columns);
        let count = columns.names.len();
        row.key(&mut columns);
        let Columns { names: mut columns, values, .. } = columns.checked()?;
        columns.truncate(count);
        Ok(Self { key, query: SaveQuery { row: query, columns }, values, which })
    }

    async fn run(self, conn: &mut DB::Connection, expected: i64, doing: &'static str) -> Result<()> {
        let Self { key, query, values, which } = self;
        let saved = DB::version_save(conn, &query, values, expected).await;
        if saved.map_err(|err| failed::<DB>(doing, Some(&key), err))? {
            return Ok(());
        }
        Err(conflict::<DB>(conn, &query.row, which, &key, Version::Number(expected), doing).await)
    }
}

impl<DB: Database, T> Deref for Saved<'_, DB, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.row
    }
}

impl<DB: Database, T> DerefMut for Saved<'_, DB, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.row
    }
}

impl<DB: Database, T> fmt::Debug for Saved<'_, DB, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pending = self.pending.as_ref().map(|it| it.number);
        f.debug_struct("Saved").field("pending", &pending).field("also", &self.also.len()).finish_non_exhaustive()
    }
}
