//! Every pool of a supported database is a lease store: an operation borrows a connection, runs, and returns it.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{Connection, Pool, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};

use super::{Dialect, LeaseOps, failed, failed_on_own_table};
use crate::{
    error::{Error, Fault, Result},
    guard::{Guard, Hold},
    key::Key,
    lease::builder::LeasesBuilder,
    lease::store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, Renewal, Token},
    scope::Realm,
    sql::lease::{LastClaims, lease_sweep},
    sql::locked::{database_locked, read, unless_held, unless_locked},
    task::no_answer,
};

/// Number of callers that wait for a connection, by pool; reported in [`Error::PoolStarved`]. A pool without waiters
/// has no entry.
static WAITING: LazyLock<Mutex<HashMap<usize, u32>>> = LazyLock::new(Mutex::default);

/// Longest time for an idle connection to prove that it still works. The connection may have died silently, and sqlx
/// would wait for its answer as long as the caller does.
pub(crate) const PING_LIMIT: Duration = Duration::from_secs(1);

/// Longest time to learn what a database is like, at the first use.
const GREET_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for a connection to prove that it still works when it returns to its pool.
const RETURN_LIMIT: Duration = Duration::from_millis(500);

/// Longest time for the new connection that tests whether the server answers at all.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// Busy timeout of one attempt to get the lock of the whole database. SQLite tries three times within it.
const SHORT_TRY: Duration = Duration::from_millis(3);

/// Gets a connection of the pool, after the probe of its database.
pub(crate) async fn connection<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    greeted(checkout(pool, doing, key).await?, pool, doing, key).await.map(|call| call.defuse().conn)
}

/// Probes the database of a connection. Dropped before the answer, it closes the connection.
async fn greeted<DB: Dialect>(
    conn: PoolConnection<DB>,
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<Guard<Call<DB>>> {
    let mut call = Guard::new(Call { conn, runtime: Handle::current(), waited: None });
    match timeout(GREET_LIMIT, DB::greet(&mut call.get_mut().conn, pool)).await {
        Ok(()) => Ok(call),
        Err(_) => Err(no_answer(doing, key)),
    }
}

/// Gets a connection of the pool.
pub(crate) async fn checkout<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    checked_out(pool, PING_LIMIT, doing, key).await
}

async fn checked_out<DB: Dialect>(
    pool: &Pool<DB>,
    ping_limit: Duration,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    let _waiting = Waiting::at(pool);
    loop {
        let acquired = if DB::IS_REMOTE && pool.num_idle() > 0 {
            match timeout(ping_limit, pool.acquire()).await {
                Ok(acquired) => acquired,
                // Dropping the future closed the connection that did not answer.
                Err(_) => continue,
            }
        } else {
            pool.acquire().await
        };
        return match acquired {
            Ok(conn) => Ok(conn),
            Err(sqlx::Error::PoolTimedOut) => {
                Err(starved(pool).await.unwrap_or_else(|| failed::<DB>(doing, key, sqlx::Error::PoolTimedOut)))
            }
            Err(err) => Err(failed_on_own_table::<DB>(doing, key, err)),
        };
    }
}

/// [`Error::PoolStarved`] if all connections of the pool are in use and the server answers on another one.
pub(crate) async fn starved<DB: Dialect>(pool: &Pool<DB>) -> Option<Error> {
    let (held, size) = (pool.size(), pool.options().get_max_connections());
    let waiting = waiting().get(&address(pool)).copied().unwrap_or(0).max(1);
    if held < size || pool.num_idle() > 0 {
        return None;
    }
    let starved = Error::PoolStarved { held, waiting, size };
    answers(pool).await.then_some(starved)
}

/// Whether the server answers on a new connection, even if it refuses that.
pub(super) async fn answers<DB: Dialect>(pool: &Pool<DB>) -> bool {
    if !DB::IS_REMOTE {
        return true;
    }
    let options = pool.connect_options();
    let connected = timeout(PROBE_LIMIT, DB::Connection::connect_with(&options)).await;
    matches!(connected, Ok(Ok(_) | Err(sqlx::Error::Database(_))))
}

/// A connection with a statement in flight. Dropping it closes the connection: the answer may never come, and until
/// then the connection would occupy a place in the pool.
struct Call<DB: Dialect> {
    conn: PoolConnection<DB>,
    /// `Drop` may run on a thread without a runtime.
    runtime: Handle,
    /// The connection's own busy timeout, while a shorter one is set.
    waited: Option<Duration>,
}

impl<DB: Dialect> Hold for Call<DB> {
    fn abandon(self) {
        let Self { mut conn, runtime, waited } = self;
        let _inside = runtime.enter();
        if DB::IS_REMOTE {
            drop(conn.detach());
        } else if let Some(waited) = waited {
            runtime.spawn(async move {
                if DB::wait_for(&mut conn, waited).await.is_err() {
                    drop(conn.detach());
                }
            });
        } else {
            // Inside the runtime, which sqlx needs for that.
            drop(conn);
        }
    }
}

