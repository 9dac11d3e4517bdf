//! Session locks: each one is held by its own connection, and is free as soon as that connection ends.
//!
//! A task owns the connection, and callers only send it requests, so a dropped request leaves no answer unread. The
//! connection comes from the pool and returns only after a confirmed unlock; in every other case it is closed, which
//! frees the lock. A lock is not granted to a session that holds it already: the server would count the second grant,
//! and a forgotten lock on a pooled connection would look like a new one.
//!
//! If its client is gone, a server keeps waiting and finally grants the lock, so each wait lasts 1 s at most. A wait
//! that ends by its bound may have been granted in the same instant, and a session keeps an advisory lock whatever
//! happens to the statement. So after each such end the holder is queried.
//!
//! Two looks at the session's id prove nothing behind an idle pooler, which lends the same session again. So lockkit
//! competes with itself on a second connection. Five rounds never missed a busy pooler in the tests (`PgBouncer` 1.18,
//! four clients). Nothing may be remembered about a pool, so each request pays for it.

mod foreign;

use std::{
    fmt,
    future::Future,
    io::ErrorKind,
    marker::PhantomData,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sqlx::{Connection, Database, Pool};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    body::{
        guard::{Guard, Hold},
        scope::{Lock, Realm, is_under},
        task::{finished, no_answer, until},
        watch::Watch,
    },
    observe::{self, Strategy, holding, observed},
    policy::{OnLost, Wait, check_duration},
    sql::{
        Dialect, Known, Sessions, Sharing, Unsettled, checkout,
        conn::{Finish, On},
        failed,
        pool_state::of_pool,
        starved,
    },
    value::{
        error::{Error, Fault, LossReason, Result},
        holder::LockHolder,
        key::Key,
    },
};

/// Longest wait per statement. If the caller disappears, the server keeps waiting at most this long.
const SLICE: Duration = Duration::from_secs(1);

/// Minimum polling interval when less remains than the server's resolution.
const PAUSE: Duration = Duration::from_millis(20);

/// Shortest time allowed for getting a connection, even when the caller's own wait is shorter.
const FIRST_ANSWER: Duration = Duration::from_secs(1);

/// Longest time for an answer beyond the wait of the statement. After it, the connection counts as broken.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Rounds of the pooler probe. One round misses a busy pooler about 1 time in 8.
const POOLER_LOOKS: u32 = 5;

const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(1);

/// Whether the server of a pool has held a lock that it granted.
#[derive(Default)]
struct Holds(AtomicBool);

/// Advice in the error when a task requests a lock that it already holds.
const HINT: &str = "hand the session that it holds (`&session`; `as = session` names it under `#[with_lock]`) to the \
                    code that needs the lock, and take the lock in one place";

