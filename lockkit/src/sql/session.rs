//! Session locks: held by a connection of their own, and free as soon as it ends.

use std::{fmt, future::Future, io::ErrorKind, marker::PhantomData, time::Duration};

use sqlx::{Connection, Database, Pool};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    error::{Error, Fault, LossReason, Result},
    guard::{Guard, Hold, Watch},
    holder::LockHolder,
    key::Key,
    observe::{self, Strategy, holding, observed},
    policy::{OnLost, Wait, check_duration},
    scope::{Lock, Realm, is_under},
    sql::{
        Dialect, Known, Sessions, Sharing, checkout,
        conn::{Finish, On},
        failed, starved,
        tx::Unsettled,
    },
    task::{finished, no_answer, until},
};

/// Longest wait per statement. If the caller disappears, the server keeps waiting at most this long.
const SLICE: Duration = Duration::from_secs(1);

/// Minimum polling interval when less remains than the server's resolution.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a connection may take to come where the caller's own wait is shorter.
const FIRST_ANSWER: Duration = Duration::from_secs(1);

/// Longest time for an answer beyond the wait of the statement. A connection that takes longer counts as broken.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Rounds of the pooler probe. One round misses a busy pooler about 1 time in 8.
const POOLER_LOOKS: u32 = 5;

const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(1);

/// What to do instead of taking again what the same task holds.
const HINT: &str = "hand the session that it holds (`&session`; `as = session` names it under `#[with_lock]`) to the code that \
                    needs the lock, and take the lock in one place";

/// Locks a name until it is released, or its connection ends: PostgreSQL, MySQL and MariaDB.
///
/// Use it for a role that one process of many has for long, such as leader: when that process crashes, the lock is free
/// at once, without a ttl to wait for. It needs no table.
///
/// Use a [lease](crate::Leases) instead where the lock protects data in the same database: a lease can make a commit
/// depend on still being held, a session lock cannot. A holder that was stopped, or cut off from the server, learns of its
/// loss only when it asks, and somebody else may hold the lock by then. Use a lease too where there are many locks at once
/// (each session lock takes a connection for itself), on SQLite (which has no session locks), and behind a pooler in
/// transaction mode. Use a [`NamedLock`](crate::NamedLock) for what is one transaction.
///
/// | database | what is locked |
/// |---|---|
/// | PostgreSQL | an advisory lock on 64 bits of SHA-256 of the key, others than those of named locks. Advisory locks belong to one database |
/// | MySQL, MariaDB | `GET_LOCK` of the SHA-256 of the key and the name of the connection's database. Local to one node of a cluster |
///
/// The lock keeps one connection of the pool for itself until it is released. On PostgreSQL a second connection beside
/// the pool is opened for a moment, before the lock is taken, to see whether a pooler in transaction mode stands in between.
///
/// Waiters are served in no particular order. Two processes that take two session locks in different orders wait for
/// each other without the server noticing: bound the wait, or take them in one order.
///
/// # Example
/// ```no_run
/// use lockkit::SessionLock;
/// use std::time::Duration;
///
/// # async fn f<DB: lockkit::dialect::SessionOps>(pool: sqlx::Pool<DB>) -> Result<(), lockkit::Error> {
/// let leader = SessionLock::new("leader").wait(Duration::from_secs(2)).acquire(&pool).await?;
/// tokio::select! {
///     () = leader.lost() => { /* stop: somebody else may be the leader by now */ }
///     () = async { /* lead */ } => leader.release().await?,
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a session lock does nothing until `acquire` or `try_acquire` is awaited"]
pub struct SessionLock {
    key: Key,
    sharing: Sharing,
    wait: Wait,
    heartbeat: Duration,
}

impl SessionLock {
    /// The lock of this name.
    pub fn new(key: impl Into<Key>) -> Self {
        Self { key: key.into(), sharing: Sharing::Alone, wait: Wait::DEFAULT, heartbeat: DEFAULT_HEARTBEAT }
    }

    /// Takes the lock shared: it excludes exclusive holders only. PostgreSQL only; `GET_LOCK` of MySQL and MariaDB
    /// knows no shared locks, so there [`acquire`](Self::acquire) refuses it with [`Error::InvalidOption`].
    ///
    /// A stream of sessions that share the lock does not keep out one that waits to have it alone: PostgreSQL grants in
    /// the order of the requests.
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

