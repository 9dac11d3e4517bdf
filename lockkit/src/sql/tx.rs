//! Transactions that are cancel-safe to begin and rolled back unless they are committed.
//!
//! A transaction that owns its connection makes `begin` cancel-safe: a connection whose BEGIN may be in flight is
//! closed. That needs `TransactionManager`, which sqlx does not re-export; hence the dependency on `sqlx-core`.
//!
//! A dropped future may be waiting for a lock, and its connection is busy until the lock is granted. So the rollback of
//! a dropped transaction runs in the background, for 1 s, and then the connection is closed. A `Tx` notes what it knows
//! of its statements (`Step`), because sqlx's MySQL driver may lose its step: it reads a packet in two steps and does
//! not count the packets of a PREPARE. Its decoder would then panic, in lockkit's ROLLBACK or in the ping of the pool.
//! So on MySQL and MariaDB, a dropped `Tx` is rolled back on its connection only if all statements were answered.
//!
//! The statement of a dropped body is not cancelled on the server. That would need the number of the server's session,
//! which sqlx does not show, and a connection beside a pool that may be full; and a cancel that arrives late must not
//! meet the next user of the session. The servers can look for their clients by themselves. `begin` does not set
//! `client_connection_check_interval`, because servers before PostgreSQL 14 and on some systems refuse it, which would
//! fail the transaction.

use std::{
    fmt,
    future::Future,
    ops::{Deref, DerefMut},
    panic::Location,
    time::Duration,
};