/// Locks a name until it is released or its connection ends. Works on PostgreSQL, MySQL and MariaDB.
///
/// Use it for a long-lived role that one of many processes has, such as leader. When that process crashes, the lock is
/// free at once: there is no ttl to wait for. It needs no table.
///
/// **A holder that is stopped is not replaced.** While a process is suspended (SIGSTOP, a frozen container, a
/// debugger), its connection lives, and the lock with it, until the process continues or ends. A frozen machine keeps
/// the lock until the server's TCP keepalive ends the session, which takes more than two hours by the defaults of
/// Linux. A lease ends with its ttl, whatever became of its holder, so use a lease for a leader that must be replaced
/// in every case: [`LeaseRequest::lead`](crate::LeaseRequest::lead).
///
/// Use a lease instead where the lock protects data in the same database. A lease can make a commit
/// depend on still being held; a session lock cannot. A holder that was stopped, or cut off from the server, learns of
/// its loss only at its next check, and another process may hold the lock by then. Use a lease too for many locks at
/// once (each session lock occupies one connection), on SQLite (which has no session locks), and behind a pooler in
/// transaction mode. Use a [`NamedLock`](crate::NamedLock) for work that fits in one transaction.
///
/// | database | what is locked |
/// |---|---|
/// | PostgreSQL | an advisory lock on 64 bits of SHA-256 of the key, in a namespace separate from named locks. Advisory locks belong to one database |
/// | MySQL, MariaDB | `GET_LOCK` of the SHA-256 of the key and the name of the connection's database. Local to one node of a cluster |
///
/// The lock occupies one connection of the pool until it is released. On PostgreSQL, `acquire` first opens a second
/// connection outside the pool for a moment, to detect a pooler in transaction mode.
///
/// Waiters are served in no particular order. The server does not detect a deadlock between two processes that take two
/// session locks in different orders: bound the wait, or take the locks in one order.
///
/// [`raw`](Self::raw) and [`raw2`](Self::raw2) share an advisory lock of PostgreSQL with other programs.
///
/// # Example
/// ```no_run
/// use lockkit::SessionLock;
/// use std::time::Duration;
///
/// # async fn f<DB: lockkit::dialect::SessionOps>(pool: sqlx::Pool<DB>) -> Result<(), lockkit::Error> {
/// let leader = SessionLock::new("leader").wait(Duration::from_secs(2)).acquire(&pool).await?;
/// tokio::select! {
///     () = leader.lost() => { /* stop: another process may be the leader by now */ }
///     () = async { /* lead */ } => leader.release().await?,
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a session lock does nothing until `acquire` or `try_acquire` is awaited"]
pub struct SessionLock {
    name: SessionName,
    sharing: Sharing,
    wait: Wait,
    heartbeat: Duration,
}

impl SessionLock {
    /// Creates a lock with this name.
    pub fn new(key: impl Into<Key>) -> Self {
        Self::named(SessionName { key: key.into(), number: None })
    }

    fn named(name: SessionName) -> Self {
        Self { name, sharing: Sharing::Alone, wait: Wait::DEFAULT, heartbeat: DEFAULT_HEARTBEAT }
    }

    /// Takes the lock shared: it excludes exclusive holders only. PostgreSQL only: `GET_LOCK` of MySQL and MariaDB has
    /// no shared mode, so [`acquire`](Self::acquire) returns [`Error::InvalidOption`] there.
    ///
    /// A stream of shared sessions does not starve an exclusive waiter: PostgreSQL grants in the order of the requests.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// let reader = lockkit::SessionLock::new("catalog").share().acquire(&pool).await?;
    /// # reader.release().await }
    /// ```
    pub fn share(mut self) -> Self {
        self.sharing = Sharing::Shared;
        self
    }

    /// Longest wait for another holder, and for a connection. Defaults to [`Wait::DEFAULT`], 10 s. [`Wait::Unbounded`]
    /// waits forever, as a standby process needs.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// Interval at which the lock's own connection checks that the lock is still held. Defaults to 1 s.
    pub fn heartbeat(mut self, every: Duration) -> Self {
        self.heartbeat = every;
        self
    }

    /// Takes the lock, and keeps a connection of the pool for it. The connection is in use during the wait too.
    ///
    /// The server enforces the wait. Getting a connection may take up to 1 s even where the wait is shorter. If the
    /// server does not answer, this fails 5 s after the wait ended.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, with the session that holds the lock; [`Error::Reentrant`] in a function
    /// under the same lock; [`Error::TransactionPooler`], with nothing locked; [`Error::FeignedLock`] on a server that
    /// speaks the protocol and has no such locks; [`Error::InvalidKey`]; [`Error::InvalidOption`];
    /// [`Error::PoolStarved`]; [`Error::Database`], also where the server is a read-only replica: its locks are not
    /// those of its primary.
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing locked. The connection is closed; a server that is waiting for the lock on
    /// its behalf notices within a second.
    #[must_use = "await it, and bind the session: `let session = ….acquire(&pool).await?`"]
    pub async fn acquire<DB: SessionOps>(self, pool: &Pool<DB>) -> Result<Session<DB>> {
        self.name.check::<DB>()?;
        self.wait.check()?;
        check_duration("heartbeat", self.heartbeat)?;
        if self.sharing == Sharing::Shared && !DB::HAS_SHARED_LOCKS {
            let reason = "needs PostgreSQL: MySQL and MariaDB have no shared session locks; leave it out, or use \
                          `Leases::rw(key).read()` or `NamedLock::share`"
                .to_owned();
            return Err(Error::InvalidOption { option: "share", reason });
        }
        let realm = Realm::sessions(pool);
        if is_under(|it| it.realm == realm && it.key == self.name.key) {
            return Err(Error::Reentrant { lock: "session lock", key: self.name.key, hint: HINT });
        }
        let key = self.name.key.clone();
        observed(Strategy::Session, &key, Box::pin(self.take(pool))).await
    }

