//! Hears that leases were given back by other processes, where the database tells. Hearing nothing costs a poll.

use std::{
    collections::{HashMap, hash_map::Entry},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{sleep, timeout},
};

use super::Inner;
use crate::{
    guard::{Guard, Hold},
    key::Key,
    lease::{bounded::LIMIT, store::LeaseStore},
    observe::tolerated,
    sql::ListenOps,
    task::timed_out,
};

/// The pause before a listener that lost its connection opens another.
const RECONNECT: Duration = Duration::from_secs(1);

/// What the listening task is, for a kind of store.
pub(super) type Listen<S> = fn(Weak<Inner<S>>, S, Guard<Hearing>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Somebody waits for a lease, or no longer.
#[derive(Debug)]
pub(super) enum Interest {
    From(Key),
    Until(Key),
}

/// The ears of one process: a task that starts with the first wait, and again when the runtime that it ran on has ended.
pub(super) struct Ears<S: LeaseStore> {
    interest: UnboundedSender<Interest>,
    listen: Listen<S>,
    stopped: Arc<Mutex<Option<Heard>>>,
}

impl<S: LeaseStore> Ears<S> {
    pub(super) fn new(listen: Listen<S>) -> Self {
        let (interest, receiver) = unbounded_channel();
        let heard = Heard { interest: receiver, waited_for: HashMap::new() };
        Self { interest, listen, stopped: Arc::new(Mutex::new(Some(heard))) }
    }

    /// Listens for the key until the answer is dropped.
    pub(super) fn listen_for(&self, inner: &Weak<Inner<S>>, store: &S, key: &Key) -> Listening {
        if let Some(heard) = self.stopped.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let hearing = Guard::new(Hearing { heard, stopped: self.stopped.clone() });
            tokio::spawn((self.listen)(inner.clone(), store.clone(), hearing));
        }
        // The receiver lives as long as `self`, or the task.
        let _ = self.interest.send(Interest::From(key.clone()));
        Listening { interest: self.interest.clone(), key: key.clone() }
    }
}

/// What the listening task goes by.
#[derive(Debug)]
struct Heard {
    interest: UnboundedReceiver<Interest>,
    /// How many wait for each key.
    waited_for: HashMap<Key, u32>,
}

/// Owned by the listening task. When its runtime ends, the next wait starts another one.
pub(super) struct Hearing {
    heard: Heard,
    stopped: Arc<Mutex<Option<Heard>>>,
}

impl Hold for Hearing {
    fn abandon(self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.heard);
    }
}

/// One wait that is listened for.
#[derive(Debug)]
pub(super) struct Listening {
    interest: UnboundedSender<Interest>,
    key: Key,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.interest.send(Interest::Until(self.key.clone()));
    }
}

pub(super) fn listen<DB: ListenOps>(
    inner: Weak<Inner<Pool<DB>>>,
    pool: Pool<DB>,
    hearing: Guard<Hearing>,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(hear::<DB>(inner, pool, hearing))
}

async fn hear<DB: ListenOps>(inner: Weak<Inner<Pool<DB>>>, pool: Pool<DB>, mut hearing: Guard<Hearing>) {
    while inner.strong_count() > 0 {
        if let Err(err) = hear_until_broken::<DB>(&inner, &pool, &mut hearing.get_mut().heard).await {
            tolerated("listening for releases, which are asked for instead", &err);
        }
        sleep(RECONNECT).await;
    }
}

/// Hears on one connection. Ends when that breaks, or when nobody can wait any more.
async fn hear_until_broken<DB: ListenOps>(
    inner: &Weak<Inner<Pool<DB>>>,
    pool: &Pool<DB>,
    Heard { interest, waited_for }: &mut Heard,
) -> sqlx::Result<()> {
    let mut listener = answered(DB::listen(pool)).await?;
    for key in waited_for.keys() {
        answered(DB::listen_for(&mut listener, key)).await?;
    }
    loop {
        let changed = tokio::select! {
            changed = interest.recv() => changed,
            heard = DB::heard(&mut listener) => match (heard?, inner.upgrade()) {
                (Some(key), Some(inner)) => {
                    inner.lines.freed(&key);
                    continue;
                }
                _ => return Ok(()),
            },
        };
        match changed {
            Some(Interest::From(key)) => match waited_for.entry(key) {
                Entry::Occupied(mut waiters) => *waiters.get_mut() += 1,
                Entry::Vacant(none) => {
                    let key = none.key().clone();
                    // Counted first: a listener that breaks now listens for it again.
                    none.insert(1);
                    answered(DB::listen_for(&mut listener, &key)).await?;
                }
            },
            Some(Interest::Until(key)) => {
                if let Entry::Occupied(mut waiters) = waited_for.entry(key) {
                    *waiters.get_mut() -= 1;
                    if *waiters.get() == 0 {
                        let (key, _) = waiters.remove_entry();
                        answered(DB::listen_no_more(&mut listener, &key)).await?;
                    }
                }
            }
            None => return Ok(()),
        }
    }
}

/// What the server answers, in the time that it is given.
async fn answered<T>(question: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    timeout(LIMIT, question).await.unwrap_or_else(|_| Err(timed_out().into()))
}
