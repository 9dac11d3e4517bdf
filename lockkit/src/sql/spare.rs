//! Connections of lockkit's own, beside a pool whose connections are all in use.
//!
//! A pool is full when the application uses all of its connections, for example in transactions that wait for a row
//! lock. The leases that the process holds must be renewed all the same. So a statement about leases that gets no
//! connection of the full pool in time gets one of a small second pool, which has the options of the first. Each pool
//! has one second pool at most, which is opened on demand and closed when it is no longer used.
//!
//! Nothing else needs it. A session lock checks itself on its own connection. The transactions of row and named locks,
//! stocks and versions hold nothing while they wait for a connection, and a second pool for them would only raise the
//! limit that the application has set. Each connection is used for one statement at a time, so two are enough.

use std::{any::Any, sync::Arc, time::Duration};

use sqlx::{Pool, pool::CloseEvent};
use tokio::time::{sleep, timeout};

use crate::{
    body::guard::{Guard, Hold},
    lease::builder::LeasesBuilder,
    mutex::Mutex,
    observe,
    sql::{
        Dialect, LeaseOps,
        pool_state::{address, of_pool},
    },
};

/// Number of connections. Each is used for one statement about leases at a time, so few are enough for many leases.
const MOST: u32 = 2;

/// How long a connection stays open unused.
const IDLE: Duration = Duration::from_secs(10);

/// Longest time for closing the connections in order.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// What leases use when the pool is full.
#[derive(Default)]
struct WhenFull(Mutex<Option<Beside>>);

enum Beside {
    /// The second pool, a `Pool<DB>`.
    Spare(Box<dyn Any + Send>),
    /// Nothing, for this reason.
    Nothing(WhyNot),
}

/// Why a pool has no second one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhyNot {
    /// `own_connections(0)`.
    SwitchedOff,
    /// Its connections are lockkit's own: `own_connections(n)`.
    IsOwn,
    /// The database is in this process. On SQLite another connection to a database in memory is another database, and
    /// the connections of a full pool mostly wait for the write lock, which a renewal would wait for too.
    IsLocal,
}

/// Why the pool has no second one. `None` if it has, or can have.
pub(super) fn why_not<DB: Dialect>(pool: &Pool<DB>) -> Option<WhyNot> {
    if !DB::IS_REMOTE {
        return Some(WhyNot::IsLocal);
    }
    match &*of_pool::<WhenFull, _>(pool).0.lock() {
        Some(Beside::Nothing(why)) => Some(*why),
        Some(Beside::Spare(_)) | None => None,
    }
}

/// The second pool of this pool, which is opened if it is not open.
pub(super) fn spare<DB: Dialect>(pool: &Pool<DB>) -> Option<Pool<DB>> {
    if why_not(pool).is_some() || pool.is_closed() {
        return None;
    }
    let when_full = of_pool::<WhenFull, _>(pool);
    let mut beside = when_full.0.lock();
    if let Some(Beside::Spare(spare)) = &*beside
        && let Some(spare) = spare.downcast_ref::<Pool<DB>>().filter(|it| !it.is_closed())
    {
        // The password may have changed since.
        spare.set_connect_options((*pool.connect_options()).clone());
        return Some(spare.clone());
    }
    let most = MOST.min(pool.options().get_max_connections());
    let options = pool.options().clone().min_connections(0).max_connections(most).idle_timeout(IDLE);
    let spare = options.connect_lazy_with((*pool.connect_options()).clone());
    let before = beside.replace(Beside::Spare(Box::new(spare.clone())));
    drop(beside);
    drop(before);
    let open = Guard::new(Open { when_full, spare: spare.clone() });
    tokio::spawn(keep_open(open, pool.close_event()));
    Some(spare)
}

/// A second pool that can be found by the first one.
struct Open<DB: Dialect> {
    when_full: Arc<WhenFull>,
    spare: Pool<DB>,
}

impl<DB: Dialect> Hold for Open<DB> {
    fn abandon(self) {
        let is_this = |beside: &Beside| match beside {
            Beside::Spare(spare) => {
                spare.downcast_ref::<Pool<DB>>().is_some_and(|it| address(it) == address(&self.spare))
            }
            Beside::Nothing(_) => false,
        };
        // Closes its idle connections, if this was the last handle.
        let beside = self.when_full.0.lock().take_if(|it| is_this(it));
        drop(beside);
    }
}

/// Opens the first connection, and ends when there is none left, or when the first pool is closed or dropped. If its
/// runtime ends before that, the second pool is forgotten as well.
async fn keep_open<DB: Dialect>(open: Guard<Open<DB>>, mut closed: CloseEvent) {
    let spare = &open.spare;
    let used = async {
        // Not by the statement that needs it: connecting may take longer than that may wait.
        match spare.acquire().await {
            Ok(conn) => drop(conn),
            Err(err) => observe::tolerated("opening a connection for leases, as their pool had none in time", &err),
        }
        while spare.size() > 0 {
            sleep(IDLE).await;
        }
    };
    if closed.do_until(used).await.is_err() {
        _ = timeout(CLOSE_LIMIT, spare.close()).await;
    }
}

/// A second pool that was open ends when its connections are idle.
fn has_none<DB: Dialect>(pool: &Pool<DB>, why: WhyNot) {
    let before = of_pool::<WhenFull, _>(pool).0.lock().replace(Beside::Nothing(why));
    drop(before);
}

impl<DB: LeaseOps> LeasesBuilder<Pool<DB>> {
    /// Gives the leases a pool of this many connections at most, opened on demand, with the options of the given pool.
    /// Transactions still begin in the given pool.
    ///
    /// Without it, leases share the pool of the service, and a statement about leases that gets no connection because
    /// all of them are in use gets one of at most 2 of lockkit's own: after a sixteenth of the ttl, 100 ms at most.
    /// Where the pool is not full, that takes three times as long: a new connection takes long to open, or a free one
    /// is promised to a caller that nobody polls. All `Leases` of one pool share these two. They are opened when they
    /// are needed and closed when they were not used for 10 to 20 s, so a held lease is renewed, and a free one is
    /// granted, however busy the pool is. On SQLite there are none: there a full pool holds up its leases.
    ///
    /// So only few services need this: those whose pool is always full, and those that may open no further connections
    /// to the server. Zero switches lockkit's own connections off, for all `Leases` of the given pool. Renewals then
    /// wait until the service returns a connection, and a lease is lost if that takes longer than its ttl.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn own_connections(mut self, connections: u32) -> Self {
        if connections == 0 {
            has_none(&self.store, WhyNot::SwitchedOff);
            self.own = None;
            return self;
        }
        let options = self.store.options().clone().min_connections(0).max_connections(connections);
        let own = options.connect_lazy_with((*self.store.connect_options()).clone());
        has_none(&own, WhyNot::IsOwn);
        self.own = Some(own);
        self
    }
}