    /// How long to wait for another holder, and for a connection. Defaults to [`Wait::DEFAULT`], 10 s. With
    /// [`Wait::Unbounded`], as a process in reserve needs it, the wait has no end.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// How often to ask the server, on the lock's own connection, whether the lock is still held. Defaults to 1 s.
    pub fn heartbeat(mut self, every: Duration) -> Self {
        self.heartbeat = every;
        self
    }

    /// Takes the lock, and keeps a connection of the pool for it. While it waits it keeps that connection too.
    ///
    /// The server keeps the bound of the wait. A connection may take up to 1 s to come even where the wait is shorter,
    /// and a server that does not answer is given up 5 s late.
    ///
    /// # Errors
    /// [`Error::Contended`] after the wait, with the session that holds the lock; [`Error::Reentrant`] in a function under the
    /// same lock; [`Error::TransactionPooler`], with nothing locked; [`Error::InvalidKey`];
    /// [`Error::InvalidOption`]; [`Error::PoolStarved`]; [`Error::Database`], also where the server is a read-only replica, whose locks are not
    /// those of its primary.
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing locked. The connection is closed; a server that is waiting on it notices
    /// within a second.
    #[must_use = "await it, and bind the session: `let session = ….acquire(&pool).await?`"]
    pub async fn acquire<DB: SessionOps>(self, pool: &Pool<DB>) -> Result<Session<DB>> {
        self.key.check()?;
        self.wait.check()?;
        check_duration("heartbeat", self.heartbeat)?;
        if self.sharing == Sharing::Shared && !DB::HAS_SHARED_LOCKS {
            let reason = "needs PostgreSQL: MySQL and MariaDB have no shared session locks; leave it out, or use \
                          `Leases::rw(key).read()` or `NamedLock::share`"
                .to_owned();
            return Err(Error::InvalidOption { option: "share", reason });
        }
        let realm = Realm::sessions(pool);
        if is_under(|it| it.realm == realm && it.key == self.key) {
            return Err(Error::Reentrant { lock: "session lock", key: self.key, hint: HINT });
        }
        let key = self.key.clone();
        observed(Strategy::Session, &key, Box::pin(self.take(pool))).await
    }

    /// As [`acquire`](Self::acquire) without waiting for a holder; `None` when another session holds the lock.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire) but [`Error::Contended`].
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

    /// The server's session that holds the lock now, or one of those that share it; `None` when no session holds it.
    /// For operators: the lock may be released before the answer arrives. It needs no privilege on PostgreSQL; on
    /// MySQL and MariaDB the user and host of others need PROCESS.
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
        self.key.check()?;
        let mut conn = on.reach(doing).await?;
        let holder = DB::session_holder(&mut conn, &self.key).await;
        conn.finish();
        holder.map_err(|err| failed::<DB>(doing, Some(&self.key), err))
    }

    async fn take<DB: SessionOps>(self, pool: &Pool<DB>) -> Result<Session<DB>> {
        let doing = "acquiring session lock";
        let started = Instant::now();
        let deadline = self.wait.millis().map(|it| started + Duration::from_millis(it));
        let failed = |err| failed::<DB>(doing, Some(&self.key), err);

        let connected_by = deadline.map(|it| it.max(started + FIRST_ANSWER));
        let conn = until(connected_by, checkout(pool, doing, Some(&self.key))).await;
        let conn = match conn {
            Some(conn) => conn?,
            None => return Err(starved(pool).await.unwrap_or_else(|| no_answer(doing, Some(&self.key)))),
        };
        let mut held = Guard::new(Unsettled::new(conn));
        let conn = &mut *held.get_mut().conn;
        let id = self.session_to_lock(pool, conn).await?;
        loop {
            let asked = Instant::now();
            let slice = deadline.map_or(SLICE, |it| it.saturating_duration_since(asked).min(SLICE));
            match answered(slice, DB::session_lock(conn, id, &self.key, self.sharing, slice)).await.map_err(failed)? {
                SessionAnswer::Granted => {
                    return Ok(Session::granted(Realm::sessions(pool), self, id, held));
                }
                SessionAnswer::Elsewhere => return Err(Error::TransactionPooler { key: self.key }),
                SessionAnswer::Held => {}
            }
            if deadline.is_some_and(|it| it <= Instant::now()) {
                let waited = started.elapsed();
                let holder = match answered(Duration::ZERO, DB::session_holder(conn, &self.key)).await {
                    Ok(holder) => holder.map(|it| Box::new(it.into())),
                    Err(err) if DB::fault(&err) == Fault::Unavailable => {
                        return Err(Error::Contended { key: self.key, waited, holder: None });
                    }
                    // A right is missing, say.
                    Err(_) => None,
                };
                // This session has taken nothing, so its connection is as good as before.
                drop(held.defuse());
                return Err(Error::Contended { key: self.key, waited, holder });
            }
            let pause = asked + PAUSE;
            sleep_until(deadline.map_or(pause, |it| pause.min(it))).await;
        }
    }

    /// The server's session behind a connection, which must be the connection's own.
    async fn session_to_lock<DB: SessionOps>(&self, pool: &Pool<DB>, conn: &mut DB::Connection) -> Result<i64> {
        let doing = "looking at the session for session lock";
        let failed = |err| failed::<DB>(doing, Some(&self.key), err);
        let ours = answered(SLICE, DB::session_look(conn)).await.map_err(failed)?;
        if ours.is_replica {
            let reason = "the server is a read-only replica, whose locks are not those of its primary";
            let source = sqlx::Error::Configuration(reason.into());
            return Err(Error::database(doing, &self.key, Fault::ReadOnly, source));
        }
        if !DB::POOLERS_SHARE_SESSIONS {
            return Ok(ours.id);
        }
        // A pooler gives the session of an idle connection to the next client, most often the session used last. So a
        // second connection looks too: either it gets this session, or other clients got it before and our next look
        // runs in another one. Without a second connection, all looks would see one session while no other client is
        // active. The looks alternate unevenly, for poolers that hand out sessions in turn.
        let competing = async {
            // Beside the pool, which may have no second connection.
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
            return Err(Error::TransactionPooler { key: self.key.clone() });
        }
        Ok(ours.id)
    }
}

