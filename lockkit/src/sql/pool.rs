//! An operation borrows a connection of a pool, runs, and returns it.
//!
//! Without the short tries on SQLite (see `write`), an acquire beside four processes that wrote all the time took 5 s
//! and was then refused, although the lease was free.

use std::{io, panic::resume_unwind, sync::Arc, time::Duration};

use sqlx::{Database, Pool, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{Dialect, failed, failed_on_own_table};
use crate::{
    body::{
        guard::{Guard, Hold},
        task::no_answer,
    },
    sql::{
        pool_state::{of_pool, of_runtime},
        spare::spare,
        starved::{Waiting, is_full, leases_starved, starved},
        warm::{Kept, Warm},
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// Longest time for an idle connection to prove that it still works. The connection may have died silently, and sqlx
/// would wait for its answer as long as the caller does.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// Longest time to learn what a database is like, at the first use.
const GREET_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for a connection to prove that it still works when it returns to its pool.
const RETURN_LIMIT: Duration = Duration::from_millis(500);

/// Longest time for the rollback of a transaction, and to restore its session. After it, the connection is closed.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(1);

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
    let mut call = Call::new(conn);
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
    Ok(checked_out(pool, Reach::POOL, doing, key).await?.0)
}

/// How a call gets its connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    /// Longest time for an idle connection to prove that it still works.
    ping_limit: Duration,
    /// When to use one of lockkit's own connections because the pool is full. `None`: never.
    patience: Option<Duration>,
    /// Whether it may use a connection that was kept, and keeps its own.
    is_warm: bool,
    /// Whether the operation may be repeated if a connection that was kept turns out to be dead.
    may_repeat: bool,
    /// Whether it waits for its turn ([`Turns`]) to wait for a connection of a full pool.
    takes_turns: bool,
}

impl Reach {
    /// For the work of the application, which has the pool alone.
    pub(super) const POOL: Self =
        Self { ping_limit: PING_LIMIT, patience: None, is_warm: false, may_repeat: false, takes_turns: false };

    /// For takes of a stock.
    pub(super) const TAKE: Self = Self { is_warm: true, ..Self::POOL };

    /// For a lease whose ttl is not known.
    pub(super) const LEASE: Self =
        Self { ping_limit: PING_LIMIT, patience: Some(PATIENCE), is_warm: true, may_repeat: true, takes_turns: true };

    /// For a release. The answer to a repeated one would not tell whether the first was executed.
    pub(super) const RELEASE: Self = Self { may_repeat: false, ..Self::LEASE };

    /// For a lease with this ttl.
    pub(super) fn lease(ttl: Duration) -> Self {
        let ping_limit = (ttl / 8).clamp(Duration::from_millis(50), PING_LIMIT);
        Self { ping_limit, patience: Some((ttl / 16).min(PATIENCE)), ..Self::LEASE }
    }

    /// For the renewal of leases, the shortest of which has this ttl.
    pub(super) fn renewal(ttl: Duration) -> Self {
        Self { takes_turns: false, ..Self::lease(ttl) }
    }
}

/// Who may wait for a connection of a full pool. sqlx serves its callers in their order, so renewals would wait behind
/// thousands of claims that came at once, and the leases be lost. Here as many statements about leases stand in that
/// order as the pool has connections, and renewals beside them; the others wait for their turn.
struct Turns(Semaphore);

impl Turns {
    fn of<DB: Dialect>(pool: &Pool<DB>) -> Arc<Self> {
        let connections = usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX);
        of_runtime(pool, || Self(Semaphore::new(connections.clamp(1, Semaphore::MAX_PERMITS))))
    }

    /// Waits for a turn, which ends when it is dropped.
    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.0.acquire().await.ok()
    }
}

/// Gets a connection. The second value is whether it is one of lockkit's own.
async fn checked_out<DB: Dialect>(
    pool: &Pool<DB>,
    reach: Reach,
    doing: &'static str,
    key: Option<&Key>,
) -> Result<(PoolConnection<DB>, bool)> {
    let is_about_lease = reach.patience.is_some();
    let waiting = Waiting::at(pool, is_about_lease);
    let asked = Instant::now();
    // On a database in this process, renewals need its one lock for writers more than a connection.
    let acquired = if reach.takes_turns && DB::IS_REMOTE && (waiting.is_in_crowd() || is_full(pool)) {
        acquired_in_turn(pool, reach, asked).await
    } else {
        acquired_for(pool, reach, asked).await
    };
    match acquired {
        Ok(conn) => {
            waiting.served();
            Ok(conn)
        }
        Err(sqlx::Error::PoolTimedOut) => {
            let starved = if is_about_lease { leases_starved(pool).await } else { starved(pool).await };
            let failed = || failed::<DB>(doing, key, sqlx::Error::PoolTimedOut);
            // A request for a lease asks again where no answer came.
            Err(starved.unwrap_or_else(|| if is_about_lease { no_answer(doing, key) } else { failed() }))
        }
        Err(err) => Err(failed_on_own_table::<DB>(doing, key, err)),
    }
}

