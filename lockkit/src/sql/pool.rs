//! Every pool of a supported database is a lease store: an operation borrows a connection, runs, and returns it.
//!
//! Without the short tries on SQLite (see `write`), an acquire beside four processes that wrote all the time took 5 s
//! and was then refused, although the lease was free.

use std::{io, time::Duration};

use sqlx::{Pool, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};

use super::{Dialect, LeaseOps, failed, failed_on_own_table};
use crate::{
    body::{
        guard::{Guard, Hold},
        scope::Realm,
        task::no_answer,
    },
    lease::store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, Renewal},
    sql::{
        lease::{LastClaims, SweptTo, lease_sweep},
        locked::{database_locked, read, unless_held, unless_locked},
        pool_state::{address, of_pool},
        spare::spare,
        starved::{Waiting, is_full, leases_starved, starved},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
        token::Token,
    },
};

/// Longest time for an idle connection to prove that it still works. The connection may have died silently, and sqlx
/// would wait for its answer as long as the caller does.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// Longest time to learn what a database is like, at the first use.
const GREET_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for a connection to prove that it still works when it returns to its pool.
const RETURN_LIMIT: Duration = Duration::from_millis(500);

/// Longest wait for a connection of a full pool, before a lease uses one of lockkit's own. For a short ttl, a sixteenth
/// of it.
const PATIENCE: Duration = Duration::from_millis(100);

/// Busy timeout of one attempt to get the lock of the whole database. SQLite tries three times within it.
const SHORT_TRY: Duration = Duration::from_millis(3);

/// Gets a connection of the pool, after the probe of its database.
pub(crate) async fn connection<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    let (call, _grammar) = greeted(checkout(pool, doing, key).await?, pool, doing, key).await?;
    Ok(call.defuse().conn)
}

/// Probes the database of a connection. Dropped before the answer, it closes the connection.
async fn greeted<DB: Dialect>(
    conn: PoolConnection<DB>,
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<(Guard<Call<DB>>, DB::Grammar)> {
    let mut call = Guard::new(Call { conn, runtime: Handle::current(), waited: None });
    match timeout(GREET_LIMIT, DB::greet(&mut call.get_mut().conn, pool)).await {
        Ok(Ok(grammar)) => Ok((call, grammar)),
        Ok(Err(err)) => Err(failed::<DB>(doing, key, err)),
        Err(_) => Err(no_answer(doing, key)),
    }
}

/// Gets a connection of the pool.
pub(crate) async fn checkout<DB: Dialect>(
    pool: &Pool<DB>,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    checked_out(pool, Reach::POOL, doing, key).await
}

/// How a call gets its connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    /// Longest time for an idle connection to prove that it still works.
    ping_limit: Duration,
    /// When to use one of lockkit's own connections because the pool is full. `None`: never.
    patience: Option<Duration>,
}

impl Reach {
    /// For the work of the application, which has the pool alone.
    pub(super) const POOL: Self = Self { ping_limit: PING_LIMIT, patience: None };

    /// For a lease whose ttl is not known.
    pub(super) const LEASE: Self = Self { ping_limit: PING_LIMIT, patience: Some(PATIENCE) };

    /// For a lease with this ttl.
    pub(super) fn lease(ttl: Duration) -> Self {
        let ping_limit = (ttl / 8).clamp(Duration::from_millis(50), PING_LIMIT);
        Self { ping_limit, patience: Some((ttl / 16).min(PATIENCE)) }
    }
}

