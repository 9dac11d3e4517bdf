//! Leases of a pool inside a transaction: `verify`, and `commit`, which commits and releases the lease atomically.
//!
//! `commit` checks that the transaction is open before it releases the lease, so a transaction that is gone frees no
//! lease. On MySQL and MariaDB it checks afterwards: autocommit is off, so a release after the end of the transaction
//! is in another one, which is rolled back. With a `sqlx::Transaction` it checks before and, there, also afterwards,
//! with its own savepoints.
//!
//! Before a loss is reported, the lease is looked up through the leases' own pool, for 1 s at most: if it is held there
//! by this token, the transaction is of another database (`InvalidOption`). The identity of a server would not do: it
//! changes with a failover, and a restored copy has the same. `commit` rolls back first, since in a pool of one the
//! transaction has the only connection.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    body::task::{no_answer, timed_out},
    lease::{
        held::Lease,
        in_transaction::Committing,
        life::{kept::Kept, state::Event},
        request::MultiLease,
        store::Answer,
    },
    sql::{END_LIMIT, LeaseOps, failed_on_own_table, in_step, in_transaction, is_answered, tx::AnyTx},
    value::{
        error::{Error, Fault, LossReason, Result},
        key::Key,
    },
};

const COMMITTING: &str = "committing with lease";

/// Lower and upper limit of the time for a commit; between them the limit is the lease's ttl.
const LEAST_COMMIT: Duration = Duration::from_secs(5);
const MOST_COMMIT: Duration = Duration::from_secs(30);

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
        self.visit();
        self.verifying()?;
        let outside = "needs a transaction: outside of one it would protect nothing";
        in_transaction::<DB>(conn, false, "verify", outside).await?;
        let pinned = DB::lease_pin(conn, &self.kept().key, self.kept().token, self.kept().ttl())
            .await
            .map_err(|err| failed_on_own_table::<DB>("verifying lease", Some(&self.kept().key), err))?;
        if pinned {
            self.kept().on(Event::Verified);
        } else if self.is_in_store().await {
            return Err(elsewhere("verify", self.key()));
        } else {
            self.kept().on(Event::Gone);
        }
        self.check_trusted()
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
        commit(std::slice::from_ref(&self), tx).await
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
        commit(self.leases(), tx).await
    }
}

/// Commits the transaction if all leases are still held, and releases them.
async fn commit<DB: LeaseOps, T: AnyTx<DB>>(leases: &[Lease<Pool<DB>>], mut tx: T) -> Result<()> {
    let limit = leases.iter().map(|it| it.kept().ttl()).max().unwrap_or(LEAST_COMMIT).clamp(LEAST_COMMIT, MOST_COMMIT);
    let alone = leases.len() == 1;
    let mut committing: Vec<_> = leases.iter().map(|it| it.begin_commit(alone)).collect();
    // Checked after `begin_commit`, from which on the lease cannot be handed over. One that was handed over before
    // belongs to another holder.
    if let Some(lost) = leases.iter().find_map(|it| it.check_trusted().err()) {
        committing.into_iter().for_each(Committing::refused);
        undo(tx).await;
        return Err(lost);
    }
    let row_released = async {
        tx.check_open().await?;
        for (lease, committing) in leases.iter().zip(&mut committing) {
            let kept = lease.kept();
            let Kept { key, token, .. } = kept;
            if committing.hands_over() {
                // It proves that the lease is held, and its lock keeps it so until the commit.
                let renewed = DB::lease_renew(tx.connection(), &[kept.renewal()]).await;
                if renewed.map_err(|err| release_failed::<DB>(key, err))? == [Answer::Done] {
                    continue;
                }
                committing.get_mut().release();
            }
            let pin = committing.pin();
            let row_released = DB::lease_release_in_tx(tx.connection(), key, *token, kept.min_hold(), pin).await;
            if !row_released.map_err(|err| release_failed::<DB>(key, err))? {
                return Ok(Some(lease));
            }
            committing.get_mut().row_released();
        }
        Ok(None)
    };
    let key = leases.first().map(Lease::key);
    let row_released = timeout(limit, in_step::<DB, _>(COMMITTING, key, row_released)).await;
    let unanswered = || Err(no_answer(COMMITTING, key));
    let refused = match row_released.unwrap_or_else(|_| unanswered()) {
        Ok(None) => {
            // From here on only the answer decides whether the commit happened.
            let committed = timeout(limit, tx.commit_open()).await;
            match committed.unwrap_or_else(|_| Err(Error::OutcomeUnknown { source: timed_out().into() })) {
                Ok(()) => {
                    committing.into_iter().for_each(Committing::committed);
                    return Ok(());
                }
                // The leases are released, in case the commit did not happen.
                Err(err @ Error::OutcomeUnknown { .. }) => return Err(err),
                Err(err) => err,
            }
        }
        Ok(Some(lost)) => {
            // The loss is the error to report. If the rollback fails, the database does it.
            undo(tx).await;
            if Box::pin(lost.is_in_store()).await {
                elsewhere("commit", lost.key())
            } else {
                lost.kept().on(Event::Gone);
                lost.lost_error(lost.kept().lost().unwrap_or(LossReason::Stolen))
            }
        }
        Err(err) if is_answered(&err) => {
            // The transaction may have locked the rows of some leases, and sqlx rolls back on the caller's connection
            // only when that connection is used again.
            undo(tx).await;
            err
        }
        Err(err) => {
            // A statement may be on its way, so nothing is said on the connection any more.
            drop(tx);
            err
        }
    };
    committing.into_iter().for_each(Committing::refused);
    Err(refused)
}

/// The error of a transaction that does not see a lease which the database of the leases has.
fn elsewhere(option: &'static str, key: &Key) -> Error {
    let reason = format!(
        "got a transaction that does not see lease `{key}`, though the lease is held: the transaction is of another \
         database (or schema) than the leases. Begin it in the pool of the leases, or guard it by the fence \
         (`lease.guard(&mut *tx)`). A snapshot that is older than the lease, and a node of a cluster that does not \
         have the lease yet, look the same"
    );
    Error::InvalidOption { option, reason }
}

/// Rolls back a refused transaction, if the server answers in time. Otherwise dropping the transaction rolls it back.
async fn undo<DB: LeaseOps, T: AnyTx<DB>>(tx: T) {
    drop(timeout(END_LIMIT, tx.roll_back()).await);
}

/// The error when the transaction failed to release the lease. Nothing was committed.
fn release_failed<DB: LeaseOps>(key: &Key, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::NoTransaction => Error::TransactionEnded { source: source.into() },
        _ => failed_on_own_table::<DB>(COMMITTING, Some(key), source),
    }
}
