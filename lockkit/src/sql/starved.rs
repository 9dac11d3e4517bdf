//! Why no connection of a pool came free: how many are in use, how many callers wait, and what to do about it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection, Pool};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout},
};

use crate::{
    mutex::Mutex,
    observe,
    sql::{
        Dialect,
        pool_state::{of_pool, of_runtime},
        spare::{WhyNot, why_not},
    },
    value::error::Error,
};

/// Callers that wait for a connection of a pool; reported in [`Error::PoolStarved`].
#[derive(Default)]
struct Waiters {
    all: AtomicU32,
    /// Those with a statement about leases.
    leases: AtomicU32,
    /// The most of those with a statement about leases, and when, if they are more than the pool has connections.
    crowd: Mutex<Option<(Instant, u32)>>,
}

/// Longest time for the new connection that tests whether the server answers at all.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// For how long its answer counts. Those who ask have waited for longer.
const PROBE_LASTS: Duration = Duration::from_millis(100);

/// For how long a crowd counts: those who gave up at the same time ask for the reason one after another.
const CROWD_LASTS: Duration = Duration::from_secs(1);

impl Waiters {
    /// How many statements about leases wait, or have waited until a moment ago, if they are more than this.
    fn crowd(&self, connections: u32) -> Option<u32> {
        let before = self.crowd.lock().filter(|(at, _)| at.elapsed() < CROWD_LASTS).map_or(0, |(_, most)| most);
        let most = before.max(self.leases.load(Ordering::Relaxed));
        (most > connections).then_some(most)
    }
}

/// One caller that waits for a connection.
pub(super) struct Waiting {
    waiters: Arc<Waiters>,
    is_about_lease: bool,
    is_served: bool,
    connections: u32,
}

impl Waiting {
    pub(super) fn at<DB: Dialect>(pool: &Pool<DB>, is_about_lease: bool) -> Self {
        let waiters = of_pool::<Waiters, _>(pool);
        waiters.all.fetch_add(1, Ordering::Relaxed);
        waiters.leases.fetch_add(u32::from(is_about_lease), Ordering::Relaxed);
        Self { waiters, is_about_lease, is_served: false, connections: pool.options().get_max_connections() }
    }

    /// Whether more statements about leases wait than the pool has connections.
    pub(super) fn is_in_crowd(&self) -> bool {
        self.is_about_lease && self.waiters.leases.load(Ordering::Relaxed) > self.connections
    }

    /// It has got a connection.
    pub(super) fn served(mut self) {
        self.is_served = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.waiters.all.fetch_sub(1, Ordering::Relaxed);
        let leases = self.waiters.leases.fetch_sub(u32::from(self.is_about_lease), Ordering::Relaxed);
        if self.is_about_lease && !self.is_served && leases > self.connections {
            let mut crowd = self.waiters.crowd.lock();
            if crowd.is_none_or(|(at, most)| leases >= most || at.elapsed() >= CROWD_LASTS) {
                *crowd = Some((Instant::now(), leases));
            }
        }
    }
}

/// Whether the pool has as many connections as it may have, and all of them are in use.
pub(super) fn is_full<DB: Dialect>(pool: &Pool<DB>) -> bool {
    pool.size() >= pool.options().get_max_connections() && pool.num_idle() == 0
}

/// What a server says to another connection.
#[derive(Debug, Clone, Copy)]
enum Server {
    Accepts,
    Refuses,
}

/// [`Error::PoolStarved`] if all connections of the pool are in use and the server answers on another one.
pub(crate) async fn starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    let hint = "a caller that holds one connection and waits for another may wait for itself: give it the open \
                transaction (`&mut *tx`), or make the pool larger";
    starved_if(pool, None, |_| Some(hint)).await
}

/// As [`starved`], for a statement about leases, which is not confined to the pool.
pub(super) async fn leases_starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    match why_not(pool) {
        Some(WhyNot::IsLocal) => starved(pool).await,
        Some(WhyNot::SwitchedOff) => {
            let hint = "`own_connections(0)` leaves the leases no others: leave it out, or make the pool larger";
            starved_if(pool, None, |_| Some(hint)).await
        }
        Some(WhyNot::IsOwn) => {
            let hint = "they are the leases' own: give `own_connections` a larger number";
            starved_if(pool, None, |_| Some(hint)).await
        }
        None => {
            let refused = "the server refuses the leases a connection of their own: allow it more connections";
            let many = "statements about leases come faster than these and the leases' own serve them: see what the \
                        server waits for, send fewer at once, or make the pool larger";
            let crowd = of_pool::<Waiters, _>(pool).crowd(pool.options().get_max_connections());
            starved_if(pool, crowd, |server| match server {
                Server::Refuses => Some(refused),
                Server::Accepts if crowd.is_some() => Some(many),
                // A connection was there, and its statement was not answered.
                Server::Accepts => None,
            })
            .await
        }
    }
}

/// The `crowd` has given up, so that connections may be free now.
async fn starved_if<DB: Dialect>(
    pool: &Pool<DB>,
    crowd: Option<u32>,
    hint: impl FnOnce(Server) -> Option<&'static str>,
) -> Option<Error> {
    let (held, size) = (pool.size(), pool.options().get_max_connections());
    let waiting = of_pool::<Waiters, _>(pool).all.load(Ordering::Relaxed);
    if crowd.is_none() && !is_full(pool) {
        return None;
    }
    let server = if DB::IS_REMOTE { server(pool).await? } else { Server::Accepts };
    let hint = hint(server)?;
    observe::pool_starved();
    let waiting = if waiting > 0 { waiting } else { crowd.unwrap_or(1) };
    Some(Error::PoolStarved { held, waiting, size, hint })
}

/// Whether the server answers on another connection, even if it refuses that.
pub(super) async fn answers<DB: Dialect>(pool: &Pool<DB>) -> bool {
    !DB::IS_REMOTE || server(pool).await.is_some()
}

/// What the server of a pool said last to this runtime, and when.
#[derive(Default)]
struct Probe(AsyncMutex<Option<(Instant, Option<Server>)>>);

/// Opens another connection for a moment. `None` if the server does not answer.
///
/// Thousands of calls that get no answer at the same time share one connection. It is opened in a task: a caller that
/// is not polled must not keep the others from the answer.
async fn server<DB: Dialect>(pool: &Pool<DB>) -> Option<Server> {
    let asked = Instant::now();
    let (probe, options) = (of_runtime::<Probe, _>(pool, Probe::default), pool.connect_options());
    let asking = tokio::spawn(async move {
        let mut last = probe.0.lock().await;
        if let Some((at, said)) = *last
            && asked.saturating_duration_since(at) < PROBE_LASTS
        {
            return said;
        }
        let said = match timeout(PROBE_LIMIT, DB::Connection::connect_with(&options)).await {
            Ok(Ok(_)) => Some(Server::Accepts),
            Ok(Err(err)) if DB::accepts_nobody(&err) => None,
            Ok(Err(sqlx::Error::Database(_))) => Some(Server::Refuses),
            Ok(Err(_)) | Err(_) => None,
        };
        *last = Some((Instant::now(), said));
        said
    });
    timeout(PROBE_LIMIT, asking).await.ok()?.ok()?
}
