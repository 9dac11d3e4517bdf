//! Connections that are kept for a moment.
//!
//! A statement about a lease takes less time than what surrounds it: sqlx pings a connection when a pool lends it and
//! when it returns, in a task of its own; on SQLite its busy timeout is read, set and restored; on MySQL and MariaDB a
//! transaction restores the session. So a connection that has just been used waits a moment for the next use of the
//! same kind, unless others may need it. One that has died shows at its next use, which then takes another one.
//!
//! Statements about leases, and takes that share one, keep connections of every pool. Transactions keep them only where
//! the application allows it (`sql::reuse`): the hooks of a pool may set what a transaction must find.

use std::{mem, time::Duration};

use sqlx::Pool;
use tokio::time::Instant;

use crate::{
    body::{
        guard::{Guard, Hold},
        per_runtime::PerRuntime,
    },
    sql::{Dialect, starved::is_full},
};

/// How long a connection is kept unused. A caller of a pool that has become full waits for half of that.
const KEEP: Duration = Duration::from_millis(10);

/// For how long one connection may be used again and again, before its pool sees it again.
const MOST: Duration = Duration::from_secs(1);

/// The same while the pool has no other connection left. Others may wait for one, which sqlx does not tell.
const MOST_OF_FULL: Duration = Duration::from_millis(5);

/// A connection that has just been used.
pub(super) trait Warm: Send + Sized + 'static {
    /// Whether it is one of lockkit's own, which nobody else needs.
    fn is_own(&self) -> bool;

    /// When its pool gave it.
    fn since(&self) -> Instant;

    /// Returns it to its pool in the background.
    fn put_back(self);

    /// Closes it at once. Needs no runtime.
    fn close(self);
}

/// A connection that nobody uses at the moment.
struct Unused<W: Warm> {
    warm: W,
    since: Instant,
}

impl<W: Warm> Hold for Unused<W> {
    /// It may have died, or its runtime has ended.
    fn abandon(self) {
        self.warm.close();
    }
}

/// The connections that are kept for one kind of use of a pool, the one that was used last at the end.
pub(super) struct Kept<W: Warm>(PerRuntime<Guard<Unused<W>>>);

impl<W: Warm> Kept<W> {
    /// The connection that was used last, if one is kept.
    pub(super) fn take(&self) -> Option<W> {
        // Otherwise the process was stopped, and the connection may have died silently since.
        let is_fresh = |it: &mut Guard<Unused<W>>| it.since.elapsed() < 2 * KEEP;
        let kept = self.0.change(|all| all.pop_if(is_fresh))??;
        Some(kept.defuse().warm)
    }

    /// Keeps a connection of this pool, or returns it if others may need it.
    pub(super) fn keep<DB: Dialect>(&self, pool: &Pool<DB>, warm: W) {
        let most = if !warm.is_own() && is_full(pool) { MOST_OF_FULL } else { MOST };
        if pool.is_closed() || warm.since().elapsed() >= most {
            return warm.put_back();
        }
        let Some(list) = self.0.push(Guard::new(Unused { warm, since: Instant::now() })) else { return };
        let pool = pool.clone();
        list.check_every(KEEP / 2, move |all| {
            let (is_needed, now) = (pool.is_closed() || is_full(&pool), Instant::now());
            let is_due = |it: &mut Guard<Unused<W>>| is_needed && !it.warm.is_own() || now >= it.since + KEEP;
            let due: Vec<_> = all.extract_if(.., is_due).collect();
            move || due.into_iter().for_each(|it| it.defuse().warm.put_back())
        });
    }

    /// Closes what is kept: one of these connections has died, so the others may have died with it.
    pub(super) fn close_all(&self) {
        let kept = self.0.change(mem::take);
        drop(kept);
    }
}

impl<W: Warm> Default for Kept<W> {
    fn default() -> Self {
        Self(PerRuntime::default())
    }
}
