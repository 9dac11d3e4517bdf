//! Saves of structs. The version in memory moves on when the database has committed it.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    ops::{Deref, DerefMut},
};

use sqlx::Database;

use crate::{
    error::{Error, Raced, Result},
    key::Key,
    sql::{
        By, SaveQuery, Values, VersionOps, VersionQuery,
        conn::{Finish, On},
        depth, failed,
        ident::{Ident, TableName},
        tx::AnyTx,
        version::{
            bump::{self, Made},
            record::{Columns, VersionField, VersionedStruct},
            row::delete_row,
        },
    },
    version::Version,
};

/// A struct that was saved.
///
/// A save on `&pool` has none: it is committed, and the struct has its new version. The same holds for a save on a
/// connection outside a transaction; drop this then. Inside a transaction the struct still has the version that is
/// committed, and gets the new one from [`commit`](Self::commit). If the transaction ends in any other way, the
/// struct keeps its version: after a rollback it can be saved again, and after a commit without this the next save is
/// a conflict. No write of another transaction is overwritten.
///
/// Where other code commits the transaction, as under `#[with_lock(version, tx = tx)]`, and the struct is not used
/// after that, write `let _ = item.save(&mut *tx).await?;`.
///
/// The struct is borrowed until then, and can be changed and saved again through this.
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
#[must_use = "in a transaction the struct keeps its old version, and its next save is a conflict, unless this commits: write \
              `item.save(&mut *tx).await?.commit(tx).await?`; or `let _ = item.save(&mut *tx).await?` where the transaction \
              is committed elsewhere and the struct is not used after it"]
pub struct Saved<'a, DB: Database, T> {
    row: &'a mut T,
    /// The new version, while the struct does not have it.
    pending: Option<Pending<T>>,
    also: Vec<Box<dyn Settle + 'a>>,
    database: PhantomData<fn() -> DB>,
}

struct Pending<T> {
    number: i64,
    made: Made,
    /// Gives the struct its new version.
    settle: fn(&mut T, i64),
}

impl<'a, DB: VersionOps, T> Saved<'a, DB, T> {
    /// Saves the struct again in the same transaction, as [`VersionedStruct::save`] does.
    ///
    /// # Errors
    /// As those of [`VersionedStruct::save`]. [`Error::InvalidOption`] when the transaction that it was saved in, or a nested
    /// one, has ended.
    ///
    /// # Cancel safety
    /// As that of [`VersionedStruct::save`].
    pub async fn save(self, on: impl On<DB>) -> Result<Self>
    where
        T: VersionedStruct<DB> + Send,
    {
        let (expected, made) = self.expected();
        let Self { row, also, .. } = self;
        Ok(Self { also, ..write(row, expected, made, on).await? })
    }

    /// Deletes the row of the struct in the same transaction, as [`VersionedStruct::delete`] does. What is left to commit
    /// are the structs that were added by [`and`](Self::and).
    ///
    /// # Errors
    /// As those of [`VersionedStruct::delete`]. [`Error::InvalidOption`] when the transaction that it was saved in, or a
    /// nested one, has ended.
    ///
    /// # Cancel safety
    /// As that of [`VersionedStruct::delete`].
    pub async fn delete(self, on: impl On<DB>) -> Result<Self>
    where
        T: VersionedStruct<DB> + Send,
    {
        let (expected, made) = self.expected();
        let which = Which::new(&*self.row)?;
        which.delete(expected, made, on).await?;
        Ok(Self { pending: None, ..self })
    }

    /// The version that the row has in this transaction, and where it was made.
    fn expected(&self) -> (i64, Made)
    where
        T: VersionedStruct<DB>,
    {
        match &self.pending {
            Some(Pending { number, made, .. }) => (*number, *made),
            None => (self.row.version().number(), Made { depth: 0 }),
        }
    }

    /// This and another one, to be committed together.
    #[must_use = "the structs do not have their new versions until `commit` is awaited"]
    pub fn and<U: Send>(mut self, other: Saved<'a, DB, U>) -> Self {
        self.also.push(Box::new(other));
        self
    }

    /// Commits the transaction that the struct was saved in, and gives the struct its new version when that has succeeded.
    ///
    /// # Errors
    /// As those of [`Tx::commit`](crate::Tx::commit). [`Error::InvalidOption`] when it was saved in a nested transaction: that
    /// may have been rolled back by itself, so load the struct again after the commit instead. Everything is rolled back
    /// then. The struct keeps its version.
    ///
    /// # Cancel safety
    /// As that of [`Tx::commit`](crate::Tx::commit). The struct keeps its version.
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

/// What is done to saves of structs of any type.
trait Settle: Send {
    /// Lists how deep in transactions they were made.
    fn made(&self, list: &mut Vec<Made>);

    /// Gives the structs their new versions.
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
    // The task that runs this has to have no reference to the struct.
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
    let table = save.key.clone();
    let written = save.run(&mut conn, expected).await;
    conn.finish();
    match written.map_err(|err| failed::<DB>(doing, Some(&table), err))? {
        Ok(()) => {}
        Err(found) => {
            let expected = Some(Version::Number(expected));
            return Err(Error::Conflict { table: Some(table), expected, found, source: Raced });
        }
    }
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

/// Which row a struct is.
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

/// What is sent to save a struct.
struct Statement<DB: Database> {
    key: Key,
    query: SaveQuery,
    /// The values of the columns, then those of the key.
    values: Values<DB>,
    /// Those of the key.
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

    /// The inner error is the version that was found instead.
    async fn run(self, conn: &mut DB::Connection, expected: i64) -> sqlx::Result<Result<(), Option<Version>>> {
        let Self { query, values, which, .. } = self;
        if DB::version_save(conn, &query, values, expected).await? {
            return Ok(Ok(()));
        }
        let found = DB::version_read(conn, &query.row, which).await?;
        Ok(Err(found.map(|(_, version)| version)))
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