/// [`acquired_for`] when it is this statement's turn. Waits in a task: a caller that is not polled must not keep a turn
/// that others wait for.
async fn acquired_in_turn<DB: Dialect>(
    pool: &Pool<DB>,
    reach: Reach,
    asked: Instant,
) -> sqlx::Result<(PoolConnection<DB>, bool)> {
    let in_turn = {
        let pool = pool.clone();
        async move {
            let turns = Turns::of(&pool);
            let _turn = turns.turn().await;
            let (conn, is_own) = acquired_for(&pool, reach, asked).await?;
            // Its caller may have gone, on a thread without a runtime.
            Ok((Call::new(conn), is_own))
        }
    };
    // Aborted when it is dropped.
    let mut waiting = JoinSet::new();
    waiting.spawn(in_turn);
    match timeout(pool.options().get_acquire_timeout(), waiting.join_next()).await {
        Ok(Some(Ok(acquired))) => acquired.map(|(call, is_own)| (call.defuse().conn, is_own)),
        Ok(Some(Err(err))) if err.is_panic() => resume_unwind(err.into_panic()),
        Ok(_) | Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

/// Gets a connection for a statement that was `asked` for at that time.
async fn acquired_for<DB: Dialect>(
    pool: &Pool<DB>,
    reach: Reach,
    asked: Instant,
) -> sqlx::Result<(PoolConnection<DB>, bool)> {
    match reach.patience.filter(|_| DB::IS_REMOTE) {
        Some(patience) => acquired_from_either(pool, reach, patience, asked).await,
        None => acquired(pool, reach.ping_limit).await.map(|conn| (conn, false)),
    }
}

async fn acquired<DB: Dialect>(pool: &Pool<DB>, ping_limit: Duration) -> sqlx::Result<PoolConnection<DB>> {
    // Each is tried once: one may be promised to a caller that is not polled.
    let idle = if DB::IS_REMOTE { pool.num_idle() } else { 0 };
    for _ in 0..idle {
        if pool.num_idle() == 0 {
            break;
        }
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
    reach: Reach,
    patience: Duration,
    asked: Instant,
) -> sqlx::Result<(PoolConnection<DB>, bool)> {
    let own = async {
        // There must be time to open it before the pool gives up.
        let patience = patience.min(pool.options().get_acquire_timeout() / 4);
        sleep_until(asked + patience).await;
        if !is_full(pool) {
            // What it has free may be promised to a caller that is not polled.
            sleep(2 * patience).await;
        }
        let own = async {
            let spare = spare(pool)?;
            // It has fewer connections, so those who have a turn in the pool are too many for it.
            let turns = reach.takes_turns.then(|| Turns::of(&spare));
            let _turn = match &turns {
                Some(turns) => turns.turn().await,
                None => None,
            };
            acquired(&spare, reach.ping_limit).await.ok()
        };
        // Boxed: few callers need it.
        Box::pin(own).await
    };
    tokio::select! {
        biased;
        acquired = acquired(pool, reach.ping_limit) => acquired.map(|conn| (conn, false)),
        Some(own) = own => Ok((own, true)),
    }
}

/// A connection with a statement in flight. Dropping it closes the connection: the answer may never come, and until
/// then the connection would occupy a place in the pool.
struct Call<DB: Dialect> {
    conn: PoolConnection<DB>,
    /// `Drop` may run on a thread without a runtime.
    runtime: Handle,
    /// The connection's own busy timeout, while a shorter one is set.
    own_timeout: Option<Duration>,
}

impl<DB: Dialect> Call<DB> {
    fn new(conn: PoolConnection<DB>) -> Guard<Self> {
        Guard::new(Self { conn, runtime: Handle::current(), own_timeout: None })
    }
}

impl<DB: Dialect> Hold for Call<DB> {
    fn abandon(self) {
        let Self { mut conn, runtime, own_timeout } = self;
        let _inside = runtime.enter();
        if DB::IS_REMOTE {
            close(conn);
        } else if let Some(own_timeout) = own_timeout {
            runtime.spawn(async move {
                if DB::set_busy_timeout(&mut conn, own_timeout).await.is_err() {
                    close(conn);
                }
            });
        } else {
            // Inside the runtime, which sqlx needs for that.
            drop(conn);
        }
    }
}

/// A connection for one operation.
struct Lent<DB: Dialect> {
    call: Guard<Call<DB>>,
    grammar: DB::Grammar,
    /// Whether it is one of lockkit's own.
    is_own: bool,
    /// When its pool gave it.
    since: Instant,
    /// Whether it was kept, and so not pinged.
    is_warm: bool,
}

impl<DB: Dialect> Lent<DB> {
    /// One that was kept, if it may be, or one of the pool.
    async fn new(
        pool: &Pool<DB>,
        reach: Reach,
        may_be_warm: bool,
        doing: &'static str,
        key: Option<&Key>,
    ) -> Result<Self> {
        if may_be_warm
            && reach.is_warm
            && let Some(AfterCall { conn, grammar, own_timeout, is_own, since }) = kept(pool).take()
        {
            let mut call = Call::new(conn);
            call.get_mut().own_timeout = own_timeout;
            return Ok(Self { call, grammar, is_own, since, is_warm: true });
        }
        let of_pool = async {
            let (conn, is_own) = checked_out(pool, reach, doing, key).await?;
            let (call, grammar) = greeted(conn, pool, doing, key).await?;
            Ok(Self { call, grammar, is_own, since: Instant::now(), is_warm: false })
        };
        // Boxed: it would be most of each future, and statements about leases seldom need it.
        Box::pin(of_pool).await
    }

    /// After an operation that was answered.
    fn put_back(self, pool: &Pool<DB>, is_kept: bool) {
        let Self { call, grammar, is_own, since, is_warm: _ } = self;
        let Call { conn, own_timeout, runtime: _ } = call.defuse();
        let after = AfterCall { conn, grammar, own_timeout, is_own, since };
        if is_kept { kept(pool).keep(pool, after) } else { after.put_back() }
    }
}

/// A connection after a statement of lockkit's own.
struct AfterCall<DB: Dialect> {
    conn: PoolConnection<DB>,
    grammar: DB::Grammar,
    /// The connection's own busy timeout, while a shorter one is set.
    own_timeout: Option<Duration>,
    is_own: bool,
    since: Instant,
}

/// The connections of a pool that are kept for such statements.
fn kept<DB: Dialect>(pool: &Pool<DB>) -> Arc<Kept<AfterCall<DB>>> {
    of_pool(pool)
}

impl<DB: Dialect> Warm for AfterCall<DB> {
    fn is_own(&self) -> bool {
        self.is_own
    }

    fn since(&self) -> Instant {
        self.since
    }

    fn put_back(self) {
        let Self { conn, own_timeout, .. } = self;
        if own_timeout.is_none() {
            return check_in::<DB>(conn);
        }
        // Dropped, it sets the timeout first.
        let mut call = Call::new(conn);
        call.get_mut().own_timeout = own_timeout;
    }

    fn close(self) {
        close(self.conn);
    }
}

/// An operation that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    err: Error,
    /// Its connection had died before, so another one may do better.
    pub(super) on_dead: Option<Dead>,
}

/// A connection that had died before it was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dead {
    /// It was opened on a runtime that has ended.
    OfEndedRuntime,
    /// It was kept. It may have died while it was used, and the statement may have been executed.
    Kept,
}

impl From<Error> for Failed {
    fn from(err: Error) -> Self {
        Self { err, on_dead: None }
    }
}

impl Failed {
    pub(crate) fn into_error(self) -> Error {
        self.err
    }
}

/// Runs one operation on a connection of the pool.
pub(crate) async fn call<DB: Dialect, T>(
    pool: &Pool<DB>,
    reach: Reach,
    doing: &'static str,
    key: Option<&Key>,
    operation: impl AsyncFnOnce(&mut DB::Connection, DB::Grammar) -> sqlx::Result<T>,
) -> Result<T, Failed> {
    // On a local database, one that was kept has a short busy timeout, and this does not repeat what that refuses.
    let mut lent = Lent::new(pool, reach, DB::IS_REMOTE, doing, key).await?;
    let answer = operation(&mut lent.call.get_mut().conn, lent.grammar).await;
    let is_warm = lent.is_warm;
    match &answer {
        Err(err) if DB::IS_REMOTE && DB::fault(err) == Fault::Unavailable => {
            close(lent.call.defuse().conn);
            if is_warm {
                kept(pool).close_all();
            }
        }
        Err(_) => lent.put_back(pool, false),
        Ok(_) => lent.put_back(pool, DB::IS_REMOTE && reach.is_warm),
    }
    answer.map_err(|err| {
        let on_dead = if is_warm {
            (reach.may_repeat && DB::fault(&err) == Fault::Unavailable).then_some(Dead::Kept)
        } else {
            is_of_ended_runtime::<DB>(&err).then_some(Dead::OfEndedRuntime)
        };
        Failed { err: failed_on_own_table::<DB>(doing, key, err), on_dead }
    })
}

/// Runs an operation on this connection, and returns it to its pool. Dropped before the answer, this closes the
/// connection.
pub(super) async fn using<DB: Dialect, T>(
    conn: PoolConnection<DB>,
    operation: impl AsyncFnOnce(&mut DB::Connection) -> T,
) -> T {
    let mut call = Call::new(conn);
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
) -> Result<T, Failed> {
    if DB::IS_REMOTE {
        return call(pool, reach, doing, key, async |conn, grammar| operation(conn, grammar, Tries::ONCE).await).await;
    }
    let mut lent = Lent::new(pool, reach, true, doing, key).await?;
    let grammar = lent.grammar;
    let answer = async {
        let Call { conn, own_timeout, .. } = lent.call.get_mut();
        let patience = if let Some(known) = *own_timeout {
            known
        } else {
            let found = DB::busy_timeout(conn).await?;
            *own_timeout = Some(found);
            DB::set_busy_timeout_unanswered(conn, found.min(SHORT_TRY)).await;
            found
        };
        operation(conn, grammar, Tries { until: Some(Instant::now() + patience) }).await
    };
    let answer = answer.await;
    lent.put_back(pool, answer.is_ok() && reach.is_warm);
    answer.map_err(|err| failed_on_own_table::<DB>(doing, key, err).into())
}

/// Until when to retry for the lock of the whole database.
pub(super) struct Tries {
    until: Option<Instant>,
}

impl Tries {
    const ONCE: Self = Self { until: None };

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

/// Repeats the call while it fails on a connection that had died. Each failure closes one at least, so as many attempts
/// as the pool has connections reach a usable one. An operation that may have been executed is repeated only if its
/// `Reach` allows it.
///
/// Only an answer that `$is_final` says what has become of all attempts. Otherwise one that may have been executed
/// counts, and has no answer.
macro_rules! on_living_connection {
    ($pool:expr, $call:expr) => {
        on_living_connection!($pool, $call, final: |_: &_| true)
    };
    ($pool:expr, $call:expr, final: $is_final:expr) => {{
        let mut others = $pool.options().get_max_connections();
        let mut unanswered = None;
        let answer = loop {
            match $call.await {
                Err(failed) if others > 0 && failed.on_dead.is_some() => {
                    others -= 1;
                    if failed.on_dead == Some($crate::sql::pool::Dead::Kept) {
                        unanswered = Some(failed);
                    }
                }
                answer => break answer,
            }
        };
        let answer = match (answer, unanswered) {
            (Ok(answer), Some(failed)) if !$is_final(&answer) => Err(failed),
            (Err(_), Some(failed)) => Err(failed),
            (answer, _) => answer,
        };
        answer.map_err($crate::sql::pool::Failed::into_error)
    }};
}

pub(super) use on_living_connection;
pub(super) use tried;

/// Whether the connection was opened on a runtime that has ended. Its ping can succeed all the same: an answer that
/// arrives before it is read does not need the runtime's reactor.
fn is_of_ended_runtime<DB: Dialect>(err: &sqlx::Error) -> bool {
    DB::IS_REMOTE && matches!(err, sqlx::Error::Io(err) if err.kind() == io::ErrorKind::Other)
}

/// A connection in an unknown state: a statement may be in flight, a transaction may be open, or a session lock may be
/// held. Dropped, it is closed and does not return to its pool.
pub(crate) struct Unsettled<DB: Database> {
    pub(crate) conn: PoolConnection<DB>,
    /// `Drop` may run on a thread without a runtime.
    runtime: Handle,
}

impl<DB: Database> Unsettled<DB> {
    pub(crate) fn new(conn: PoolConnection<DB>) -> Self {
        Self { conn, runtime: Handle::current() }
    }
}

impl<DB: Database> Hold for Unsettled<DB> {
    fn abandon(self) {
        let _inside = self.runtime.enter();
        close(self.conn);
    }
}

/// Closes a connection at once. Does not wait for its statement and needs no runtime.
pub(crate) fn close<DB: Database>(conn: PoolConnection<DB>) {
    drop(conn.detach());
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
