//! Transactions that follow each other on one connection, in pools for which the application allows it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use sqlx::{Pool, pool::PoolConnection};
use tokio::time::{Instant, timeout};

use crate::{
    body::guard::Guard,
    sql::{
        Dialect, END_LIMIT, Unsettled, check_in, checked_in, close,
        pool_state::of_pool,
        warm::{Kept, Warm},
    },
};

/// What this process knows of the transactions in a pool.
struct Transactions<DB: Dialect> {
    may_keep: AtomicBool,
    kept: Kept<AfterTx<DB>>,
}

impl<DB: Dialect> Default for Transactions<DB> {
    fn default() -> Self {
        Self { may_keep: AtomicBool::new(false), kept: Kept::default() }
    }
}

/// Lets transactions follow each other on one connection of this pool, without giving it back in between.
///
/// sqlx pings a connection when a pool lends it and when it returns, so an empty transaction takes four round trips, of
/// which two are pings; on MySQL and MariaDB six, because lockkit also restores the session. After this call, a
/// connection that a [`Tx`](crate::Tx) has committed or rolled back waits 10 to 15 ms for the next
/// [`begin`](crate::begin), `#[with_lock(…, tx = …)]` or request with a stored answer on this pool, for 1 s in all.
/// When the pool has no other connection left, it is for 5 ms in all; whoever waits for the pool then waits for one
/// more transaction at most. One that has died in between costs no more than time: nothing was done on it.
///
/// **The hooks of the pool see one use for several transactions.** So do not call it for a pool whose `before_acquire`
/// or `after_release` sets or resets something, such as the tenant of a request. That is why it is not the default:
/// sqlx does not tell whether a pool has hooks. Settings of the session that a transaction changes without `SET LOCAL`,
/// temporary tables and `PRAGMA`s are there in the next one, as they are in a pool without hooks. SQLite's
/// `busy_timeout` is not: it stays as it was when the pool gave the connection.
///
/// Do not call it where each call has a runtime of its own (`Runtime::block_on` in a plain function): a runtime that is
/// not driven does not give its connections back.
///
/// It lasts until the pool is closed or dropped. What is only a statement, and your own use of the pool, go through the
/// pool as before.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// lockkit::dialect::reuse_connections(&pool);
/// for _ in 0..3 {
///     lockkit::begin(&pool).await?.commit().await?; // one connection, which the pool has lent once
/// }
/// # Ok(()) }
/// ```
pub fn reuse_connections<DB: Dialect>(pool: &Pool<DB>) {
    of_pool::<Transactions<DB>, _>(pool).may_keep.store(true, Ordering::Relaxed);
}

/// The way back of a connection of a transaction, where it may be kept.
pub(crate) struct Reuse<DB: Dialect> {
    pool: Pool<DB>,
    transactions: Arc<Transactions<DB>>,
    /// When the pool gave the connection.
    since: Instant,
}

/// A connection whose transaction has ended.
struct AfterTx<DB: Dialect> {
    conn: PoolConnection<DB>,
    session: DB::Session,
    since: Instant,
}

impl<DB: Dialect> Reuse<DB> {
    /// Of a connection that comes from this pool now. `None` if it must return there.
    pub(crate) fn of(pool: &Pool<DB>) -> Option<Self> {
        let transactions = of_pool::<Transactions<DB>, _>(pool);
        let may_keep = transactions.may_keep.load(Ordering::Relaxed);
        may_keep.then(|| Self { pool: pool.clone(), transactions, since: Instant::now() })
    }

    /// The connection that was used last, if one is kept.
    pub(crate) fn take(&mut self) -> Option<(PoolConnection<DB>, DB::Session)> {
        let AfterTx { conn, session, since } = self.transactions.kept.take()?;
        self.since = since;
        Some((conn, session))
    }

    /// One that was kept has died.
    pub(crate) fn close_all(&self) {
        self.transactions.kept.close_all();
    }

    /// Keeps the connection, whose transaction was committed or rolled back by the last statement.
    pub(crate) fn keep(self, conn: PoolConnection<DB>, session: DB::Session) {
        let Self { pool, transactions, since } = self;
        transactions.kept.keep(&pool, AfterTx { conn, session, since });
    }
}

impl<DB: Dialect> Warm for AfterTx<DB> {
    fn is_own(&self) -> bool {
        false
    }

    fn since(&self) -> Instant {
        self.since
    }

    fn put_back(self) {
        put_back(self.conn, self.session);
    }

    fn close(self) {
        close(self.conn);
    }
}

/// Restores the session, then returns the connection to its pool, both in the background. Its transaction was committed
/// or rolled back by the last statement.
pub(crate) fn put_back<DB: Dialect>(conn: PoolConnection<DB>, session: DB::Session) {
    if !DB::must_restore(&session) {
        return check_in::<DB>(conn);
    }
    // Also closed if the runtime ends before the task.
    let mut restoring = Guard::new(Unsettled::new(conn));
    tokio::spawn(async move {
        let restored = DB::restore_ended(&mut restoring.get_mut().conn);
        if matches!(timeout(END_LIMIT, restored).await, Ok(Ok(()))) {
            checked_in::<DB>(restoring.defuse().conn).await;
        }
    });
}
