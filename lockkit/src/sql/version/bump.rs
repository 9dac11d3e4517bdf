//! The version that a write produced. It is tentative until its transaction commits.

use std::fmt;

use crate::{
    sql::{Dialect, tx::AnyTx},
    value::{
        error::{Error, Result},
        version::Version,
    },
};

/// The new version of a row, as written by [`bump`](crate::VersionedRow::bump).
///
/// A bump outside a transaction is committed, and [`committed`](Self::committed) returns its version. A bump inside a
/// transaction is only tentative. If the transaction or a savepoint in it is rolled back, another writer can commit
/// *the same number* with other content, and a write that expects the number would overwrite that content. So this type
/// is not a [`Version`]. It compares and prints like one, and a further bump in the same transaction accepts it as
/// expected. [`commit`](Self::commit) turns it into a [`Version`].
///
/// If other code commits the transaction, read the row again after the commit.
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

    /// The version if the bump was made outside a transaction, and is therefore committed.
    pub fn committed(&self) -> Option<&Version> {
        self.made.is_committed().then_some(&self.version)
    }

    /// Commits the transaction of the bump, and returns the version once the commit has succeeded.
    ///
    /// # Errors
    /// The errors of [`Tx::commit`](crate::Tx::commit). [`Error::InvalidOption`] when the bump was made in a nested
    /// transaction, which may have been rolled back on its own; the whole transaction is rolled back then.
    ///
    /// # Cancel safety
    /// As [`Tx::commit`](crate::Tx::commit).
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

/// The version that a bump expects: a [`Version`] that was read, a number, or a [`Bumped`] of the same transaction.
#[derive(Debug)]
pub struct Expected {
    version: Version,
    made: Made,
}

impl Expected {
    /// The version, unless it was made in a deeper transaction than the given depth.
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

/// Transaction depth at which a version was made. Transactions unknown to sqlx (the user's own BEGIN or SAVEPOINT) are
/// not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) depth: usize,
}

impl Made {
    pub(crate) fn is_committed(self) -> bool {
        self.depth == 0
    }

    /// Fails if the transaction of the version has certainly ended.
    pub(crate) fn check_open(self, depth: usize) -> Result<()> {
        if depth >= self.depth {
            return Ok(());
        }
        let reason =
            "is a version of a transaction, or of one nested in it, that has ended and may have been rolled back; \
                      read the row again"
                .to_owned();
        Err(Error::InvalidOption { option: "expected", reason })
    }
}

/// Commits the transaction, which makes all of these versions final.
pub(crate) async fn commit<DB: Dialect>(made: &[Made], mut tx: impl AnyTx<DB>) -> Result<()> {
    // A version made at depth 1 is undone only with the whole transaction, and then `tx` would be gone.
    if made.iter().any(|it| it.depth > 1) {
        tx.roll_back().await?;
        let reason = "cannot confirm a version of a nested transaction, which may have been rolled back by itself; \
                      commit the transaction without it, and read the row again";
        return Err(Error::InvalidOption { option: "commit", reason: reason.to_owned() });
    }
    tx.check_open().await?;
    tx.commit_open().await
}