/// Runs one operation on a connection of the pool.
pub(crate) async fn call<DB: Dialect, T>(
    pool: &Pool<DB>,
    ping_limit: Duration,
    doing: &'static str,
    key: Option<&Key>,
    operation: impl AsyncFnOnce(&mut DB::Connection) -> sqlx::Result<T>,
) -> Result<T> {
    let conn = checked_out(pool, ping_limit, doing, key).await?;
    let mut call = greeted(conn, pool, doing, key).await?;
    let answer = operation(&mut call.get_mut().conn).await;
    let conn = call.defuse().conn;
    match &answer {
        Err(err) if DB::IS_REMOTE && DB::fault(err) == Fault::Unavailable => drop(conn.detach()),
        _ => check_in::<DB>(conn),
    }
    answer.map_err(|err| failed_on_own_table::<DB>(doing, key, err))
}

/// As [`call`], for an operation that writes a lease.
///
/// On a database with one lock for all writers, this waits for the lock in many short attempts, for as long as the
/// connection's own busy timeout. SQLite's own wait (<https://www.sqlite.org/c3ref/busy_timeout.html>) soon sleeps for
/// 100 ms between two attempts, and may never get the lock when others write all the time.
pub(super) async fn write<DB: Dialect, T>(
    pool: &Pool<DB>,
    ping_limit: Duration,
    doing: &'static str,
    key: Option<&Key>,
    operation: impl AsyncFnOnce(&mut DB::Connection, Tries) -> sqlx::Result<T>,
) -> Result<T> {
    if DB::IS_REMOTE {
        return call(pool, ping_limit, doing, key, async |conn| operation(conn, Tries { until: None }).await).await;
    }
    let conn = checked_out(pool, ping_limit, doing, key).await?;
    let mut call = Guard::new(Call { conn, runtime: Handle::current(), waited: None });
    let answer = async {
        let Call { conn, waited, .. } = call.get_mut();
        *waited = DB::waits_for(conn).await?;
        let wait = waited.unwrap_or_default();
        DB::wait_for_unanswered(conn, wait.min(SHORT_TRY)).await;
        operation(conn, Tries { until: Some(Instant::now() + wait) }).await
    };
    let answer = answer.await;
    // Dropping the call restores the busy timeout, in the background.
    drop(call);
    answer.map_err(|err| failed_on_own_table::<DB>(doing, key, err))
}

/// Until when to retry for the lock of the whole database.
pub(super) struct Tries {
    until: Option<Instant>,
}

impl Tries {
    /// Retries until this moment instead, if given.
    pub(super) fn by(self, until: Option<Instant>) -> Self {
        Self { until: self.until.map(|its_own| until.unwrap_or(its_own)) }
    }

    /// Whether to retry after this error. Sleeps for a moment first.
    pub(super) async fn again<DB: Dialect>(&self, err: &sqlx::Error) -> bool {
        let again = DB::fault(err) == Fault::Contended && self.until.is_some_and(|it| Instant::now() < it);
        if again {
            sleep(Duration::from_millis(1)).await;
        }
        again
    }
}

/// Retries the operation while it is refused because of the lock of the whole database.
macro_rules! tried {
    ($tries:ident, $operation:expr) => {
        loop {
            match $operation.await {
                Err(err) if $tries.again::<DB>(&err).await => {}
                answer => break answer,
            }
        }
    };
}

/// Repeats the call while it fails on a connection that was opened on an ended runtime. Each failure closes one, so as many attempts
/// as the pool has connections reach a usable one. The operations of a store can be repeated.
macro_rules! on_living_connection {
    ($pool:expr, $call:expr) => {{
        let mut others = $pool.options().get_max_connections();
        loop {
            match $call.await {
                Err(err) if others > 0 && is_of_ended_runtime::<DB>(&err) => others -= 1,
                answer => break answer,
            }
        }
    }};
}

pub(super) use {on_living_connection, tried};

/// Whether the connection was opened on a runtime that has ended. Its ping can succeed all the same: an answer that arrives before it
/// is read does not need the runtime's reactor.
pub(super) fn is_of_ended_runtime<DB: Dialect>(err: &Error) -> bool {
    DB::IS_REMOTE && matches!(err.as_sqlx(), Some(sqlx::Error::Io(err)) if err.kind() == io::ErrorKind::Other)
}

/// Returns the connection to the pool in the background. sqlx pings it first, without a timeout of its own.
pub(crate) fn check_in<DB: Dialect>(mut conn: PoolConnection<DB>) {
    if DB::IS_REMOTE {
        let returning = conn.return_to_pool();
        tokio::spawn(async move { _ = timeout(RETURN_LIMIT, returning).await });
    }
}

/// As [`check_in`], in a task that is in the background already.
pub(crate) async fn checked_in<DB: Dialect>(mut conn: PoolConnection<DB>) {
    if DB::IS_REMOTE {
        _ = timeout(RETURN_LIMIT, conn.return_to_pool()).await;
    }
}