use sqlx::{Database, Pool, Transaction, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

use crate::{
    body::{
        commits::CommitSent,
        guard::{Guard, Hold},
        scope::is_under,
        task::{is_answered, no_answer},
    },
    observe,
    policy::Wait,
    sql::{
        AsConnection, Dialect, END_LIMIT, Unsettled, checked_in, close, connection, counted_depth, depth, failed,
        in_step,
        long::OpenSince,
        reuse::{Reuse, put_back},
        sealed,
    },
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// Longest time to learn at the first use of a pool whether its server has locks.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for a connection that was kept to begin a transaction. It may have died silently.
const KEPT_LIMIT: Duration = Duration::from_secs(1);

const BEGINNING: &str = "beginning a transaction";
const COMMITTING: &str = "committing";
const ROLLING_BACK: &str = "rolling back";

/// The key of the error when SQLite's write lock is held.
const WRITE_LOCK: &str = "the write lock of the database";

/// Advice for a task that requests a lock held by its own transaction.
pub(crate) const PASS_TX: &str = "hand the open transaction (`&mut *tx`) to the code that needs the lock, instead of \
                                  beginning another one";

/// Begins a transaction: READ COMMITTED on PostgreSQL, MySQL and MariaDB, with the write lock (`BEGIN IMMEDIATE`) on
/// SQLite.
///
/// Under READ COMMITTED, each statement after a lock sees the changes that were committed before the lock was granted.
/// Under REPEATABLE READ, the first read fixes the snapshot of all later reads, and updates are lost without an error.
///
/// On MySQL and MariaDB, autocommit is off until the transaction ends. Statements after a deadlock are therefore never
/// committed. In a `sqlx::Transaction`, each statement after a deadlock is committed by itself.
///
/// On SQLite, `begin` waits for other writers for [`Wait::DEFAULT`](crate::Wait::DEFAULT), 10 s. The connection's busy
/// timeout does not matter.
///
/// A transaction that is open for 10 s is warned of once, with the line of this call:
/// [`warn_of_long_transactions`](crate::dialect::warn_of_long_transactions).
///
/// # Errors
/// [`Error::Contended`] when SQLite's write lock stays taken; [`Error::Reentrant`] on SQLite in a function under a row
/// or named lock of the same pool, whose transaction has the write lock; [`Error::PoolStarved`] when all connections of
/// the pool stay in use; [`Error::Database`] otherwise.
///
/// # Cancel safety
/// Dropping this future at any point leaves no open transaction behind: a connection that may have begun one is
/// closed. (`Pool::begin` of sqlx 0.9 may return it to the pool instead, inside the transaction:
/// <https://github.com/launchbadge/sqlx/issues/4385>.)
///
/// # Example
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t (id INTEGER)").execute(&pool).await?;
/// let mut tx = lockkit::begin(&pool).await?;
/// sqlx::query("INSERT INTO t VALUES (1)").execute(&mut *tx).await?;
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[track_caller]
pub fn begin<DB: Dialect>(pool: &Pool<DB>) -> impl Future<Output = Result<Tx<DB>>> + Send {
    begin_within(pool, None, None, Location::caller())
}

/// As [`begin`], with a bound on the wait for SQLite's write lock, and a deadline for the whole call. `at` is the place
/// in the source that a warning names.
pub(crate) async fn begin_within<DB: Dialect>(
    pool: &Pool<DB>,
    wait: Option<Wait>,
    deadline: Option<Instant>,
    at: &'static Location<'static>,
) -> Result<Tx<DB>> {
    refuse_under_own_lock(pool)?;
    let terms = Terms { wait, deadline, started: Instant::now(), at };
    if let Some(kept) = Opening::kept(pool)
        && let Some(begun) = if_alive(pool, kept.begin(pool, terms)).await
    {
        return begun;
    }
    Opening::new(pool, BEGINNING, None).await?.begin(pool, terms).await
}

/// What a connection that was kept has answered. `None` if it has died since, or is not as it should be: a transaction
/// that has begun on it ends with it, and so may the others have died.
pub(crate) async fn if_alive<DB: Dialect, T>(
    pool: &Pool<DB>,
    answer: impl Future<Output = Result<T>>,
) -> Option<Result<T>> {
    let limit = if DB::IS_REMOTE { KEPT_LIMIT } else { Duration::MAX };
    match timeout(limit, answer).await {
        Err(_) | Ok(Err(Error::Database { .. })) => {
            Reuse::of(pool).iter().for_each(Reuse::close_all);
            None
        }
        Ok(answer) => Some(answer),
    }
}

/// How a transaction begins.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Longest wait for SQLite's write lock.
    pub(crate) wait: Option<Wait>,
    pub(crate) deadline: Option<Instant>,
    /// When the caller began to wait.
    pub(crate) started: Instant,
    /// The place in the source that a warning names.
    pub(crate) at: &'static Location<'static>,
}

/// A connection on which a transaction may begin.
pub(crate) struct Opening<DB: Dialect> {
    conn: Guard<Unsettled<DB>>,
    session: DB::Session,
    /// Where the connection may be kept afterwards.
    reuse: Option<Reuse<DB>>,
}

impl<DB: Dialect> Opening<DB> {
    /// The connection that was used last, if one is kept.
    pub(crate) fn kept(pool: &Pool<DB>) -> Option<Self> {
        let mut reuse = Reuse::of(pool)?;
        let (conn, session) = reuse.take()?;
        Some(Self { conn: Guard::new(Unsettled::new(conn)), session, reuse: Some(reuse) })
    }

    /// A connection of the pool.
    pub(crate) async fn new(pool: &Pool<DB>, doing: &'static str, key: Option<&Key>) -> Result<Self> {
        let mut conn = Guard::new(Unsettled::new(connection(pool, doing, key).await?));
        if timeout(PROBE_LIMIT, DB::probe_named_locks(&mut conn.get_mut().conn, pool)).await.is_err() {
            return Err(no_answer(doing, key));
        }
        Ok(Self { conn, session: DB::Session::default(), reuse: Reuse::of(pool) })
    }

    /// The connection, and what is known of its session. If this is dropped, the connection is closed.
    pub(crate) fn conn(&mut self) -> (&mut DB::Connection, &DB::Session) {
        (&mut self.conn.get_mut().conn, &self.session)
    }

    /// Begins the transaction.
    pub(crate) async fn begin(self, pool: &Pool<DB>, terms: Terms) -> Result<Tx<DB>> {
        let Self { mut conn, session: before, reuse } = self;
        let Terms { wait, deadline, started, at } = terms;
        let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
        let mut session = before;
        let limit = if DB::IS_REMOTE { pool.options().get_acquire_timeout().max(PROBE_LIMIT) } else { Duration::MAX };
        let sent = DB::begin(&mut conn.get_mut().conn, pool, &mut session, Wait::within(wait, left));
        let Ok(begun) = timeout(limit, sent).await else { return Err(no_answer(BEGINNING, None)) };
        match begun {
            Ok(()) => Ok(Tx(Guard::new(Open::new(conn.defuse().conn, session, reuse, at)))),
            Err(err) if DB::ONE_WRITER && DB::fault(&err) == Fault::Contended => {
                if DB::is_idle(&mut conn.get_mut().conn).await {
                    // No transaction was begun: the connection can be used again.
                    put_back(conn.defuse().conn, before);
                }
                Err(Error::Contended { key: WRITE_LOCK.into(), waited: started.elapsed(), holder: None })
            }
            Err(err) => Err(failed::<DB>(BEGINNING, None, err)),
        }
    }

    /// Returns the connection, on which no transaction was begun.
    pub(crate) fn put_back(self) {
        let Self { conn, session, reuse } = self;
        give_back(conn.defuse().conn, session, reuse);
    }
}

/// Keeps the connection for the next transaction where that is allowed, or returns it to its pool.
fn give_back<DB: Dialect>(conn: PoolConnection<DB>, session: DB::Session, reuse: Option<Reuse<DB>>) {
    match reuse {
        Some(reuse) => reuse.keep(conn, session),
        None => put_back(conn, session),
    }
}

/// Refuses to wait for SQLite's write lock in a function under a lock of the same pool, whose transaction has it.
pub(crate) fn refuse_under_own_lock<DB: Dialect>(pool: &Pool<DB>) -> Result<()> {
    if DB::ONE_WRITER && is_under(|it| it.realm.has_transaction_of(pool)) {
        return Err(Error::Reentrant { lock: "lock", key: WRITE_LOCK.into(), hint: PASS_TX });
    }
    Ok(())
}

/// An open transaction that owns its connection.
///
/// sqlx's executors take `&mut *tx`. lockkit's functions, and your own that take the connection (`&mut PgConnection`,
/// …), take `&mut tx` as well. As with a `sqlx::Transaction`, `execute(&mut tx)` does not compile ("the trait
/// `Executor` is not implemented for `&mut Tx<_>`"). A function that takes `&mut sqlx::Transaction<'_, _>` cannot take
/// a `Tx`.
///
/// Made by [`begin`] or by `#[with_lock(…, tx = tx)]`.
///
/// ```
/// use lockkit::Tx;
/// use sqlx::{Sqlite, SqliteConnection, SqlitePool};
///
/// async fn insert(conn: &mut SqliteConnection, n: i64) -> sqlx::Result<()> {
///     sqlx::query("INSERT INTO t VALUES (?)").bind(n).execute(conn).await?;
///     Ok(())
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE t (n INTEGER)").execute(&pool).await?;
/// let mut tx: Tx<Sqlite> = lockkit::begin(&pool).await?;
/// sqlx::query("INSERT INTO t VALUES (1)").execute(&mut *tx).await?;
/// insert(&mut tx, 2).await?;
/// tx.commit().await?;
/// # Ok(()) }
/// ```
///
/// Dropping a `Tx` rolls it back in the background. If the rollback takes more than a second, for instance because the
/// connection is still waiting for a lock, the connection is closed. On MySQL and MariaDB it is closed at once if you
/// have used it, because sqlx cannot use it any more if the future of a statement was dropped, and a `Tx` cannot know
/// that. [`rollback`](Self::rollback) keeps it.
///
/// So on MySQL and MariaDB, drop the `Tx` after you have dropped the future of a statement, as `timeout` does. `commit`
/// and `rollback` would use the connection, on which sqlx 0.9 may wait for ever or panic: they return
/// [`Error::Database`] instead, after 10 s at most, and nothing is committed.
#[must_use = "a transaction that is dropped is rolled back; end it with `commit` or `rollback`"]
pub struct Tx<DB: Dialect>(Guard<Open<DB>>);

impl<DB: Dialect> Tx<DB> {
    /// Commits.
    ///
    /// # Errors
    /// - [`Error::TransactionEnded`] when the database had already ended the transaction: as a deadlock victim, or on
    ///   PostgreSQL after any failed statement, or by a statement of your own. The commit changes nothing.
    /// - [`Error::Database`] when the database refused the commit (Galera and serializable transactions report
    ///   conflicts here, which are [transient](Error::is_transient)), or the connection broke before COMMIT was sent.
    ///   Nothing is committed.
    /// - [`Error::OutcomeUnknown`] when the connection broke after COMMIT was sent.
    ///
    /// # Cancel safety
    /// Dropping this future leaves it unknown whether the commit happened, as with any commit.
    pub async fn commit(mut self) -> Result<()> {
        // A count of one can only be too high, for a transaction that was rolled back; then the commit fails.
        if (!DB::COMMIT_CHECKS || counted_depth::<DB>(&self) != 1)
            && let Err(err) = self.check_open().await
        {
            return self.ended(Err(err));
        }
        self.commit_open().await
    }

    /// As [`commit`](Self::commit), right after a statement of lockkit that succeeds only in the transaction of
    /// [`begin`].
    #[cfg(feature = "idempotent")]
    pub(crate) async fn commit_seen_open(mut self) -> Result<()> {
        use sqlx_core::transaction::TransactionManager;

        if !DB::FAILED_REFUSES || counted_depth::<DB>(&self) != 1 {
            return self.commit().await;
        }
        let committed = {
            let _sent = CommitSent::now();
            <DB::TransactionManager as TransactionManager>::commit(&mut self.0.get_mut().conn).await
        };
        self.ended(committed.map_err(commit_failed::<DB>))
    }

    /// Rolls back.
    ///
    /// # Errors
    /// [`Error::Database`] when the connection broke; the database rolls back by itself then.
    ///
    /// # Cancel safety
    /// The transaction is rolled back even if this future is dropped.
    pub async fn rollback(mut self) -> Result<()> {
        if self.0.has_lost_step() {
            // Dropped, it is closed, and the database rolls back.
            return Ok(());
        }
        let Open { conn, step, reuse, .. } = self.0.get_mut();
        *step = Step::Querying;
        let rolling_back = async {
            let rolled_back = if counted_depth::<DB>(conn) > 0 {
                roll_back::<DB>(conn).await
            } else {
                // sqlx has rolled back already. What ran since then is in a transaction that it does not count.
                *reuse = None;
                DB::restore_session(conn).await
            };
            rolled_back.map_err(|err| failed::<DB>(ROLLING_BACK, None, err))
        };
        in_step::<DB, _>(ROLLING_BACK, None, rolling_back).await?;
        self.0.defuse().return_to_pool();
        Ok(())
    }
}

impl<DB: Dialect> Tx<DB> {
    /// Sends COMMIT. The transaction is over if this succeeds.
    async fn send_commit(&mut self) -> Result<()> {
        let _sent = CommitSent::now();
        let Open { conn, session, reuse, .. } = self.0.get_mut();
        let committed = if reuse.is_some() { DB::commit_counted(conn, session).await } else { DB::commit(conn).await };
        committed.map_err(commit_failed::<DB>)
    }

    /// The caller has ended the transaction, with this answer.
    fn ended(mut self, committed: Result<()>) -> Result<()> {
        match committed {
            Ok(()) => {
                self.0.defuse().return_to_pool();
                observe::committed();
                Ok(())
            }
            Err(err) => {
                if is_answered(&err) && !matches!(err, Error::InvalidOption { .. }) {
                    self.0.get_mut().step = Step::In;
                }
                Err(err)
            }
        }
    }

    /// Whether the last statement of lockkit has no answer yet.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.0.step == Step::Querying
    }

    /// Rolls back after another failure, which is the error that the caller reports. If the rollback fails, the
    /// database rolls back when the connection ends.
    pub(crate) async fn undo(self) {
        // A rollback that takes too long continues in the background, as for a dropped transaction.
        if let Ok(Err(err)) = timeout(END_LIMIT, self.rollback()).await {
            observe::tolerated("rolling back, which the database will do", &err);
        }
    }
}