    /// As [`acquire`](Self::acquire), without waiting for a holder. Returns `None` when another session holds the lock,
    /// or when the calling code already runs under it.
    ///
    /// # Errors
    /// The errors of [`acquire`](Self::acquire), except [`Error::Contended`] and [`Error::Reentrant`].
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire<DB: SessionOps>(self, pool: &Pool<DB>) -> Result<Option<Session<DB>>> {
        match self.wait(Wait::Never).acquire(pool).await {
            Ok(session) => Ok(Some(session)),
            Err(Error::Contended { .. } | Error::Reentrant { .. }) => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// The server's session that holds the lock now, or one of the sessions that share it. `None` when no session holds
    /// it. For operators: the lock may be released before the answer arrives. PostgreSQL requires no privilege. MySQL
    /// and MariaDB require PROCESS to show the user and host of other sessions.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; [`Error::PoolStarved`]; [`Error::Database`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), lockkit::Error> {
    /// if let Some(leader) = lockkit::SessionLock::new("leader").holder(&pool).await? {
    ///     println!("the leader is {leader}"); // session 4711 of `shop` from 10.0.0.7 (`orders`), for 2.0 s at most
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn holder<DB: SessionOps>(&self, on: impl On<DB>) -> Result<Option<LockHolder>> {
        let doing = "looking for the holder of session lock";
        self.name.check::<DB>()?;
        let mut conn = on.reach(doing).await?;
        let holder = DB::session_holder(&mut conn, &self.name).await;
        conn.finish();
        holder.map_err(|err| failed::<DB>(doing, Some(&self.name.key), err))
    }

    async fn take<DB: SessionOps>(self, pool: &Pool<DB>) -> Result<Session<DB>> {
        let doing = "acquiring session lock";
        let started = Instant::now();
        let deadline = self.wait.millis().map(|it| started + Duration::from_millis(it));
        let failed = |err| failed::<DB>(doing, Some(&self.name.key), err);

        let connected_by = deadline.map(|it| it.max(started + FIRST_ANSWER));
        let conn = until(connected_by, checkout(pool, doing, Some(&self.name.key))).await;
        let conn = match conn {
            Some(conn) => conn?,
            None => return Err(starved(pool).await.unwrap_or_else(|| no_answer(doing, Some(&self.name.key)))),
        };
        let mut held = Guard::new(Unsettled::new(conn));
        let conn = &mut *held.get_mut().conn;
        let id = self.session_to_lock(pool, conn).await?;
        loop {
            let asked = Instant::now();
            let slice = deadline.map_or(SLICE, |it| it.saturating_duration_since(asked).min(SLICE));
            match answered(slice, DB::session_lock(conn, id, &self.name, self.sharing, slice)).await.map_err(failed)? {
                SessionAnswer::Granted => {
                    self.check_held(pool, conn, id).await?;
                    return Ok(Session::granted(Realm::sessions(pool), self, id, held));
                }
                SessionAnswer::Elsewhere => return Err(Error::TransactionPooler { key: self.name.key }),
                SessionAnswer::Held => {}
            }
            if deadline.is_some_and(|it| it <= Instant::now()) {
                let waited = started.elapsed();
                let holder = match answered(Duration::ZERO, DB::session_holder(conn, &self.name)).await {
                    Ok(holder) => holder.map(|it| Box::new(it.into())),
                    Err(err) if DB::fault(&err) == Fault::Unavailable => {
                        return Err(Error::Contended { key: self.name.key, waited, holder: None });
                    }
                    // For example, a privilege is missing.
                    Err(_) => None,
                };
                // This session has locked nothing, so its connection can go back to the pool.
                drop(held.defuse());
                return Err(Error::Contended { key: self.name.key, waited, holder });
            }
            let pause = asked + PAUSE;
            sleep_until(deadline.map_or(pause, |it| pause.min(it))).await;
        }
    }

    /// Checks, for the first session lock of this pool, that the server holds what it has granted. The heartbeat would
    /// find out later.
    async fn check_held<DB: SessionOps>(&self, pool: &Pool<DB>, conn: &mut DB::Connection, id: i64) -> Result<()> {
        let holds = of_pool::<Holds, _>(pool);
        if holds.0.load(Ordering::Relaxed) {
            return Ok(());
        }
        let failed = |err| failed::<DB>("looking for session lock", Some(&self.name.key), err);
        if !answered(Duration::ZERO, DB::session_holds(conn, id, &self.name)).await.map_err(failed)? {
            let server = answered(Duration::ZERO, DB::session_server(conn)).await.map_err(failed)?;
            return Err(Error::FeignedLock { lock: "session lock", key: self.name.key.clone(), server });
        }
        holds.0.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The id of the server's session behind this connection. Fails on a read-only replica, and when a pooler shares
    /// the session with other clients.
    async fn session_to_lock<DB: SessionOps>(&self, pool: &Pool<DB>, conn: &mut DB::Connection) -> Result<i64> {
        let doing = "looking at the session for session lock";
        let failed = |err| failed::<DB>(doing, Some(&self.name.key), err);
        let ours = answered(SLICE, DB::session_look(conn)).await.map_err(failed)?;
        if ours.is_replica {
            let reason = "the server is a read-only replica, whose locks are not those of its primary";
            let source = sqlx::Error::Configuration(reason.into());
            return Err(Error::database(doing, &self.name.key, Fault::ReadOnly, source));
        }
        if !DB::POOLERS_SHARE_SESSIONS {
            return Ok(ours.id);
        }
        // A pooler gives the session of an idle connection to the next client, and prefers the session that was used
        // last. So a second connection competes for it: either that connection gets our session, or another client got
        // it first and our next statement runs in a different session. Without the second connection, every probe would
        // see the same session as long as no other client is active. The probes alternate unevenly, to catch poolers
        // that hand out sessions in turn.
        let competing = async {
            // Opened outside the pool, which may have no second connection.
            let mut other = DB::Connection::connect_with(&pool.connect_options()).await?;
            let mut is_ours = true;
            for _ in 0..POOLER_LOOKS {
                is_ours &= DB::session_look(conn).await?.id == ours.id;
                is_ours &= DB::session_look(&mut other).await?.id != ours.id;
                is_ours &= DB::session_look(conn).await?.id == ours.id;
            }
            Ok(is_ours)
        };
        if !answered(SLICE, competing).await.map_err(failed)? {
            return Err(Error::TransactionPooler { key: self.name.key.clone() });
        }
        Ok(ours.id)
    }
}

/// A session lock that this process holds.
///
/// Its connection does nothing else. It checks at every heartbeat, by default each second, that the lock is still held.
/// Dropping the session closes the connection, which frees the lock. [`release`](Self::release) also reports whether
/// the lock was held to the end, and returns the connection to its pool.
///
/// The process may not know of a loss until the next heartbeat, nor while it is stopped or the server does not answer
/// (5 s at most). Work that must never run without the lock needs a [lease](crate::Leases) and its fence.
#[must_use = "the lock is released as soon as the session is dropped: bind it, `let session = …` (`let _ = …` drops \
              it at once)"]
pub struct Session<DB: Database> {
    key: Key,
    realm: Realm,
    /// Sends checks to the task that owns the connection. Closed when the lock is lost.
    questions: mpsc::Sender<Question>,
    kept: Guard<Keeping>,
    database: PhantomData<fn() -> DB>,
}

/// Answered when the lock is held. Dropped without an answer when it is not.
type Question = oneshot::Sender<()>;

impl<DB: Database> Session<DB> {
    fn granted(realm: Realm, lock: SessionLock, id: i64, held: Guard<Unsettled<DB>>) -> Self
    where
        DB: SessionOps,
    {
        let key = lock.name.key.clone();
        let (questions, asked) = mpsc::channel(1);
        let kept = Guard::new(Keeping(tokio::spawn(keep(lock, id, held, asked))));
        Self { key, realm, questions, kept, database: PhantomData }
    }

    /// The lock's key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Whether this session still holds the lock. Asks the server, in one round trip; returns `false` after 5 s without
    /// an answer.
    ///
    /// Once this is `false`, it stays `false` and the connection is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn is_alive(&self) -> bool {
        let (answer, answered) = oneshot::channel();
        self.questions.send(answer).await.is_ok() && answered.await.is_ok()
    }

    /// Resolves when the lock is found to be lost: at the next heartbeat after its connection ended, or 5 s after the
    /// server stopped answering a heartbeat. Otherwise it never resolves.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) {
        self.questions.closed().await;
    }

