//! Tells waiting requests of the releases of other processes, where the database notifies. A notification that is missed costs a
//! pause.

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    sync::{
        Notify,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    time::{sleep, timeout},
};

use crate::{
    guard::{Guard, Hold},
    key::Key,
    lease::{LeasesBuilder, bounded::LIMIT, builder::TellsReleases, wait::Freed},
    observe::tolerated,
    sql::{Driver, LeaseOps},
    task::timed_out,
};

/// The pause before a listener that lost its connection opens another.
const RECONNECT: Duration = Duration::from_secs(1);

/// Hearing that a lease was given back, instead of asking again and again.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot tell those who wait that a lease was given back",
    note = "only PostgreSQL can (LISTEN and NOTIFY); elsewhere waiters ask again and again, which needs no setting"
)]
pub trait ListenOps: LeaseOps + ListenStatements {}

/// The statements of [`ListenOps`].
pub trait ListenStatements: Driver {
    /// A connection that hears.
    type Listener: Send;

    /// Opens one.
    fn listen(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Self::Listener>> + Send;

    /// Lets those who free the lease know that somebody waits for it.
    fn listen_for(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Nobody waits for it here any more.
    fn listen_no_more(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Waits until a lease was given back; `None` when the connection broke, and something may not have been heard.
    fn heard(listener: &mut Self::Listener) -> impl Future<Output = sqlx::Result<Option<Key>>> + Send;
}

impl<DB: ListenOps> LeasesBuilder<Pool<DB>> {
    /// Wakes those who wait for a lease when another process gives it back, instead of at their next question (every
    /// 250 ms at most). PostgreSQL only: `LISTEN` and `NOTIFY`, on a connection of its own that is opened with the first
    /// wait and kept. A notification that is missed costs one question. Permits, readers and writers still ask.
    ///
    /// It is for those who wait to decide; releases notify by themselves where somebody listens, and only there, because
    /// `NOTIFY` makes all commits of the server that notify wait for each other.
    ///
    /// Not behind a pooler in transaction mode, which hands on no notifications.
    pub fn listen(mut self) -> Self {
        self.tell = Some(|pool| Arc::new(Listening::<DB>::new(pool)));
        self
    }
}

/// Listens for a pool: a task that starts with the first wait, and again when the runtime that it ran on has ended.
struct Listening<DB: ListenOps> {
    pool: Pool<DB>,
    interest: UnboundedSender<Interest>,
    stopped: Arc<Mutex<Option<Listener>>>,
}

/// A request waits for the lease of this key, or no longer.
#[derive(Debug)]
enum Interest {
    From(Key, Arc<Notify>),
    Until(Key, Arc<Notify>),
}

impl<DB: ListenOps> Listening<DB> {
    fn new(pool: Pool<DB>) -> Self {
        let (interest, receiver) = unbounded_channel();
        let listener = Listener { interest: receiver, waiting: HashMap::new() };
        Self { pool, interest, stopped: Arc::new(Mutex::new(Some(listener))) }
    }
}

impl<DB: ListenOps> TellsReleases for Listening<DB> {
    fn freed<'k>(&'k self, key: &'k Key) -> Freed<'k> {
        if let Some(listener) = self.stopped.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let running = Guard::new(Running { listener, stopped: self.stopped.clone() });
            tokio::spawn(listen(self.pool.clone(), running));
        }
        let waiting = Waiting { interest: self.interest.clone(), key: key.clone(), freed: Arc::default() };
        // The receiver lives as long as `self`, or the task.
        let _ = self.interest.send(Interest::From(key.clone(), waiting.freed.clone()));
        Box::pin(async move { waiting.freed.notified().await })
    }
}

impl<DB: ListenOps> fmt::Debug for Listening<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").finish_non_exhaustive()
    }
}

/// One request that waits.
struct Waiting {
    interest: UnboundedSender<Interest>,
    key: Key,
    freed: Arc<Notify>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.interest.send(Interest::Until(self.key.clone(), self.freed.clone()));
    }
}

/// The state of the listening task.
#[derive(Debug)]
struct Listener {
    interest: UnboundedReceiver<Interest>,
    waiting: HashMap<Key, Vec<Arc<Notify>>>,
}

/// Owned by the listening task. When its runtime ends, the next wait starts another one.
struct Running {
    listener: Listener,
    stopped: Arc<Mutex<Option<Listener>>>,
}

impl Hold for Running {
    fn abandon(self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.listener);
    }
}

async fn listen<DB: ListenOps>(pool: Pool<DB>, mut running: Guard<Running>) {
    while !running.listener.interest.is_closed() {
        if let Err(err) = listen_until_broken::<DB>(&pool, &mut running.get_mut().listener).await {
            tolerated("listening for releases, which are polled for instead", &err);
        }
        sleep(RECONNECT).await;
    }
}

/// Listens on one connection. Ends when that breaks, or when no request can wait any more.
async fn listen_until_broken<DB: ListenOps>(
    pool: &Pool<DB>,
    Listener { interest, waiting }: &mut Listener,
) -> sqlx::Result<()> {
    let mut listener = answered(DB::listen(pool)).await?;
    for key in waiting.keys() {
        answered(DB::listen_for(&mut listener, key)).await?;
    }
    loop {
        let changed = tokio::select! {
            changed = interest.recv() => changed,
            heard = DB::heard(&mut listener) => match heard? {
                Some(key) => {
                    waiting.get(&key).into_iter().flatten().for_each(|it| it.notify_one());
                    continue;
                }
                None => return Ok(()),
            },
        };
        match changed {
            Some(Interest::From(key, freed)) => {
                // Kept first: a listener that breaks now listens for the key again.
                let requests = waiting.entry(key.clone()).or_default();
                requests.push(freed);
                if requests.len() == 1 {
                    answered(DB::listen_for(&mut listener, &key)).await?;
                }
            }
            Some(Interest::Until(key, freed)) => {
                let Some(requests) = waiting.get_mut(&key) else { continue };
                requests.retain(|it| !Arc::ptr_eq(it, &freed));
                if requests.is_empty() {
                    waiting.remove(&key);
                    answered(DB::listen_no_more(&mut listener, &key)).await?;
                }
            }
            None => return Ok(()),
        }
    }
}

/// The server's answer, in the time that it is given.
async fn answered<T>(question: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(LIMIT, question).await.unwrap_or_else(|_| Err(timed_out().into()))
}