/// A session lock that this process holds.
///
/// Its connection does nothing else; it is asked every second whether it still has the lock. Dropping this closes the
/// connection, which frees the lock; [`release`](Self::release) also says whether the lock was held to the end, and
/// gives the connection back to its pool.
///
/// Between two heartbeats the lock may be lost without this process knowing, and for as long as the process is stopped
/// or the server does not answer (5 s at most). What must never happen without the lock needs a
/// [lease](crate::Leases) and its fence.
#[must_use = "the lock is released as soon as the session is dropped: bind it, `let session = …` (`let _ = …` drops it at once)"]
pub struct Session<DB: Database> {
    key: Key,
    realm: Realm,
    /// Sends checks to the task that owns the connection. Closed when the lock is lost.
    questions: mpsc::Sender<Question>,
    kept: Guard<Keeping>,
    database: PhantomData<fn() -> DB>,
}

/// Answered when the lock is held; dropped without an answer when it is not.
type Question = oneshot::Sender<()>;

impl<DB: Database> Session<DB> {
    fn granted(realm: Realm, lock: SessionLock, id: i64, held: Guard<Unsettled<DB>>) -> Self
    where
        DB: SessionOps,
    {
        let key = lock.key.clone();
        let (questions, asked) = mpsc::channel(1);
        let kept = Guard::new(Keeping(tokio::spawn(keep(lock, id, held, asked))));
        Self { key, realm, questions, kept, database: PhantomData }
    }

    /// The lock's key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Asks the server whether this session still holds the lock. One round trip; `false` after 5 s without an answer.
    ///
    /// Once it is `false` it stays so, and the connection is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn is_alive(&self) -> bool {
        let (answer, answered) = oneshot::channel();
        self.questions.send(answer).await.is_ok() && answered.await.is_ok()
    }

    /// Resolves when the lock is found to be lost, never otherwise: at the next heartbeat after its connection ended, or
    /// 5 s after the server stopped answering one.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lost(&self) {
        self.questions.closed().await;
    }

    /// Gives the lock back, and its connection to the pool.
    ///
    /// # Errors
    /// [`Error::SessionLost`] when the lock had been lost before, or the server does not say that it was held.
    ///
    /// # Cancel safety
    /// The release goes on in the background if this future is dropped.
    pub async fn release(self) -> Result<()> {
        let Self { questions, kept, .. } = self;
        // The end of the questions is what tells the task to release.
        drop(questions);
        finished("releasing session lock", kept.defuse().0).await
    }

    /// What runs a body under this lock, and drops it when the lock is found to be lost.
    pub(crate) fn watch(&self) -> Watch<'_> {
        let lost = async {
            self.lost().await;
            Error::SessionLost { key: self.key.clone(), source: None }
        };
        Watch::new(OnLost::Stop, || Ok(()), lost).in_span(holding(Strategy::Session, &self.key))
    }

    /// What a body under this lock is under. That it was lost since is heard at the next heartbeat, which stops the body.
    pub(crate) fn lock(&self) -> Lock {
        Lock::of(self.realm, self.key.clone())
    }

    /// Gives the lock back. What was done under it counts only if the lock was held to the end.
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
        // The task drops the connection wherever it is, and that closes it.
        self.0.abort();
    }
}