    /// Releases the lock, and returns its connection to the pool.
    ///
    /// # Errors
    /// [`Error::SessionLost`] when the lock was lost before the release, or the server does not confirm that it was
    /// held.
    ///
    /// # Cancel safety
    /// If this future is dropped, the release continues in the background.
    pub async fn release(self) -> Result<()> {
        let Self { questions, kept, .. } = self;
        // Closing the channel makes the task release the lock.
        drop(questions);
        finished("releasing session lock", kept.defuse().0).await
    }

    /// Runs a body under this lock, and drops the body when the lock is found to be lost.
    pub(crate) fn watch(&self) -> Watch<'_> {
        let lost = move || async move {
            self.lost().await;
            Error::SessionLost { key: self.key.clone(), source: None }
        };
        Watch::new(OnLost::Stop, || Ok(()), lost).in_span(holding(Strategy::Session, &self.key))
    }

    /// The scope entry of a body that runs under this lock. It does not detect a loss: the next heartbeat does, and
    /// stops the body.
    pub(crate) fn lock(&self) -> Lock {
        Lock::of(self.realm, self.key.clone())
    }

    /// Releases the lock. The result of the body counts only if the lock was held to the end.
    pub(crate) async fn end_with<T, E: From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        let released = self.release().await;
        let value = result?;
        released?;
        Ok(value)
    }
}

