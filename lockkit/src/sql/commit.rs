//! Leases of a pool inside a transaction: `verify`, and `commit`, which gives the lease back in the same atomic act.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    error::{Error, Fault, LossReason, Result},
    key::Key,
    lease::{Committing, Lease, MultiLease, kept::Kept},
    sql::{
        LeaseOps, depth, failed_on_own_table,
        tx::{AnyTx, ROLLBACK_LIMIT},
    },
    task::{no_answer, timed_out},
};

/// The least and the most time that a commit may take; in between it is the ttl of its lease.
const LEAST_COMMIT: Duration = Duration::from_secs(5);
const MOST_COMMIT: Duration = Duration::from_secs(30);

impl<DB: LeaseOps> Lease<Pool<DB>> {
    /// Inside a transaction: makes sure that this lease is current, and keeps everybody else from taking it until the
    /// transaction ends, even if the lease expires meanwhile.
    ///
    /// Call it before reading what the lease protects. A transaction whose first statement is `verify` has real
    /// exclusion for data in the same database.
    ///
    /// The lease is renewed beside it, however long the transaction takes, except on SQLite, whose only write lock the
    /// transaction has, and in PostgreSQL's REPEATABLE READ and SERIALIZABLE: there `verify` itself renews, and the
    /// transaction must be shorter than the ttl.
    ///
    /// # Errors
    /// [`Error::Lost`] unless the lease is current; [`Error::InvalidOption`] outside a transaction;
    /// [`Error::NotMigrated`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The row may or may not be locked in the transaction; roll that back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        self.visit();
        self.check_trusted()?;
        if depth::<DB>(conn).await? == 0 {
            let reason = "needs a transaction: outside of one it would protect nothing".to_owned();
            return Err(Error::InvalidOption { option: "verify", reason });
        }
        let pinned = DB::lease_pin(conn, &self.kept().key, self.kept().token, self.kept().ttl())
            .await
            .map_err(|err| failed_on_own_table::<DB>("verifying lease", Some(&self.kept().key), err))?;
        if pinned {
            self.kept().pin();
        } else {
            self.kept().lose(LossReason::Stolen);
        }
        self.check_trusted()
    }

    /// Commits the transaction if, and only if, the lease is still held at that moment, and gives the lease back: one
    /// atomic act. Takes a [`Tx`](crate::Tx) or a `sqlx::Transaction`.
    ///
    /// This is what keeps a stale holder (stopped, slow, partitioned away) from writing after somebody else took over.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is not held any more; the transaction is rolled back. Otherwise those of
    /// [`Tx::commit`](crate::Tx::commit); the lease is released in the background then.
    ///
    /// # Cancel safety
    /// Dropping this future leaves it unknown whether the commit happened, as with any commit. The lease is given back
    /// in either case.
    pub async fn commit<T: AnyTx<DB>>(self, tx: T) -> Result<()> {
        commit(std::slice::from_ref(&self), tx).await
    }
}

impl<DB: LeaseOps> MultiLease<Pool<DB>> {
    /// As [`Lease::verify`](crate::Lease::verify), for all of the leases.
    ///
    /// # Errors
    /// As [`Lease::verify`](crate::Lease::verify).
    ///
    /// # Cancel safety
    /// The rows may or may not be locked in the transaction; roll that back.
    pub async fn verify(&self, conn: &mut DB::Connection) -> Result<()> {
        for lease in self.leases() {
            lease.verify(conn).await?;
        }
        Ok(())
    }

    /// As [`Lease::commit`](crate::Lease::commit): commits if, and only if, all of the leases are still held at that
    /// moment, and gives them back.
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

/// Commits the transaction if all of the leases are still held, and gives them back.
async fn commit<DB: LeaseOps, T: AnyTx<DB>>(leases: &[Lease<Pool<DB>>], mut tx: T) -> Result<()> {
    if let Some(lost) = leases.iter().find_map(|it| it.check_trusted().err()) {
        undo(tx).await;
        return Err(lost);
    }
    let limit = leases.iter().map(|it| it.kept().ttl()).max().unwrap_or(LEAST_COMMIT).clamp(LEAST_COMMIT, MOST_COMMIT);
    let committing: Vec<_> = leases.iter().map(Lease::begin_commit).collect();
    let given_up = async {
        tx.check_open().await?;
        for lease in leases {
            let Kept { key, token, terms, .. } = lease.kept();
            let given_up =
                DB::lease_give_up(tx.connection(), key, *token, terms.min_hold, lease.kept().is_pinned()).await;
            if !given_up.map_err(|err| give_up_failed::<DB>(key, err))? {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    };
    let doing = "committing with lease";
    let given_up = timeout(limit, given_up).await;
    let refused = match given_up.unwrap_or_else(|_| Err(no_answer(doing, leases.first().map(Lease::key)))) {
        Ok(None) => {
            // From here on only the answer tells whether the work was done.
            let committed = timeout(limit, tx.commit_open()).await;
            match committed.unwrap_or_else(|_| Err(Error::OutcomeUnknown { source: timed_out().into() })) {
                Ok(()) => {
                    committing.into_iter().for_each(Committing::committed);
                    return Ok(());
                }
                // The leases are given back, in case that it did not happen.
                Err(err @ Error::OutcomeUnknown { .. }) => return Err(err),
                Err(err) => err,
            }
        }
        Ok(Some(lost)) => {
            // The loss is the news; a rollback that fails is done by the database.
            undo(tx).await;
            lost.kept().lose(LossReason::Stolen);
            lost.lost_error(lost.kept().lost().unwrap_or(LossReason::Stolen))
        }
        Err(err) => {
            // It may have the rows of some leases locked, and sqlx rolls back on a connection of the caller's only when that
            // is used again.
            undo(tx).await;
            err
        }
    };
    committing.into_iter().for_each(Committing::refused);
    Err(refused)
}

/// Rolls back a transaction that was refused, if the server answers in time. What takes longer is done by the drop.
async fn undo<DB: LeaseOps, T: AnyTx<DB>>(tx: T) {
    drop(timeout(ROLLBACK_LIMIT, tx.roll_back()).await);
}

/// The error of a transaction that refused to give the lease up: nothing was committed.
fn give_up_failed<DB: LeaseOps>(key: &Key, source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::NoTransaction => Error::TransactionEnded { source: source.into() },
        _ => failed_on_own_table::<DB>("committing with lease", Some(key), source),
    }
}