/// Checks at each heartbeat and each question whether the lock is held. Releases it when all senders of questions are
/// dropped.
async fn keep<DB: SessionOps>(
    lock: SessionLock,
    id: i64,
    mut held: Guard<Unsettled<DB>>,
    mut questions: mpsc::Receiver<Question>,
) -> Result<()> {
    let SessionLock { key, sharing, wait: _, heartbeat } = lock;
    let granted = Instant::now();
    let conn = &mut *held.get_mut().conn;
    let (lost, _unanswered) = loop {
        let question = match timeout(heartbeat, questions.recv()).await {
            Ok(Some(question)) => Some(question),
            Err(_) => None,
            Ok(None) => match answered(Duration::ZERO, DB::session_unlock(conn, id, &key, sharing)).await {
                Ok(true) => {
                    drop(held.defuse());
                    return Ok(());
                }
                not_held => break (not_held.err(), None),
            },
        };
        match answered(Duration::ZERO, DB::session_holds(conn, id, &key)).await {
            // The caller may have been dropped.
            Ok(true) => question.map(|it| it.send(())),
            not_held => break (not_held.err(), question),
        };
    };
    // Closed before the loss is reported.
    drop(held);
    let reason = if lost.is_some() { LossReason::Unreachable } else { LossReason::Stolen };
    observe::lost(Strategy::Session, &key, None, granted.elapsed(), reason);
    Err(Error::SessionLost { key, source: lost.map(Into::into) })
}

/// The server's answer to a statement that may wait for `slice`.
async fn answered<T>(slice: Duration, question: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    let silence = || Err(sqlx::Error::Io(ErrorKind::TimedOut.into()));
    timeout(slice + ANSWER_LIMIT, question).await.unwrap_or_else(|_| silence())
}

/// Locks of a session of the server, which outlive its transactions and end with it.
///
/// Every operation names its session. If a pooler or proxy moved the connection to another session, the operation
/// notices and locks nothing there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no session locks",
    label = "this database has no session locks",
    note = "PostgreSQL, MySQL and MariaDB have them, with lockkit's feature `postgres` or `mysql`; in a generic function, write the bound `DB: lockkit::dialect::SessionOps`",
    note = "use a lease (`lockkit::Leases`), which survives its connection, or a `lockkit::NamedLock` for one transaction"
)]
pub trait SessionOps: Dialect + Known<Sessions, Itself = Self> + SessionStatements {}

/// The statements of session locks. Hidden from users, who call the strategy.
pub trait SessionStatements: Database {
    /// Whether poolers for this database give a session to other clients between two transactions, even while it
    /// holds a lock.
    const POOLERS_SHARE_SESSIONS: bool;

    /// Whether several sessions can share a lock.
    const HAS_SHARED_LOCKS: bool;

    /// The session that runs this statement. Not a prepared statement, since such a pooler may lose it.
    fn session_look(conn: &mut Self::Connection) -> impl Future<Output = sqlx::Result<ServerSession>> + Send;

    /// Takes the lock, or waits for it up to `slice`, or less where the server counts in seconds.
    fn session_lock(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
        sharing: Sharing,
        slice: Duration,
    ) -> impl Future<Output = sqlx::Result<SessionAnswer>> + Send;

    /// Whether the session holds the lock.
    fn session_holds(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// Releases the lock. `false` when the session did not hold it.
    fn session_unlock(
        conn: &mut Self::Connection,
        id: i64,
        key: &Key,
        sharing: Sharing,
    ) -> impl Future<Output = sqlx::Result<bool>> + Send;

    /// The session that holds the lock.
    fn session_holder(
        conn: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = sqlx::Result<Option<LockHolder>>> + Send;
}

/// A session of the server, as it describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerSession {
    pub(crate) id: i64,
    /// A read-only replica, whose locks are not those of its primary.
    pub(crate) is_replica: bool,
}

/// The answer to one attempt to take a session lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAnswer {
    /// The session holds it now, and did not before.
    Granted,
    /// It was held, by another session or by this one already.
    Held,
    /// The statement ran in another session than it named, and locked nothing.
    Elsewhere,
}
