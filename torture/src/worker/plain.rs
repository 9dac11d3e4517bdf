//! Work under locks of a transaction or session, by versions, from a stock, and the control without a lock.

use std::time::Duration;

use lockkit::{NamedLock, Tx};
use tokio::time::sleep;

use crate::rig::Rig;
use crate::worker::leases::bounded;
use crate::worker::op::{Failure, Op, enter, value, write};
use crate::worker::{Worker, stock};

/// How long a transaction waits for a lock.
const WAIT: Duration = Duration::from_secs(1);

impl<S: Rig> Worker<S> {
    pub(super) async fn under_a_name(&self, op: &Op) -> Result<(), Failure> {
        let mut tx = lockkit::begin(&self.pool).await?;
        NamedLock::new(op.key.clone()).wait(WAIT).lock(&mut *tx).await?;
        self.count_up(op, tx).await
    }

    pub(super) async fn under_a_row_lock(&self, op: &Op) -> Result<(), Failure> {
        let mut tx = lockkit::begin(&self.pool).await?;
        S::lock_row(&mut tx, op.account, WAIT).await?;
        self.count_up(op, tx).await
    }

    pub(super) async fn by_version(&self, op: &Op) -> Result<(), Failure> {
        let mut tx = lockkit::begin(&self.pool).await?;
        let version = S::read_version(&mut tx, op.account).await?;
        let seen = bounded(value::<S>(&mut tx, op.account)).await?;
        pause::<S>().await;
        S::bump_version(&mut tx, op.account, version).await?;
        bounded(write::<S>(&mut tx, op, op.account, seen, 0, "")).await?;
        self.committing(op, tx.commit()).await
    }

    pub(super) async fn take_from_stock(&self, op: &Op) -> Result<(), Failure> {
        let mut tx = lockkit::begin(&self.pool).await?;
        stock::<S>(&self.pool).wait(WAIT).take_in(&mut *tx, 1).await?;
        // Nothing was read that another could have read as well.
        bounded(enter::<S>(&mut tx, op, op.account, op.id, 0)).await?;
        self.committing(op, tx.commit()).await
    }

    /// The lock is the session's; the transaction is another connection's.
    pub(super) async fn under_a_session_lock(&self, op: &Op) -> Result<(), Failure> {
        let Some(session) = S::session(&self.sessions, op.key.clone(), WAIT).await? else {
            // There are none in this database.
            std::future::pending::<()>().await;
            return Ok(());
        };
        op.granted(0, None);
        let committed = async {
            let seen = self.read(op.account).await?;
            pause::<S>().await;
            if !session.is_alive().await {
                return Err(Failure::refused("SessionLost"));
            }
            let mut tx = lockkit::begin(&self.pool).await?;
            bounded(write::<S>(&mut tx, op, op.account, seen, 0, "")).await?;
            self.committing(op, tx.commit()).await
        };
        let committed = committed.await;
        op.end();
        drop(session.release().await);
        committed
    }

    /// Control.
    pub(super) async fn without_a_lock(&self, op: &Op) -> Result<(), Failure> {
        let seen = self.read(op.account).await?;
        sleep(Duration::from_millis(5)).await;
        let mut tx = lockkit::begin(&self.pool).await?;
        bounded(write::<S>(&mut tx, op, op.account, seen, 0, "")).await?;
        self.committing(op, tx.commit()).await
    }

    /// Reads, waits and writes in a transaction that has the lock.
    async fn count_up(&self, op: &Op, mut tx: Tx<S::DB>) -> Result<(), Failure> {
        op.granted(0, None);
        let seen = bounded(value::<S>(&mut tx, op.account)).await?;
        pause::<S>().await;
        bounded(write::<S>(&mut tx, op, op.account, seen, 0, "")).await?;
        self.committing(op, tx.commit()).await
    }
}

/// Within a transaction, which on SQLite keeps all others from writing.
async fn pause<S: Rig>() {
    if S::HAS_SERVER {
        sleep(Duration::from_millis(fastrand::u64(0..10))).await;
    }
}
