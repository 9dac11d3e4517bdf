//! Connections that leases keep for a moment.
//!
//! A statement about a lease takes less time than what surrounds it: sqlx pings a connection when a pool lends it and
//! when it returns, in a task of its own, and on SQLite its busy timeout is read, set and restored. So a connection
//! that a statement about leases has just used waits a moment for the next one, unless others may need it. A connection
//! that has died shows at its next use, which is then repeated on another one.

use std::{collections::HashMap, mem, sync::Arc, time::Duration};

use sqlx::{Pool, pool::PoolConnection};
use tokio::{
    runtime::{Handle, Id},
    time::{Instant, sleep},
};

use crate::{
    body::guard::{Guard, Hold},
    mutex::Mutex,
    sql::{Dialect, pool::put_back, pool_state::of_pool, starved::is_full},
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
    pub(super) waited: Option<Duration>,
    /// Whether it is one of lockkit's own, which nobody else needs.
    pub(super) is_own: bool,
    /// When its pool gave it.
    pub(super) since: Instant,
}

/// The connections kept for the leases of a pool, those of each runtime for itself: a runtime that is not driven keeps
/// none from the others.
struct Shelves<DB: Dialect>(Mutex<HashMap<Id, Vec<Kept<DB>>>>);

struct Kept<DB: Dialect> {
    warm: Warm<DB>,
    since: Instant,
}

impl<DB: Dialect> Default for Shelves<DB> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// The connection that was used last, if one is kept.
pub(super) fn take<DB: Dialect>(pool: &Pool<DB>) -> Option<Warm<DB>> {
    let shelves = of_pool::<Shelves<DB>, _>(pool);
    let is_fresh = |it: &mut Kept<DB>| it.since.elapsed() < 2 * KEEP;
    // Otherwise the process was stopped, and the connection may have died silently since.
    let kept = shelves.0.lock().get_mut(&Handle::current().id())?.pop_if(is_fresh)?;
    Some(kept.warm)
}

/// Keeps the connection. Returns it if others may need it.
pub(super) fn keep<DB: Dialect>(pool: &Pool<DB>, warm: Warm<DB>) -> Option<Warm<DB>> {
    if pool.is_closed() || warm.since.elapsed() >= MOST || !warm.is_own && is_full(pool) {
        return Some(warm);
    }
    let shelves = of_pool::<Shelves<DB>, _>(pool);
    let runtime = Handle::current().id();
    let mut all = shelves.0.lock();
    let is_new = !all.contains_key(&runtime);
    all.entry(runtime).or_default().push(Kept { warm, since: Instant::now() });
    drop(all);
    if is_new {
        let shelf = Guard::new(Shelf { shelves, runtime });
        tokio::spawn(return_unused(shelf, pool.clone()));
    }
    None
}

/// Closes what is kept: one of these connections has died, so the others may have died with it.
pub(super) fn close_all<DB: Dialect>(pool: &Pool<DB>) {
    let shelves = of_pool::<Shelves<DB>, _>(pool);
    let kept = shelves.0.lock().get_mut(&Handle::current().id()).map(mem::take).unwrap_or_default();
    close(kept);
}

fn close<DB: Dialect>(kept: Vec<Kept<DB>>) {
    for it in kept {
        drop(it.warm.conn.detach());
    }
}

/// The connections of one runtime, which its task returns. Exists for as long as the task.
struct Shelf<DB: Dialect> {
    shelves: Arc<Shelves<DB>>,
    runtime: Id,
}

impl<DB: Dialect> Hold for Shelf<DB> {
    fn abandon(self) {
        // The runtime has ended, and its connections with it.
        let kept = self.shelves.0.lock().remove(&self.runtime).unwrap_or_default();
        close(kept);
    }
}

impl<DB: Dialect> Shelf<DB> {
    /// The connections to return now. `None` if nothing was kept, and nothing is.
    fn unused(&self, pool: &Pool<DB>) -> Option<Vec<Kept<DB>>> {
        let is_needed = pool.is_closed() || is_full(pool);
        let mut all = self.shelves.0.lock();
        let kept = all.get_mut(&self.runtime)?;
        if kept.is_empty() {
            all.remove(&self.runtime);
            return None;
        }
        let now = Instant::now();
        Some(kept.extract_if(.., |it| is_needed && !it.warm.is_own || now >= it.since + KEEP).collect())
    }
}

async fn return_unused<DB: Dialect>(shelf: Guard<Shelf<DB>>, pool: Pool<DB>) {
    loop {
        sleep(KEEP / 2).await;
        let Some(unused) = shelf.unused(&pool) else { break };
        for it in unused {
            put_back(it.warm);
        }
    }
    drop(shelf.defuse());
}