/// Refuses nested transactions: only the outermost one commits anything.
async fn check_depth<DB: Dialect>(conn: &mut DB::Connection) -> Result<()> {
    if depth::<DB>(conn).await? == 1 {
        return Ok(());
    }
    let reason = "needs the outermost transaction, with no nested one open: only that one commits anything".to_owned();
    Err(Error::InvalidOption { option: "commit", reason })
}

fn commit_failed<DB: Dialect>(source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        Fault::Unavailable => Error::OutcomeUnknown { source: source.into() },
        // Some engines detect conflicts only at COMMIT. Nothing was committed.
        _ => check_failed::<DB>(source),
    }
}

/// Fails when the database has already ended the transaction of `begin`: with a transient error if it is known to have
/// rolled it back.
pub(crate) async fn check_begun<DB: Dialect>(conn: &mut DB::Connection) -> Result<()> {
    let checking = async {
        let Err(err) = DB::check_begun(conn).await else { return Ok(()) };
        if DB::fault(&err) == Fault::NoTransaction && DB::was_undone(conn).await {
            return Err(Error::database(COMMITTING, None, Fault::Deadlock, RolledBack(err)));
        }
        Err(check_failed::<DB>(err))
    };
    in_step::<DB, _>(COMMITTING, None, checking).await
}