impl<DB: Database> fmt::Debug for Session<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("key", &self.key).finish_non_exhaustive()
    }
}

/// The task that owns the connection of a session lock.
struct Keeping(JoinHandle<Result<()>>);

impl Hold for Keeping {
    fn abandon(self) {
        // Aborting drops the connection at the task's current await, and that closes it.
        self.0.abort();
    }
}

/// Checks at each heartbeat and for each question whether the lock is held. Releases the lock when all senders of
/// questions are dropped.
async fn keep<DB: SessionOps>(
    lock: SessionLock,
    id: i64,
    mut held: Guard<Unsettled<DB>>,
    mut questions: mpsc::Receiver<Question>,
) -> Result<()> {
    let SessionLock { name, sharing, wait: _, heartbeat } = lock;
    let granted = Instant::now();
    let _counted = observe::held(Strategy::Session, &name.key);
    let conn = &mut *held.get_mut().conn;
    let (lost, _unanswered) = loop {
        let question = match timeout(heartbeat, questions.recv()).await {
            Ok(Some(question)) => Some(question),
            Err(_) => None,
            Ok(None) => match answered(Duration::ZERO, DB::session_unlock(conn, id, &name, sharing)).await {
                Ok(true) => {
                    drop(held.defuse());
                    return Ok(());
                }
                not_held => break (not_held.err(), None),
            },
        };
        match answered(Duration::ZERO, DB::session_holds(conn, id, &name)).await {
            // The receiver is gone if the caller was dropped.
            Ok(true) => question.map(|it| it.send(())),
            not_held => break (not_held.err(), question),
        };
    };
    // Closes the connection before the loss is reported.
    drop(held);
    let reason = if lost.is_some() { LossReason::Unreachable } else { LossReason::Stolen };
    observe::lost(Strategy::Session, &name.key, None, granted.elapsed(), reason);
    Err(Error::SessionLost { key: name.key, source: lost.map(Into::into) })
}

