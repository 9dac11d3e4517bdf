//! Why no connection of a pool came free: how many are in use, how many callers wait, and what to do about it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection, Pool};
use tokio::time::timeout;

use crate::{
    observe,
    sql::{
        Dialect,
        pool_state::of_pool,
        spare::{WhyNot, why_not},
    },
    value::error::Error,
};

/// Number of callers that wait for a connection of a pool; reported in [`Error::PoolStarved`].
#[derive(Default)]
struct Waiters(AtomicU32);

/// Longest time for the new connection that tests whether the server answers at all.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// One caller that waits for a connection.
pub(super) struct Waiting(Arc<Waiters>);

impl Waiting {
    pub(super) fn at<DB: Dialect>(pool: &Pool<DB>) -> Self {
        let waiters = of_pool::<Waiters, _>(pool);
        waiters.0.fetch_add(1, Ordering::Relaxed);
        Self(waiters)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the pool has as many connections as it may have, and all of them are in use.
pub(super) fn is_full<DB: Dialect>(pool: &Pool<DB>) -> bool {
    pool.size() >= pool.options().get_max_connections() && pool.num_idle() == 0
}

/// What a server says to another connection.
enum Server {
    Accepts,
    Refuses,
}

/// [`Error::PoolStarved`] if all connections of the pool are in use and the server answers on another one.
pub(crate) async fn starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    let hint = "a caller that holds one connection and waits for another may wait for itself: give it the open \
                transaction (`&mut *tx`), or make the pool larger";
    starved_if(pool, |_| Some(hint)).await
}

/// As [`starved`], for a statement about leases, which is not confined to the pool.
pub(super) async fn leases_starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    match why_not(pool) {
        Some(WhyNot::IsLocal) => starved(pool).await,
        Some(WhyNot::SwitchedOff) => {
            let hint = "`own_connections(0)` leaves the leases no others: leave it out, or make the pool larger";
            starved_if(pool, |_| Some(hint)).await
        }
        Some(WhyNot::IsOwn) => {
            let hint = "they are the leases' own: give `own_connections` a larger number";
            starved_if(pool, |_| Some(hint)).await
        }
        None => {
            let hint = "the server refuses the leases a connection of their own: allow it more connections";
            // Otherwise a connection was there, and its statement was not answered.
            starved_if(pool, |server| matches!(server, Server::Refuses).then_some(hint)).await
        }
    }
}

async fn starved_if<DB: Dialect>(pool: &Pool<DB>, hint: impl FnOnce(Server) -> Option<&'static str>) -> Option<Error> {
    let (held, size) = (pool.size(), pool.options().get_max_connections());
    let waiting = of_pool::<Waiters, _>(pool).0.load(Ordering::Relaxed).max(1);
    if !is_full(pool) {
        return None;
    }
    let server = if DB::IS_REMOTE { server(pool).await? } else { Server::Accepts };
    let hint = hint(server)?;
    observe::pool_starved();
    Some(Error::PoolStarved { held, waiting, size, hint })
}

/// Whether the server answers on another connection, even if it refuses that.
pub(super) async fn answers<DB: Dialect>(pool: &Pool<DB>) -> bool {
    !DB::IS_REMOTE || server(pool).await.is_some()
}

/// Opens another connection for a moment. `None` if the server does not answer.
async fn server<DB: Dialect>(pool: &Pool<DB>) -> Option<Server> {
    let options = pool.connect_options();
    match timeout(PROBE_LIMIT, DB::Connection::connect_with(&options)).await {
        Ok(Ok(_)) => Some(Server::Accepts),
        Ok(Err(sqlx::Error::Database(_))) => Some(Server::Refuses),
        Ok(Err(_)) | Err(_) => None,
    }
}