/// A transaction was rolled back, and no statement reported it.
#[derive(Debug, thiserror::Error)]
#[error(
    "the transaction was rolled back before its commit, as a node of a cluster does for a conflicting one of another \
     node"
)]
struct RolledBack(#[source] sqlx::Error);

/// The error of a transaction whose COMMIT was not sent. Nothing was committed.
pub(crate) fn check_failed<DB: Dialect>(source: sqlx::Error) -> Error {
    match DB::fault(&source) {
        // SQLite has no code of its own for a statement that needs a transaction.
        Fault::NoTransaction | Fault::NoTable => Error::TransactionEnded { source: source.into() },
        _ => failed::<DB>(COMMITTING, None, source),
    }
}

async fn roll_back<DB: Dialect>(conn: &mut DB::Connection) -> sqlx::Result<()> {
    while counted_depth::<DB>(conn) > 0 {
        DB::roll_back(conn).await?;
    }
    Ok(())
}

impl<DB: Dialect> Deref for Tx<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &DB::Connection {
        &self.0.conn
    }
}

impl<DB: Dialect> DerefMut for Tx<DB> {
    fn deref_mut(&mut self) -> &mut DB::Connection {
        let Open { conn, step, .. } = self.0.get_mut();
        *step = (*step).max(Step::Lent);
        conn
    }
}