/// Longest time for a ping before an operation on a lease with this ttl.
pub(super) fn ping_limit(ttl: Duration) -> Duration {
    (ttl / 8).clamp(Duration::from_millis(50), PING_LIMIT)
}

/// One caller that waits for a connection.
struct Waiting(usize);

impl Waiting {
    fn at<DB: Dialect>(pool: &Pool<DB>) -> Self {
        *waiting().entry(address(pool)).or_default() += 1;
        Self(address(pool))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Entry::Occupied(mut waiters) = waiting().entry(self.0) {
            *waiters.get_mut() -= 1;
            if *waiters.get() == 0 {
                waiters.remove();
            }
        }
    }
}

/// The address of the options, which all handles to one pool share.
pub(crate) fn address<DB: Dialect>(pool: &Pool<DB>) -> usize {
    std::ptr::from_ref(pool.options()).addr()
}

/// No code panics while it holds the lock.
fn waiting() -> MutexGuard<'static, HashMap<usize, u32>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<DB: LeaseOps> LeaseStore for Pool<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let last = LastClaims::through(address(self));
        let answer = on_living_connection!(
            self,
            write(self, ping_limit(claim.ttl), "acquiring lease", Some(&claim.key), async |conn, tries| {
                tried!(tries, DB::lease_acquire(conn, claim, &last))
            })
        );
        unless_held::<DB, _>(answer, &claim.key, Acquired::Held { free_in: None })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let Some(first) = claims.first() else { return Ok(AcquiredAll::Granted(Vec::new())) };
        let answer = on_living_connection!(
            self,
            call(self, ping_limit(first.ttl), "acquiring leases", Some(&first.key), async |conn| {
                DB::lease_acquire_all(conn, claims).await
            })
        );
        unless_held::<DB, _>(answer, &first.key, AcquiredAll::Held { key: first.key.clone(), free_in: None })
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, PING_LIMIT, "looking at lease", Some(key), async |conn| DB::lease_look(conn, key).await)
        ))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let Some(first) = renewals.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, ping_limit(first.ttl), "renewing leases", Some(&first.key), async |conn, tries| {
                tried!(tries, DB::lease_renew(conn, renewals))
            })
        );
        unless_locked(answer, vec![Answer::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, PING_LIMIT, "releasing lease", Some(key), async |conn, tries| {
                tried!(tries, DB::lease_release(conn, key, token, min_hold))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, PING_LIMIT, "releasing lease", Some(key), async |conn, tries| {
                tried!(tries, DB::lease_release_unpinned(conn, key, token))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let Some(first) = releases.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, PING_LIMIT, "releasing leases", Some(&first.key), async |conn, tries| {
                tried!(tries, DB::lease_release_all(conn, releases))
            })
        );
        unless_locked(answer, vec![Answer::Busy; releases.len()])
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, PING_LIMIT, "listing leases", None, async |conn| DB::lease_list(conn, prefix, limit).await)
        ))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        on_living_connection!(
            self,
            call(self, PING_LIMIT, "sweeping leases", None, async |conn| {
                lease_sweep::<DB>(conn, address(self), retention, limit).await
            })
        )
    }

    async fn unanswered(&self) -> Option<Error> {
        let starved = starved(self).await;
        // A database in this process always answers, unless a writer has it locked.
        starved.or_else(|| (!DB::IS_REMOTE).then(|| database_locked(None, None)))
    }

    fn profile(&self) -> Profile {
        Profile {
            always_answers: !DB::IS_REMOTE,
            shows_writes_at_once: DB::shows_writes_at_once(self),
            ..Profile::default()
        }
    }
}

impl<DB: LeaseOps> LeasesBuilder<Pool<DB>> {
    /// Gives the leases a pool of this many connections, opened on demand, with the options of the given pool.
    ///
    /// Without it the leases share the service's pool, and renewals wait when all of its connections are in use. A
    /// service whose transactions acquire leases needs either this or a pool larger than the number of such
    /// transactions: see [`Error::PoolStarved`]. Two connections are enough for most services. Transactions still begin
    /// in the given pool.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn own_connections(mut self, connections: u32) -> Self {
        let options = self.store.options().clone().min_connections(0).max_connections(connections.max(1));
        self.own = Some(options.connect_lazy_with((*self.store.connect_options()).clone()));
        self
    }
}

impl Realm {
    /// The realm of this pool's named locks.
    pub(crate) fn named<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Named(address(pool))
    }

    /// The realm of this pool's row locks.
    pub(crate) fn rows<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Rows(address(pool))
    }

    /// The realm of this pool's session locks.
    pub(crate) fn sessions<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Sessions(address(pool))
    }

    /// Whether the lock belongs to a transaction that began in this pool and is open while the body runs.
    pub(crate) fn has_transaction_of<DB: Dialect>(self, pool: &Pool<DB>) -> bool {
        matches!(self, Self::Named(it) | Self::Rows(it) if it == address(pool))
    }
}