async fn checked_out<DB: Dialect>(
    pool: &Pool<DB>,
    reach: Reach,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<PoolConnection<DB>> {
    let _waiting = Waiting::at(pool);
    let acquired = match reach.patience.filter(|_| DB::IS_REMOTE) {
        Some(patience) => acquired_from_either(pool, reach.ping_limit, patience).await,
        None => acquired(pool, reach.ping_limit).await,
    };
    match acquired {
        Ok(conn) => Ok(conn),
        Err(sqlx::Error::PoolTimedOut) => {
            let starved = if reach.patience.is_some() { leases_starved(pool).await } else { starved(pool).await };
            Err(starved.unwrap_or_else(|| failed::<DB>(doing, key, sqlx::Error::PoolTimedOut)))
        }
        Err(err) => Err(failed_on_own_table::<DB>(doing, key, err)),
    }
}

async fn acquired<DB: Dialect>(pool: &Pool<DB>, ping_limit: Duration) -> sqlx::Result<PoolConnection<DB>> {
    while DB::IS_REMOTE && pool.num_idle() > 0 {
        // Otherwise dropping the future closed the connection that did not answer.
        if let Ok(acquired) = timeout(ping_limit, pool.acquire()).await {
            return acquired;
        }
    }
    pool.acquire().await
}

/// Gets a connection of the pool, or one of lockkit's own if the pool has none in time.
async fn acquired_from_either<DB: Dialect>(
    pool: &Pool<DB>,
    ping_limit: Duration,
    patience: Duration,
) -> sqlx::Result<PoolConnection<DB>> {
    let own = async {
        // There must be time to open it before the pool gives up. A pool that was not full may be full the next time.
        let patience = patience.min(pool.options().get_acquire_timeout() / 4);
        sleep(patience).await;
        while !is_full(pool) {
            sleep(patience).await;
        }
        let own = async { acquired(&spare(pool)?, ping_limit).await.ok() };
        // Boxed: few callers need it.
        Box::pin(own).await
    };
    tokio::select! {
        biased;
        acquired = acquired(pool, ping_limit) => acquired,
        Some(own) = own => Ok(own),
    }
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
    reach: Reach,
    doing: &'static str,
    key: Option<&Key>,
    operation: impl AsyncFnOnce(&mut DB::Connection, DB::Grammar) -> sqlx::Result<T>,
) -> Result<T> {
    let conn = checked_out(pool, reach, doing, key).await?;
    let (mut call, grammar) = greeted(conn, pool, doing, key).await?;
    let answer = operation(&mut call.get_mut().conn, grammar).await;
    let conn = call.defuse().conn;
    match &answer {
        Err(err) if DB::IS_REMOTE && DB::fault(err) == Fault::Unavailable => drop(conn.detach()),
        _ => check_in::<DB>(conn),
    }
    answer.map_err(|err| failed_on_own_table::<DB>(doing, key, err))
}

/// Runs an operation on this connection, and returns it to its pool. Dropped before the answer, this closes the
/// connection.
pub(super) async fn using<DB: Dialect, T>(
    conn: PoolConnection<DB>,
    operation: impl AsyncFnOnce(&mut DB::Connection) -> T,
) -> T {
    let mut call = Guard::new(Call { conn, runtime: Handle::current(), waited: None });
    let done = operation(&mut call.get_mut().conn).await;
    check_in::<DB>(call.defuse().conn);
    done
}

/// As [`call`], for an operation that writes a lease.
///
/// On a database with one lock for all writers, this waits for the lock in many short attempts, for as long as the
/// connection's own busy timeout. SQLite's own wait (<https://www.sqlite.org/c3ref/busy_timeout.html>) soon sleeps for
/// 100 ms between two attempts, and may never get the lock when others write all the time.
pub(super) async fn write<DB: Dialect, T>(
    pool: &Pool<DB>,
    reach: Reach,
    doing: &'static str,
    key: Option<&Key>,
    operation: impl AsyncFnOnce(&mut DB::Connection, DB::Grammar, Tries) -> sqlx::Result<T>,
) -> Result<T> {
    if DB::IS_REMOTE {
        let once = Tries { until: None };
        return call(pool, reach, doing, key, async |conn, grammar| operation(conn, grammar, once).await).await;
    }
    let conn = checked_out(pool, reach, doing, key).await?;
    let mut call = Guard::new(Call { conn, runtime: Handle::current(), waited: None });
    let answer = async {
        let Call { conn, waited, .. } = call.get_mut();
        let grammar = DB::greet(conn, pool).await?;
        *waited = DB::waits_for(conn).await?;
        let wait = waited.unwrap_or_default();
        DB::wait_for_unanswered(conn, wait.min(SHORT_TRY)).await;
        operation(conn, grammar, Tries { until: Some(Instant::now() + wait) }).await
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

/// Repeats the call while it fails on a connection that was opened on an ended runtime. Each failure closes one, so as
/// many attempts as the pool has connections reach a usable one. The operations of a store can be repeated.
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

#[cfg(feature = "shedlock")]
pub(super) use on_living_connection;
pub(super) use tried;

/// Whether the connection was opened on a runtime that has ended. Its ping can succeed all the same: an answer that
/// arrives before it is read does not need the runtime's reactor.
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

impl<DB: LeaseOps> LeaseStore for Pool<DB> {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let last = of_pool::<LastClaims, _>(self);
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(claim.ttl), "acquiring lease", Some(&claim.key), async |conn, grammar, tries| {
                let sent = Instant::now();
                let acquired: sqlx::Result<_> = tried!(tries, DB::lease_acquire(conn, grammar, claim, &last));
                acquired.map(|it| match it {
                    Acquired::Granted(grant) => Acquired::Granted(grant.sent(sent)),
                    held @ Acquired::Held { .. } => held,
                })
            })
        );
        unless_held::<DB, _>(answer, &claim.key, Acquired::Held { free_in: None })
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let Some(first) = claims.first() else { return Ok(AcquiredAll::Granted(Vec::new())) };
        let answer = on_living_connection!(
            self,
            call(self, Reach::lease(first.ttl), "acquiring leases", Some(&first.key), async |conn, grammar| {
                let sent = Instant::now();
                let acquired = DB::lease_acquire_all(conn, grammar, claims).await?;
                Ok(match acquired {
                    AcquiredAll::Granted(grants) => {
                        AcquiredAll::Granted(grants.into_iter().map(|it| it.sent(sent)).collect())
                    }
                    held @ AcquiredAll::Held { .. } => held,
                })
            })
        );
        unless_held::<DB, _>(answer, &first.key, AcquiredAll::Held { key: first.key.clone(), free_in: None })
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "looking at lease", Some(key), async |conn, _| DB::lease_look(conn, key).await)
        ))
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        let Some(first) = renewals.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, Reach::lease(first.ttl), "renewing leases", Some(&first.key), async |conn, _, tries| {
                tried!(tries, DB::lease_renew(conn, renewals))
            })
        );
        unless_locked(answer, vec![Answer::Busy; renewals.len()])
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, Reach::LEASE, "releasing lease", Some(key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release(conn, grammar, key, token, min_hold))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        let answer = on_living_connection!(
            self,
            write(self, Reach::LEASE, "releasing lease", Some(key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release_unpinned(conn, grammar, key, token))
            })
        );
        unless_locked(answer, Answer::Busy)
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let Some(first) = releases.first() else { return Ok(Vec::new()) };
        let answer = on_living_connection!(
            self,
            write(self, Reach::LEASE, "releasing leases", Some(&first.key), async |conn, grammar, tries| {
                tried!(tries, DB::lease_release_all(conn, grammar, releases))
            })
        );
        unless_locked(answer, vec![Answer::Busy; releases.len()])
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        read!(on_living_connection!(
            self,
            call(self, Reach::LEASE, "listing leases", None, async |conn, _| DB::lease_list(conn, prefix, limit).await)
        ))
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        on_living_connection!(
            self,
            call(self, Reach::LEASE, "sweeping leases", None, async |conn, _| {
                lease_sweep::<DB>(conn, &of_pool::<SweptTo, _>(self), retention, limit).await
            })
        )
    }

    async fn unanswered(&self) -> Option<Error> {
        let starved = leases_starved(self).await;
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