impl<DB: Dialect> sealed::Sealed for Tx<DB> {}

impl<DB: Dialect> AsConnection<DB> for Tx<DB> {
    fn as_connection(&mut self) -> &mut DB::Connection {
        self
    }

    fn is_begun(&self) -> bool {
        true
    }

    fn for_query(&mut self) -> &mut DB::Connection {
        let open = self.0.get_mut();
        open.before = open.step;
        open.step = Step::Querying;
        &mut open.conn
    }

    fn answered(&mut self) {
        let open = self.0.get_mut();
        open.step = open.before;
    }

    fn locked(&self, kind: &'static str, key: &Key) {
        self.0.since.locked(kind, key);
    }
}

impl<DB: Dialect> fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").field("database", &DB::NAME).finish_non_exhaustive()
    }
}

/// A transaction that [`Lease::commit`](crate::Lease::commit) can end: a [`Tx`] or a `sqlx::Transaction`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no transaction in `{DB}`",
    label = "this takes a `lockkit::Tx<{DB}>` or a `sqlx::Transaction<'_, {DB}>` by value",
    note = "a lease that another system keeps cannot be committed with a transaction of this database: begin the \
            transaction with `lease.guard(&mut *tx)`, and commit it with `tx.commit()`; under `#[with_lock]`, name its \
            database with `pool = …`"
)]
pub trait AnyTx<DB: Database>: EndTx<DB> {}

#[diagnostic::do_not_recommend]
impl<DB: Database, T: EndTx<DB>> AnyTx<DB> for T {}

/// How a transaction ends. Its path is private, so that no other type passes for a transaction.
pub trait EndTx<DB: Database>: Send + sealed::Sealed {
    /// The connection inside the transaction.
    fn connection(&mut self) -> &mut DB::Connection;

    /// Fails when the database has already ended the transaction, unless the next statement fails then anyway. No
    /// statement may run on its connection after that.
    fn check_open(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Commits, after [`check_open`](Self::check_open) found the transaction open and no statement failed since.
    fn commit_open(self) -> impl Future<Output = Result<()>> + Send;

    /// Rolls back.
    fn roll_back(self) -> impl Future<Output = Result<()>> + Send;
}

impl<DB: Dialect> EndTx<DB> for Tx<DB> {
    fn connection(&mut self) -> &mut DB::Connection {
        self
    }

