//! A struct as it is stored in a row: the table, the key, the other columns and the version.

use std::{fmt, future::Future};

use sqlx::{Database, Encode, Type};

use crate::{
    sql::{
        Values, VersionOps,
        conn::On,
        ident::Ident,
        version::save::{self, Saved},
    },
    value::error::{Error, Result},
};

/// A struct that is one row of a table, with an integer version that every save increments.
///
/// `#[derive(Versioned)]` implements this trait in one line. By hand it looks like this:
///
/// ```
/// use lockkit::{
///     VersionedStruct,
///     dialect::VersionOps,
///     version::Columns,
/// };
/// use sqlx::{Encode, Type};
///
/// struct Item {
///     item_id: i64,
///     stock: i64,
///     version: i64,
/// }
///
/// impl<DB: VersionOps> VersionedStruct<DB> for Item
/// where
///     i64: for<'v> Encode<'v, DB> + Type<DB>,
/// {
///     const TABLE: &'static str = "t_items";
///     const VERSION: &'static str = "version";
///     type Version = i64;
///
///     fn version(&self) -> &i64 {
///         &self.version
///     }
///
///     fn version_mut(&mut self) -> &mut i64 {
///         &mut self.version
///     }
///
///     fn key(&self, columns: &mut Columns<DB>) {
///         columns.add("item_id", self.item_id);
///     }
///
///     fn values(&self, columns: &mut Columns<DB>) {
///         columns.add("stock", self.stock);
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1)").execute(&pool).await?;
/// let mut item = Item { item_id: 7, stock: 4, version: 1 };
/// item.save(&pool).await?;
/// assert_eq!(item.version, 2);
/// # Ok(()) }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be saved in this database by its version",
    label = "not a row with a version",
    note = "write `#[derive(lockkit::Versioned)]` on it"
)]
pub trait VersionedStruct<DB: VersionOps>: Sized {
    /// The table, named as the database stores it (letters, digits, `_`), with its schema if that is not the
    /// connection's: `"app.items"`.
    const TABLE: &'static str;

    /// The column of the version.
    const VERSION: &'static str;

    /// The type of the version.
    type Version: VersionField;

    /// The version of the struct, as it was read.
    fn version(&self) -> &Self::Version;

    /// The version of the struct. A save updates it.
    fn version_mut(&mut self) -> &mut Self::Version;

    /// Adds the columns that identify the row.
    fn key(&self, columns: &mut Columns<DB>);

    /// Adds the columns that a save writes: all columns except those of the key and the version.
    fn values(&self, columns: &mut Columns<DB>);

    /// Writes the row if it still has the version of the struct, and increments the version, in one statement.
    ///
    /// On `&pool` the struct then has the new version, and this returns `()`. On a connection this returns a [`Saved`].
    /// Inside a transaction the struct keeps its old, committed version until [`Saved::commit`] has committed the new
    /// one. So the struct never gets a version that is rolled back, with the transaction or with a savepoint. If the
    /// `Saved` is dropped, the struct keeps the old version; if the transaction is committed without it, the next save
    /// is a conflict.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another writer changed the row since it was read (`found` is its version now), or
    /// deleted it (`found` is `None`); load the row again. [`Error::InvalidOption`] when the version is the highest of
    /// its type; [`Error::InvalidIdentifier`]; [`Error::Database`]. The struct keeps its version.
    ///
    /// # Cancel safety
    /// Outside a transaction the row may or may not have been written; if it was, the next save is a conflict.
    fn save<O: On<DB>>(&mut self, on: O) -> impl Future<Output = Result<O::Written<Saved<'_, DB, Self>>>> + Send
    where
        Self: Send,
    {
        save::save(self, on)
    }

    /// Deletes the row if it still has the version of the struct, in one statement.
    ///
    /// The struct is unchanged. If the surrounding transaction is rolled back, the row exists again with the struct's
    /// version. If it is committed, a later save or delete of the struct is a conflict.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another writer changed the row since it was read (`found` is its version now), or
    /// deleted it (`found` is `None`); [`Error::InvalidIdentifier`]; [`Error::InvalidOption`] for a key that is NULL;
    /// [`Error::Database`].
    ///
    /// # Cancel safety
    /// Outside a transaction the row may or may not have been deleted.
    fn delete(&self, on: impl On<DB>) -> impl Future<Output = Result<()>> + Send {
        save::delete(self, on)
    }
}

/// The type of a struct's version: `i16`, `i32` or `i64`.
#[diagnostic::on_unimplemented(
    message = "the version of a struct is an `i16`, `i32` or `i64`, not `{Self}`",
    label = "not an integer that can count versions",
    note = "for a timestamp column use `lockkit::VersionedRow`"
)]
pub trait VersionField: sealed::Sealed + Sized {
    /// The version.
    #[doc(hidden)]
    fn number(&self) -> i64;

    /// The version with this number. `None` when the number does not fit the type.
    #[doc(hidden)]
    fn from_number(number: i64) -> Option<Self>;
}

macro_rules! version_field {
    ($($integer:ty),*) => {$(
        impl VersionField for $integer {
            fn number(&self) -> i64 {
                i64::from(*self)
            }

            fn from_number(number: i64) -> Option<Self> {
                Self::try_from(number).ok()
            }
        }

        impl sealed::Sealed for $integer {}
    )*};
}

version_field!(i16, i32, i64);

mod sealed {
    pub trait Sealed {}
}

/// Columns and their values, to be sent to the database.
pub struct Columns<DB: Database> {
    pub(crate) names: Vec<Ident>,
    pub(crate) values: Values<DB>,
    /// Whether the columns identify the row, so their values are compared.
    are_key: bool,
    failed: Option<Error>,
}

impl<DB: VersionOps> Columns<DB> {
    /// Columns to be written.
    pub(crate) fn new() -> Self {
        Self { names: Vec::new(), values: Values::new(), are_key: false, failed: None }
    }

    /// Columns that identify the row.
    pub(crate) fn of_key() -> Self {
        Self { are_key: true, ..Self::new() }
    }

    /// Adds a column, named as the database stores it (letters, digits, `_`).
    pub fn add<'v, T>(&mut self, column: &str, value: T) -> &mut Self
    where
        T: Encode<'v, DB> + Type<DB>,
    {
        let added = Ident::new(column).and_then(|name| {
            if self.are_key {
                self.values.add_compared("key", &name, value)?;
            } else {
                self.values.add(value).map_err(|err| Error::InvalidOption {
                    option: "column",
                    reason: format!("`{column}` has a value that cannot be sent to the database: {err}"),
                })?;
            }
            self.names.push(name);
            Ok(())
        });
        if let Err(err) = added {
            self.failed.get_or_insert(err);
        }
        self
    }

    /// Returns the columns, or the first error of an [`add`](Self::add).
    pub(crate) fn checked(self) -> Result<Self> {
        match self.failed {
            Some(err) => Err(err),
            None => Ok(self),
        }
    }
}

impl<DB: Database> fmt::Debug for Columns<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Columns").field("names", &self.names).field("failed", &self.failed).finish_non_exhaustive()
    }
}
