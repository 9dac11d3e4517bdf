//! Connections that leases keep for a moment.
//!
//! A statement about a lease takes less time than what surrounds it: sqlx pings a connection when a pool lends it and
//! when it returns, in a task of its own, and on SQLite its busy timeout is read, set and restored. So a connection
//! that a statement about leases has just used waits a moment for the next one, unless others may need it. A connection
//! that has died shows at its next use, which is then repeated on another one.

use std::{mem, sync::Arc, time::Duration};

use sqlx::{Pool, pool::PoolConnection};
use tokio::time::Instant;

use crate::{
    body::{
        guard::{Guard, Hold},
        per_runtime::PerRuntime,
    },
    sql::{
        Dialect,
        pool::{close, put_back},
        pool_state::of_pool,
        starved::is_full,
    },
};

/// How long a connection is kept unused. A caller of a pool that has become full waits for half of that.
const KEEP: Duration = Duration::from_millis(10);

/// For how long statements about leases may have one connection after each other, before its pool sees it again.
const MOST: Duration = Duration::from_secs(1);

/// A connection that leases have just used.
pub(super) struct Warm<DB: Dialect> {
    pub(super) conn: PoolConnection<DB>,
    pub(super) grammar: DB::Grammar,
    /// The connection's own busy timeout, while a shorter one is set.
    pub(super) own_timeout: Option<Duration>,
    /// Whether it is one of lockkit's own, which nobody else needs.
    pub(super) is_own: bool,
    /// When its pool gave it.
    pub(super) since: Instant,
}

/// A connection that no statement uses at the moment.
struct Unused<DB: Dialect> {
    warm: Warm<DB>,
    since: Instant,
}

impl<DB: Dialect> Hold for Unused<DB> {
    /// It may have died, or its runtime has ended.
    fn abandon(self) {
        close(self.warm.conn);
    }
}

/// The connections kept for the leases of a pool, the one that was used last at the end.
fn unused<DB: Dialect>(pool: &Pool<DB>) -> Arc<PerRuntime<Guard<Unused<DB>>>> {
    of_pool(pool)
}

/// The connection that was used last, if one is kept.
pub(super) fn take<DB: Dialect>(pool: &Pool<DB>) -> Option<Warm<DB>> {
    // Otherwise the process was stopped, and the connection may have died silently since.
    let is_fresh = |it: &mut Guard<Unused<DB>>| it.since.elapsed() < 2 * KEEP;
    let kept = unused(pool).change(|all| all.pop_if(is_fresh))??;
    Some(kept.defuse().warm)
}

/// Keeps the connection. Returns it if others may need it.
pub(super) fn keep<DB: Dialect>(pool: &Pool<DB>, warm: Warm<DB>) -> Option<Warm<DB>> {
    if pool.is_closed() || warm.since.elapsed() >= MOST || !warm.is_own && is_full(pool) {
        return Some(warm);
    }
    if let Some(list) = unused(pool).push(Guard::new(Unused { warm, since: Instant::now() })) {
        let pool = pool.clone();
        list.check_every(KEEP / 2, move |all| {
            let (is_needed, now) = (pool.is_closed() || is_full(&pool), Instant::now());
            let is_due = |it: &mut Guard<Unused<DB>>| is_needed && !it.warm.is_own || now >= it.since + KEEP;
            let due: Vec<_> = all.extract_if(.., is_due).collect();
            move || due.into_iter().for_each(|it| put_back(it.defuse().warm))
        });
    }
    None
}

/// Closes what is kept: one of these connections has died, so the others may have died with it.
pub(super) fn close_all<DB: Dialect>(pool: &Pool<DB>) {
    let kept = unused(pool).change(mem::take);
    drop(kept);
}