    async fn check_open(&mut self) -> Result<()> {
        if self.0.has_lost_step() {
            return Err(no_answer(COMMITTING, None));
        }
        check_depth::<DB>(self).await?;
        if DB::CHECKED_LAST { Ok(()) } else { check_begun::<DB>(self).await }
    }

    async fn commit_open(mut self) -> Result<()> {
        if DB::CHECKED_LAST
            && let Err(err) = check_begun::<DB>(&mut self).await
        {
            if is_answered(&err) {
                self.undo().await;
            }
            return Err(err);
        }
        let sent = self.send_commit().await;
        self.ended(sent)
    }

    async fn roll_back(self) -> Result<()> {
        Self::rollback(self).await
    }
}

impl<DB: Dialect> EndTx<DB> for Transaction<'_, DB> {
    fn connection(&mut self) -> &mut DB::Connection {
        self
    }

    async fn check_open(&mut self) -> Result<()> {
        check_depth::<DB>(self).await?;
        DB::check_open(self).await.map_err(check_failed::<DB>)
    }

    async fn commit_open(mut self) -> Result<()> {
        if DB::CHECKED_LAST
            && let Err(err) = DB::check_begun(&mut self).await
        {
            // sqlx rolls back on the caller's connection only when that connection is used again.
            drop(timeout(END_LIMIT, EndTx::roll_back(self)).await);
            return Err(check_failed::<DB>(err));
        }
        let _sent = CommitSent::now();
        self.commit().await.map_err(commit_failed::<DB>)
    }

    async fn roll_back(self) -> Result<()> {
        Self::rollback(self).await.map_err(|err| failed::<DB>(ROLLING_BACK, None, err))
    }
}

/// A connection inside a transaction.
struct Open<DB: Dialect> {
    conn: PoolConnection<DB>,
    step: Step,
    /// The step before the statements of lockkit that are running.
    before: Step,
    since: OpenSince,
    session: DB::Session,
    /// Where the connection may be kept afterwards.
    reuse: Option<Reuse<DB>>,
    /// `Drop` may run on a thread without a runtime.
    runtime: Handle,
}

/// What is known of the statements on a connection. Where the driver does not [keep
/// step](crate::sql::Driver::KEEPS_STEP), it decides whether the connection can still be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// All of them were answered.
    In,
    /// The caller has had the connection, and may have dropped the future of a statement.
    Lent,
    /// A statement of lockkit is running, or was dropped.
    Querying,
}

impl<DB: Dialect> Open<DB> {
    fn new(
        conn: PoolConnection<DB>,
        session: DB::Session,
        reuse: Option<Reuse<DB>>,
        at: &'static Location<'static>,
    ) -> Self {
        let (since, runtime) = (OpenSince::now(at), Handle::current());
        Self { conn, step: Step::In, before: Step::In, since, session, reuse, runtime }
    }

    /// Whether nothing can be said on the connection any more.
    fn has_lost_step(&self) -> bool {
        !DB::KEEPS_STEP && self.step == Step::Querying
    }

    /// Returns the connection, whose transaction was committed or rolled back by the last statement.
    fn return_to_pool(self) {
        let Self { conn, session, reuse, .. } = self;
        give_back(conn, session, reuse);
    }
}

impl<DB: Dialect> Hold for Open<DB> {
    fn abandon(self) {
        let Self { conn, step, since, runtime, .. } = self;
        drop(since);
        let _inside = runtime.enter();
        if !DB::KEEPS_STEP && step != Step::In {
            return close(conn);
        }
        // Also closed if the runtime ends before the task.
        let mut ending = Guard::new(Unsettled::new(conn));
        runtime.spawn(async move {
            let conn = &mut ending.get_mut().conn;
            let ended = async {
                roll_back::<DB>(conn).await?;
                DB::restore_session(conn).await
            };
            // A statement may be in flight, or waiting for a lock, when its future is dropped.
            if matches!(timeout(END_LIMIT, ended).await, Ok(Ok(()))) {
                checked_in::<DB>(ending.defuse().conn).await;
            } else {
                observe::rollback_too_slow();
            }
        });
    }
}