/// The server's answer to a statement that may wait for `slice`.
async fn answered<T>(slice: Duration, question: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    let silence = || Err(sqlx::Error::Io(ErrorKind::TimedOut.into()));
    timeout(slice + ANSWER_LIMIT, question).await.unwrap_or_else(|_| silence())
}

/// Locks that belong to a session of the server. They outlive its transactions and end with it.
///
/// Every operation names its session. If a pooler or proxy moved the connection to another session, the operation
/// detects that and locks nothing there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no session locks",
    label = "this database has no session locks",
    note = "PostgreSQL, MySQL and MariaDB have them, with lockkit's feature `postgres` or `mysql`; in a generic \
            function, write the bound `DB: lockkit::dialect::SessionOps`",
    note = "use a lease (`lockkit::Leases`), which survives its connection, or a `lockkit::NamedLock` for one \
            transaction"
)]
pub trait SessionOps: Dialect + Known<Sessions, Itself = Self> + SessionStatements {}

/// The statements of session locks. Hidden from the docs: users call the strategy.
pub trait SessionStatements: Database {
    /// Whether poolers for this database can give a session to other clients between two transactions, even while the
    /// session holds a lock.
    const POOLERS_SHARE_SESSIONS: bool;

    /// Whether several sessions can share a lock.
    const HAS_SHARED_LOCKS: bool;

    /// Whether the database locks numbers.
    const HAS_NUMBERS: bool;

    /// The session that runs this statement. The statement is not prepared, because a pooler in transaction mode may
    /// lose prepared statements.
    fn session_look(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<ServerSession>> + Send;

    /// Takes the lock, or waits for it up to `slice`; less where the server counts in seconds.
    fn session_lock(
        conn: &mut Self::Connection,
        id: i64,
        name: &SessionName,
        sharing: Sharing,
        slice: Duration,
    ) -> impl Future<Output = sqlx::Result<SessionAnswer>> + Send;

    /// Whether the session holds the lock.
    fn session_holds(
        conn: &mut Self::Connection,
        id: i64,
        name: &SessionName,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// What the server calls itself.
    fn session_server(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<String>> + Send;

    /// Releases the lock. `false` when the session did not hold it.
    fn session_unlock(
        conn: &mut Self::Connection,
        id: i64,
        name: &SessionName,
        sharing: Sharing,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The session that holds the lock.
    fn session_holder(
        conn: &mut Self::Connection,
        name: &SessionName,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;
}

/// What a session lock locks.
#[derive(Debug, Clone)]
pub struct SessionName {
    /// The name, or a text for the number.
    pub(crate) key: Key,
    pub(crate) number: Option<AdvisoryNumber>,
}

/// The number of an advisory lock that lockkit did not choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdvisoryNumber {
    /// The lock of one number.
    One(i64),
    /// The lock of two numbers: another one than that of any one number.
    Two(i32, i32),
}

impl SessionName {
    fn check<DB: SessionOps>(&self) -> Result<()> {
        self.key.check()?;
        if self.number.is_some() && !DB::HAS_NUMBERS {
            let reason =
                "needs PostgreSQL: MySQL and MariaDB lock names (`GET_LOCK`), not numbers; use `SessionLock::new`"
                    .to_owned();
            return Err(Error::InvalidOption { option: "raw", reason });
        }
        Ok(())
    }
}

/// A session of the server, as it describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerSession {
    pub(crate) id: i64,
    /// Whether the server is a read-only replica. The locks of a replica are not those of its primary.
    pub(crate) is_replica: bool,
}

/// The answer to one attempt to take a session lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAnswer {
    /// The session holds the lock now, and did not hold it before.
    Granted,
    /// The lock was already held, by another session or by this one.
    Held,
    /// The statement ran in a session other than the one it named, and locked nothing.
    Elsewhere,
}
