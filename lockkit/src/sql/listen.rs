//! Wakes waiting requests on releases by other processes, where the database has notifications. A missed notification
//! delays a request by one polling pause.

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    sync::{
        Notify,
        futures::OwnedNotified,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    time::{sleep, timeout},
};

use crate::{
    body::{
        guard::{Guard, Hold},
        task::timed_out,
    },
    lease::{LeasesBuilder, bounded::LIMIT, inner::ReportsReleases, queue::wait::Freed},
    mutex::Mutex,
    observe::tolerated,
    sql::{Driver, LeaseOps},
    value::key::Key,
};

/// Pause before a listener that lost its connection reconnects.
const RECONNECT: Duration = Duration::from_secs(1);

/// Notifications of released leases, as an alternative to polling only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot tell those who wait that a lease was released",
    note = "only PostgreSQL can (LISTEN and NOTIFY); elsewhere waiters ask again and again, which needs no setting"
)]
pub trait ListenOps: LeaseOps + ListenStatements {}

/// The statements of [`ListenOps`].
pub trait ListenStatements: Driver {
    /// The type of a connection that receives notifications.
    type Listener: Send;

    /// Opens a listening connection.
    fn listen(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<Self::Listener>> + Send;

    /// Announces that a request in this process waits for the lease, so that a release notifies.
    fn listen_for(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Withdraws the announcement: no request in this process waits for the lease any more.
    fn listen_no_more(listener: &mut Self::Listener, key: &Key) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Waits until a lease is released. `None` when the connection broke; notifications may have been missed then.
    fn receive(listener: &mut Self::Listener) -> impl Future<Output = sqlx::Result<Option<Key>>> + Send;
}

impl<DB: ListenOps> LeasesBuilder<Pool<DB>> {
    /// Wakes waiters when another process releases a lease, instead of at their next poll (a pause of at most 250 ms).
    /// PostgreSQL only: it uses `LISTEN` and `NOTIFY`, on one extra connection that is opened with the first wait and
    /// kept. A missed notification costs one poll. Permits, readers and writers still poll.
    ///
    /// Only the waiting process needs this setting. A release sends `NOTIFY` if, and only if, a waiter listens, because
    /// all commits that notify wait for each other on the whole server.
    ///
    /// Do not use it behind a pooler in transaction mode, which forwards no notifications.
    pub fn listen(mut self) -> Self {
        self.listener = Some(|pool| Arc::new(Listening::<DB>::new(pool)));
        self
    }
}

/// The listener of a pool: a task that starts with the first wait, and is restarted when its runtime has ended.
struct Listening<DB: ListenOps> {
    pool: Pool<DB>,
    interest: UnboundedSender<Interest>,
    stopped: Arc<Mutex<Option<Listener>>>,
}

/// Tells the task that a request starts or stops waiting for the lease of this key.
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

impl<DB: ListenOps> ReportsReleases for Listening<DB> {
    fn freed<'k>(&'k self, key: &'k Key) -> Freed<'k> {
        // A task that is spawned on a runtime that ends is dropped at once, and locks this again.
        let stopped = self.stopped.lock().take();
        if let Some(listener) = stopped {
            let running = Guard::new(Running { listener, stopped: self.stopped.clone() });
            tokio::spawn(listen(self.pool.clone(), running));
        }
        let waiting = Waiting { interest: self.interest.clone(), key: key.clone(), freed: Arc::default() };
        // Sending cannot fail: the receiver lives as long as `self`, or the task.
        let _ = self.interest.send(Interest::From(key.clone(), waiting.freed.clone()));
        let freed = waiting.freed.clone().notified_owned();
        Box::pin(Registered { freed: Box::pin(freed), _waiting: waiting })
    }
}

impl<DB: ListenOps> fmt::Debug for Listening<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").finish_non_exhaustive()
    }
}

/// One waiting request.
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

/// Ends with a notification. The registration ends when this is dropped, so a waiter that registers again first stays
/// registered.
struct Registered {
    freed: Pin<Box<OwnedNotified>>,
    _waiting: Waiting,
}

impl Future for Registered {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.freed.as_mut().poll(context)
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
        *self.stopped.lock() = Some(self.listener);
    }
}

/// Listens until no request can wait any more, or the pool is closed.
async fn listen<DB: ListenOps>(pool: Pool<DB>, running: Guard<Running>) {
    let mut closed = pool.close_event();
    // If it is closed, its requests have nothing to listen for.
    let _ = closed.do_until(listen_again_and_again(&pool, running)).await;
}

async fn listen_again_and_again<DB: ListenOps>(pool: &Pool<DB>, mut running: Guard<Running>) {
    while !running.listener.interest.is_closed() {
        // What changed while there was no connection needs no statements of its own.
        let Listener { interest, waiting } = &mut running.get_mut().listener;
        while let Ok(changed) = interest.try_recv() {
            note(waiting, changed);
        }
        if let Err(err) = listen_until_broken::<DB>(pool, &mut running.get_mut().listener).await {
            tolerated("listening for releases, which are polled for instead", &err);
        }
        sleep(RECONNECT).await;
    }
}

/// Listens on one connection. Returns when the connection breaks, or when no request can wait any more.
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
            received = DB::receive(&mut listener) => match received? {
                Some(key) => {
                    waiting.get(&key).into_iter().flatten().for_each(|it| it.notify_one());
                    continue;
                }
                None => return Ok(()),
            },
        };
        match changed {
            Some(changed) => match note(waiting, changed) {
                Some(Change::First(key)) => answered(DB::listen_for(&mut listener, &key)).await?,
                Some(Change::Last(key)) => answered(DB::listen_no_more(&mut listener, &key)).await?,
                None => {}
            },
            None => return Ok(()),
        }
    }
}

/// The requests for a key have changed so that the server must be notified.
enum Change {
    First(Key),
    Last(Key),
}

fn note(waiting: &mut HashMap<Key, Vec<Arc<Notify>>>, changed: Interest) -> Option<Change> {
    match changed {
        Interest::From(key, freed) => {
            let requests = waiting.entry(key.clone()).or_default();
            requests.push(freed);
            (requests.len() == 1).then_some(Change::First(key))
        }
        Interest::Until(key, freed) => {
            let requests = waiting.get_mut(&key)?;
            requests.retain(|it| !Arc::ptr_eq(it, &freed));
            if !requests.is_empty() {
                return None;
            }
            waiting.remove(&key);
            Some(Change::Last(key))
        }
    }
}

/// The server's answer, or an error after the time limit.
async fn answered<T>(question: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(LIMIT, question).await.unwrap_or_else(|_| Err(timed_out().into()))
}
