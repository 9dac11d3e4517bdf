//! The version that a write made, which is tentative until its transaction commits.

use std::fmt;

use crate::{
    error::{Error, Result},
    sql::{Dialect, tx::AnyTx},
    version::Version,
};

/// The version that a [`bump`](crate::VersionedRow::bump) moved a row on to.
///
/// Outside a transaction it is committed, and [`committed`](Self::committed) returns it. Inside one it is only
/// tentative: if the transaction or a savepoint in it is rolled back, another writer can commit *the same number*
/// with other content, and a write that expects it would overwrite that. So this is no [`Version`]; it compares with
/// one and prints as one, is the expected version of a further bump in the same transaction, and becomes one through
/// [`commit`](Self::commit).
///
/// Without that, read the row again after the commit.
///
/// # Example
/// ```
/// use lockkit::{Version, VersionedRow};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t_items (item_id INTEGER, stock INTEGER, version INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO t_items VALUES (7, 5, 1)").execute(&pool).await?;
/// let mut tx = lockkit::begin(&pool).await?;
/// let bumped = VersionedRow::table("t_items").by("item_id", 7).expected(1).bump(&mut *tx).await?;
/// assert_eq!(bumped, Version::Number(2));
/// assert_eq!(bumped.committed(), None);
/// sqlx::query("UPDATE t_items SET stock = 4 WHERE item_id = 7").execute(&mut *tx).await?;
/// let version: Version = bumped.commit(tx).await?;
/// # assert_eq!(version, Version::Number(2));
/// # Ok(()) }
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Bumped {
    version: Version,
    made: Made,
}

impl Bumped {
    pub(crate) fn new(version: Version, depth: usize) -> Self {
        Self { version, made: Made { depth } }
    }

    /// The version, if it is committed: the bump was made outside a transaction.
    pub fn committed(&self) -> Option<&Version> {
        self.made.is_committed().then_some(&self.version)
    }

    /// Commits the transaction that the bump was made in, and returns the version when that has succeeded.
    ///
    /// # Errors
    /// As those of [`Tx::commit`](crate::Tx::commit). [`Error::InvalidOption`] when the bump was made in a nested
    /// transaction: that may have been rolled back by itself. Everything is rolled back then.
    ///
    /// # Cancel safety
    /// As that of [`Tx::commit`](crate::Tx::commit).
    pub async fn commit<DB: Dialect>(self, tx: impl AnyTx<DB>) -> Result<Version> {
        commit(&[self.made], tx).await?;
        Ok(self.version)
    }
}

impl PartialEq<Version> for Bumped {
    fn eq(&self, other: &Version) -> bool {
        self.version == *other
    }
}

impl PartialEq<Bumped> for Version {
    fn eq(&self, other: &Bumped) -> bool {
        *self == other.version
    }
}

impl fmt::Display for Bumped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.version.fmt(f)
    }
}

/// What a bump may expect: a [`Version`] that was read, a number, or a [`Bumped`] of the same transaction.
#[derive(Debug)]
pub struct Expected {
    version: Version,
    made: Made,
}

impl Expected {
    /// The version, if it can be expected this deep in transactions.
    pub(crate) fn at(self, depth: usize) -> Result<Version> {
        self.made.check_open(depth)?;
        Ok(self.version)
    }
}

impl<V: Into<Version>> From<V> for Expected {
    fn from(version: V) -> Self {
        Self { version: version.into(), made: Made { depth: 0 } }
    }
}

impl From<Bumped> for Expected {
    fn from(Bumped { version, made }: Bumped) -> Self {
        Self { version, made }
    }
}

/// How deep in transactions a version was made. A transaction that sqlx does not know of (the user's own BEGIN or
/// SAVEPOINT) is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) depth: usize,
}

impl Made {
    pub(crate) fn is_committed(self) -> bool {
        self.depth == 0
    }

    /// Fails where the transaction that it was made in has surely ended.
    pub(crate) fn check_open(self, depth: usize) -> Result<()> {
        if depth >= self.depth {
            return Ok(());
        }
        let reason =
            "is a version of a transaction, or of one nested in it, that has ended and may have been rolled back; \
                      read the row again"
                .to_owned();
        Err(Error::InvalidOption { option: "expect", reason })
    }
}

/// Commits what makes all of these versions final.
pub(crate) async fn commit<DB: Dialect>(made: &[Made], mut tx: impl AnyTx<DB>) -> Result<()> {
    // At the outermost level a version is undone with the whole transaction only, and then `tx` would be gone.
    if made.iter().any(|it| it.depth > 1) {
        tx.roll_back().await?;
        let reason = "cannot vouch for a version of a nested transaction, which may have been rolled back by itself; commit \
                      the transaction without it, and read the row again";
        return Err(Error::InvalidOption { option: "commit", reason: reason.to_owned() });
    }
    tx.check_open().await?;
    tx.commit_open().await
}
