//! Work under leases: a commit, a fenced write, several at once, and the control whose commit ignores its lease.

use std::time::Duration;

use lockkit::{Lease, Tx};
use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout};

use crate::event::Kind;
use crate::rig::Rig;
use crate::worker::op::{Failure, Op, enter, value, write};
use crate::worker::{STATEMENT, Worker};

impl<S: Rig> Worker<S> {
    /// Half of the work by hand, half under `run`.
    pub(super) async fn commit_under_a_lease(&self, op: &Op) -> Result<(), Failure> {
        let request = self.leases.lease(op.key.clone());
        if op.id % 2 == 0 {
            return self.section(op, request.acquire().await?).await;
        }
        request.run(|lease| self.section(op, lease)).await
    }

    async fn section(&self, op: &Op, lease: Lease<Pool<S::DB>>) -> Result<(), Failure> {
        let fence = lease.fence().as_i64();
        op.granted(fence, Some(lease.trusted_until()));
        let work = async {
            let seen = self.read(op.account).await?;
            self.hold(op, &lease, self.some_time()).await;
            let mut tx = lockkit::begin(&self.pool).await?;
            bounded(write::<S>(&mut tx, op, op.account, seen, fence, "")).await?;
            Ok(tx)
        };
        let tx = op.or_end(work.await)?;
        self.committing(op, lease.commit(tx)).await
    }

    /// Real exclusion: the lease row is locked until the transaction ends, and the row refuses older fences.
    pub(super) async fn write_fenced(&self, op: &Op) -> Result<(), Failure> {
        let lease = self.leases.lease(op.key.clone()).acquire().await?;
        let fence = lease.fence().as_i64();
        op.granted(fence, Some(lease.trusted_until()));
        let work = async {
            let mut tx = lockkit::begin(&self.pool).await?;
            lease.verify(&mut tx).await?;
            let seen = bounded(value::<S>(&mut tx, op.account)).await?;
            // A transaction on SQLite keeps all others from writing.
            if S::HAS_SERVER {
                self.hold(op, &lease, Duration::from_millis(fastrand::u64(0..20))).await;
            }
            bounded(write::<S>(&mut tx, op, op.account, seen, fence, &format!(" AND fence < {fence}"))).await?;
            Ok(tx)
        };
        let tx = op.or_end(work.await)?;
        let committed = self.committing(op, tx.commit()).await;
        op.answered(&committed);
        op.end();
        // Whether it was still held does not matter any more.
        drop(lease.release().await);
        committed
    }

    /// Moves a cent from one account to another under both leases.
    pub(super) async fn move_a_cent(&self, op: &Op) -> Result<(), Failure> {
        let from = fastrand::u32(0..Kind::Several.keys());
        let to = (from + 1) % Kind::Several.keys();
        let pair = [Kind::Several.key(from), Kind::Several.key(to)];
        let leases = self.leases.all(pair).acquire().await?;
        for lease in leases.leases() {
            op.granted_of(lease.key().as_str(), lease.fence().as_i64(), Some(lease.trusted_until()));
        }
        let fence_of = |key: &str| leases.get(key).map_or(0, |it| it.fence().as_i64());
        let sides = [(from, -1, fence_of(&Kind::Several.key(from))), (to, 1, fence_of(&Kind::Several.key(to)))];
        let work = async {
            let mut read = Vec::new();
            for (key, cents, fence) in sides {
                let account = Kind::Several.account(key);
                read.push((account, cents, fence, self.read(account).await?));
            }
            sleep(Duration::from_millis(fastrand::u64(0..20))).await;
            let mut tx = lockkit::begin(&self.pool).await?;
            // In one order, so that the rows' own locks make no deadlock.
            read.sort_unstable();
            for (account, cents, fence, seen) in read {
                bounded(move_cents::<S>(&mut tx, op, account, (seen, fence), cents)).await?;
            }
            Ok(tx)
        };
        let tx = op.or_end(work.await)?;
        self.committing(op, leases.commit(tx)).await
    }

    /// Control: what many do, and what no lease can make right.
    pub(super) async fn commit_beside_a_lease(&self, op: &Op) -> Result<(), Failure> {
        let lease = self.leases.lease(op.key.clone()).acquire().await?;
        let fence = lease.fence().as_i64();
        let seen = self.read(op.account).await?;
        // Said after the read, so that whoever is stopped when it says so has read.
        op.granted(fence, Some(lease.trusted_until()));
        sleep(Duration::from_millis(60)).await;
        let mut tx = lockkit::begin(&self.pool).await?;
        bounded(write::<S>(&mut tx, op, op.account, seen, fence, "")).await?;
        let committed = self.committing(op, tx.commit()).await;
        op.answered(&committed);
        op.end();
        drop(lease.release().await);
        committed
    }

    /// Keeps the lease for a while, and says when it is renewed.
    async fn hold(&self, op: &Op, lease: &Lease<Pool<S::DB>>, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let step = Duration::from_millis(10).min(end - Instant::now());
            sleep(step).await;
            if !lease.is_trusted() {
                op.say(crate::event::What::Lost);
                return;
            }
            op.look(lease.trusted_until());
        }
    }

    /// Mostly short; one in thirty is longer than the ttl, and needs renewals.
    fn some_time(&self) -> Duration {
        match fastrand::u32(0..30) {
            0 => self.ttl.mul_f64(1.3),
            _ => Duration::from_millis(fastrand::u64(2..30)),
        }
    }
}

async fn move_cents<S: Rig>(
    tx: &mut Tx<S::DB>,
    op: &Op,
    account: i64,
    (seen, fence): (i64, i64),
    cents: i64,
) -> Result<(), Failure> {
    let sql = format!("UPDATE account SET value = {}, cents = cents + {cents} WHERE id = {account}", seen + 1);
    S::execute(tx, &sql).await.map_err(|err| Failure::sql("write", &err))?;
    enter::<S>(tx, op, account, seen, fence).await
}

/// A statement of the work, with the caller's own limit.
pub(super) async fn bounded<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let late = |_| Err(Failure::of_the_caller("a statement was not answered in time"));
    timeout(STATEMENT, work).await.unwrap_or_else(late)
}
