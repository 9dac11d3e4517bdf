//! Leases of a pool inside a transaction: `verify`, and `commit`, which commits and releases the lease atomically.
//!
//! `commit` checks that the transaction is open before it releases the lease, so a transaction that is gone frees no
//! lease. On MySQL and MariaDB it checks afterwards: autocommit is off, so a release after the end of the transaction
//! is in another one, which is rolled back. With a `sqlx::Transaction` it checks before and, there, also afterwards,
//! with its own savepoints.

use std::{marker::PhantomData, slice};

use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    lease::{
        held::Lease,
        in_transaction::{COMMITTING, LeaseTx, commit},
        life::{kept::Kept, state::Pin},
        request::MultiLease,
        store::{Answer, Release, Renewal},
    },
    sql::{END_LIMIT, LeaseOps, failed_on_own_table, in_step, in_transaction, tx::AnyTx},
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

impl<DB: LeaseOps> Lease<Pool<DB>> {
    /// Inside a transaction: checks that this lease is current, and prevents others from taking it until the
    /// transaction ends, even if the lease expires meanwhile.
    ///
    /// Call it before reading the data that the lease protects. A transaction whose first statement is `verify` has
    /// real exclusion for data in the same database.
    ///
    /// The lease is renewed concurrently, however long the transaction takes. Two cases are different: on SQLite the
    /// transaction holds the only write lock, and in PostgreSQL's REPEATABLE READ and SERIALIZABLE the snapshot is
    /// fixed. There `verify` itself renews, and the transaction must be shorter than the ttl.
    ///
    /// # Errors
    /// [`Error::Lost`] unless the lease is current; [`Error::InvalidOption`] outside a transaction, and in a
    /// transaction of another database, where the lease is kept; [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the row; roll it back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        let Kept { key, token, .. } = self.kept();
        let pin = async {
            let outside = "needs a transaction: outside of one it would protect nothing";
            in_transaction::<DB>(conn, false, "verify", outside).await?;
            let pinned = DB::lease_pin(conn, key, *token, self.kept().ttl()).await;
            pinned.map_err(|err| failed_on_own_table::<DB>("verifying lease", Some(key), err))
        };
        self.verify_by(pin).await
    }

    /// Commits the transaction if, and only if, the lease is still held at that moment, and releases the lease in the
    /// same commit. If a caller of this process waits for it, the transaction renews the lease instead, and it is
    /// handed to that caller after the commit ([`LeasesBuilder::hand_over`](crate::lease::LeasesBuilder::hand_over));
    /// if the caller has gone by then, it is released in the background. Takes a [`Tx`](crate::Tx) or a
    /// `sqlx::Transaction`.
    ///
    /// This prevents a stale holder (stopped, slow or partitioned) from writing after another process took the lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is not held any more; the transaction is rolled back. [`Error::InvalidOption`]
    /// for a transaction of another database, which is rolled back too. Otherwise the errors of
    /// [`Tx::commit`](crate::Tx::commit). But for a loss, the lease is then released in the background.
    ///
    /// # Cancel safety
    /// If this future is dropped, the outcome of the commit is unknown, as with any commit. The lease is released in
    /// either case.
    pub async fn commit<T: AnyTx<DB>>(self, tx: T) -> Result<()> {
        commit(slice::from_ref(&self), InTx::of(tx, Some(self.key()))).await
    }
}

impl<DB: LeaseOps> MultiLease<Pool<DB>> {
    /// As [`Lease::verify`](crate::Lease::verify), for all leases.
    ///
    /// # Errors
    /// As [`Lease::verify`](crate::Lease::verify).
    ///
    /// # Cancel safety
    /// The transaction may or may not have locked the rows; roll it back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        for lease in self.leases() {
            lease.verify(conn).await?;
        }
        Ok(())
    }

    /// As [`Lease::commit`](crate::Lease::commit): commits if, and only if, all leases are still held at that moment,
    /// and releases them.
    ///
    /// # Errors
    /// As [`Lease::commit`](crate::Lease::commit).
    ///
    /// # Cancel safety
    /// As [`Lease::commit`](crate::Lease::commit).
    pub async fn commit<T: AnyTx<DB>>(self, tx: T) -> Result<()> {
        commit(self.leases(), InTx::of(tx, self.leases().first().map(Lease::key))).await
    }
}

/// A transaction of a pool's database, in which the lease of this key is committed first.
struct InTx<'k, DB, T> {
    tx: T,
    key: Option<&'k Key>,
    database: PhantomData<fn() -> DB>,
}

impl<'k, DB: LeaseOps, T: AnyTx<DB>> InTx<'k, DB, T> {
    fn of(tx: T, key: Option<&'k Key>) -> Self {
        Self { tx, key, database: PhantomData }
    }
}

impl<DB: LeaseOps, T: AnyTx<DB>> LeaseTx for InTx<'_, DB, T> {
    async fn check_open(&mut self) -> Result<()> {
        in_step::<DB, _>(COMMITTING, self.key, self.tx.check_open()).await
    }

    async fn renew(&mut self, renewal: &Renewal) -> Result<Answer> {
        let renewing = async {
            let renewed = DB::lease_renew(self.tx.connection(), slice::from_ref(renewal)).await;
            renewed.map_err(|err| release_failed::<DB>(&renewal.key, err))
        };
        let answers = in_step::<DB, _>(COMMITTING, self.key, renewing).await?;
        Ok(answers.first().copied().unwrap_or(Answer::Gone))
    }

    async fn release(&mut self, Release { key, token, min_hold }: &Release, pin: Pin) -> Result<bool> {
        let releasing = async {
            let released = DB::lease_release_in_tx(self.tx.connection(), key, *token, *min_hold, pin).await;
            released.map_err(|err| release_failed::<DB>(key, err))
        };
        in_step::<DB, _>(COMMITTING, self.key, releasing).await
    }

    async fn commit(self) -> Result<()> {
        self.tx.commit_open().await
    }

    async fn roll_back(self) -> bool {
        // Otherwise dropping the transaction rolls it back.
        matches!(timeout(END_LIMIT, self.tx.roll_back()).await, Ok(Ok(())))
    }
}

/// The error when the transaction failed to release the lease. Nothing was committed.
fn release_failed<DB: LeaseOps>(key: &Key, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::NoTransaction => Error::TransactionEnded { source: source.into() },
        _ => failed_on_own_table::<DB>(COMMITTING, Some(key), source),
    }
}
