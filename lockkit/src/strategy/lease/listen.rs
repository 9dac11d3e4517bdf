//! Hears that leases were given back by other processes, where the database tells. Hearing nothing costs a poll.

use std::{
    collections::{HashMap, hash_map::Entry},
    pin::Pin,
    sync::{Mutex, PoisonError, Weak},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::sleep,
};

use super::Inner;
use crate::{dialect::ListenOps, key::Key, observe::tolerated, store::LeaseStore};

/// The pause before a listener that lost its connection opens another.
const RECONNECT: Duration = Duration::from_secs(1);

/// What the listening task is, for a kind of store.
pub(super) type Listen<S> =
    fn(Weak<Inner<S>>, S, UnboundedReceiver<Interest>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Somebody waits for a lease, or no longer.
#[derive(Debug)]
pub(super) enum Interest {
    From(Key),
    Until(Key),
}

/// The ears of one process: a task that starts with the first wait.
pub(super) struct Ears<S: LeaseStore> {
    interest: UnboundedSender<Interest>,
    not_started: Mutex<Option<(Listen<S>, UnboundedReceiver<Interest>)>>,
}

impl<S: LeaseStore> Ears<S> {
    pub(super) fn new(listen: Listen<S>) -> Self {
        let (interest, receiver) = unbounded_channel();
        Self { interest, not_started: Mutex::new(Some((listen, receiver))) }
    }

    /// Listens for the key until the answer is dropped.
    pub(super) fn listen_for(&self, inner: &Weak<Inner<S>>, store: &S, key: &Key) -> Listening {
        if let Some((listen, receiver)) = self.not_started.lock().unwrap_or_else(PoisonError::into_inner).take() {
            tokio::spawn(listen(inner.clone(), store.clone(), receiver));
        }
        // The task ends only with its `Leases`, or with the runtime.
        let _ = self.interest.send(Interest::From(key.clone()));
        Listening { interest: self.interest.clone(), key: key.clone() }
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
    interest: UnboundedReceiver<Interest>,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(hear::<DB>(inner, pool, interest))
}

async fn hear<DB: ListenOps>(inner: Weak<Inner<Pool<DB>>>, pool: Pool<DB>, mut interest: UnboundedReceiver<Interest>) {
    let mut waited_for = HashMap::new();
    while inner.strong_count() > 0 {
        if let Err(err) = hear_until_broken::<DB>(&inner, &pool, &mut interest, &mut waited_for).await {
            tolerated("listening for releases, which are asked for instead", &err);
        }
        sleep(RECONNECT).await;
    }
}

/// Hears on one connection. Ends when that breaks, or when nobody can wait any more.
async fn hear_until_broken<DB: ListenOps>(
    inner: &Weak<Inner<Pool<DB>>>,
    pool: &Pool<DB>,
    interest: &mut UnboundedReceiver<Interest>,
    waited_for: &mut HashMap<Key, u32>,
) -> sqlx::Result<()> {
    let mut listener = DB::listen(pool).await?;
    for key in waited_for.keys() {
        DB::listen_for(&mut listener, key).await?;
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
                    DB::listen_for(&mut listener, none.key()).await?;
                    none.insert(1);
                }
            },
            Some(Interest::Until(key)) => {
                if let Entry::Occupied(mut waiters) = waited_for.entry(key) {
                    *waiters.get_mut() -= 1;
                    if *waiters.get() == 0 {
                        let (key, _) = waiters.remove_entry();
                        DB::listen_no_more(&mut listener, &key).await?;
                    }
                }
            }
            None => return Ok(()),
        }
    }
}
