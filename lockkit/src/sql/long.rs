//! The open transactions of this process, and the warning of one that stays open for long. A thread of its own looks at
//! them, because a body that hangs may block its runtime. Knows no database.
//!
//! Leases and session locks are not watched: they are meant to be held for long, and block no session on the server.
//! The warning does not name the waiters: that query would need a connection of a pool that is often full in that
//! moment.

use std::{
    collections::BTreeMap,
    panic::Location,
    sync::{
        Condvar, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tracing::Dispatch;

use crate::{mutex::Mutex, observe, value::key::Key};

/// Defaults to 10 s.
static WARN_AFTER_MS: AtomicU64 = AtomicU64::new(10_000);

/// Stands for no warning.
const NEVER: u64 = u64::MAX;

static OPEN: Mutex<Transactions> =
    Mutex::new(Transactions { number: 0, open: BTreeMap::new(), watcher: Watcher::NotStarted });

/// Wakes the thread when a transaction begins and it waits for one.
static BEGUN: Condvar = Condvar::new();

/// Shortest and longest time between two looks.
const LOOKS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How many locks of a transaction are named.
const MOST_LOCKS: usize = 16;

/// Sets how long a [`Tx`](crate::Tx) of this process may be open before lockkit warns of it, in all transactions from
/// the next look on. Defaults to 10 s; `None` switches the warning off.
///
/// The warning is one event of `tracing` for each transaction, with the first 16 locks that were taken through `&mut
/// tx` or by the attribute, and the line of the attribute or of the call of [`begin`](crate::begin). It comes up to a
/// quarter of the time late, at most 1 s. A transaction that hangs has often run a statement on the pool instead of on
/// the transaction: that statement waits for the lock of its own transaction. Leases and session locks are meant to be
/// held for long, so lockkit does not warn of those.
///
/// ```
/// use std::time::Duration;
///
/// lockkit::dialect::warn_of_long_transactions(Duration::from_secs(2));
/// lockkit::dialect::warn_of_long_transactions(None); // no warning
/// ```
pub fn warn_of_long_transactions(after: impl Into<Option<Duration>>) {
    let millis = after.into().map_or(NEVER, |it| u64::try_from(it.as_millis()).unwrap_or(NEVER));
    WARN_AFTER_MS.store(millis, Ordering::Relaxed);
    BEGUN.notify_one();
}

fn warn_after() -> Option<Duration> {
    Some(WARN_AFTER_MS.load(Ordering::Relaxed)).filter(|it| *it != NEVER).map(Duration::from_millis)
}

struct Transactions {
    number: u64,
    /// In the order in which they began.
    open: BTreeMap<u64, Transaction>,
    watcher: Watcher,
}

#[derive(PartialEq, Eq)]
enum Watcher {
    NotStarted,
    Looks,
    /// Until a transaction begins.
    Waits,
}

#[derive(Clone)]
struct Transaction {
    since: Instant,
    begun_at: &'static Location<'static>,
    /// The kind and key of the first ones.
    locks: Vec<(&'static str, Key)>,
    /// Where its caller's events go.
    events: Dispatch,
    is_told: bool,
}

/// An open transaction. It has ended when this is dropped.
pub(crate) struct OpenSince(u64);

impl OpenSince {
    pub(crate) fn now(begun_at: &'static Location<'static>) -> Self {
        let events = tracing::dispatcher::get_default(Clone::clone);
        let begun = Transaction { since: Instant::now(), begun_at, locks: Vec::new(), events, is_told: false };
        let mut transactions = OPEN.lock();
        transactions.number += 1;
        let number = transactions.number;
        transactions.open.insert(number, begun);
        match transactions.watcher {
            Watcher::Looks => {}
            Watcher::Waits if warn_after().is_none() => {}
            Watcher::Waits => {
                BEGUN.notify_one();
            }
            Watcher::NotStarted => {
                let started = thread::Builder::new().name("lockkit-open".to_owned()).spawn(watch);
                // Without a thread there is no warning; the next transaction tries again.
                if started.is_ok() {
                    transactions.watcher = Watcher::Looks;
                }
            }
        }
        Self(number)
    }

    /// The transaction has taken this lock.
    pub(crate) fn locked(&self, kind: &'static str, key: &Key) {
        if let Some(it) = OPEN.lock().open.get_mut(&self.0) {
            let lock = (kind, key.clone());
            if it.locks.len() < MOST_LOCKS && it.locks.last() != Some(&lock) {
                it.locks.push(lock);
            }
        }
    }
}

impl Drop for OpenSince {
    fn drop(&mut self) {
        let ended = OPEN.lock().open.remove(&self.0);
        // Outside of the mutex: it may be the last owner of a subscriber.
        drop(ended);
    }
}

/// Looks at the open transactions, as long as there are any.
fn watch() {
    let mut looked_at_none = false;
    loop {
        let after = warn_after();
        let late = after.map(|after| OPEN.lock().open_for(after)).unwrap_or_default();
        for it in late {
            tracing::dispatcher::with_default(&it.events, || {
                observe::open_for_long(&it.locks, it.begun_at, it.since.elapsed());
            });
        }
        let mut transactions = OPEN.lock();
        // Transactions that follow each other wake the thread only if there was none for a whole pause.
        let waits = looked_at_none && transactions.open.is_empty() || after.is_none();
        looked_at_none = transactions.open.is_empty();
        if waits {
            transactions.watcher = Watcher::Waits;
            transactions = BEGUN.wait(transactions).unwrap_or_else(PoisonError::into_inner);
        } else {
            let pause = (after.unwrap_or(LOOKS.1) / 4).clamp(LOOKS.0, LOOKS.1);
            transactions = BEGUN.wait_timeout(transactions, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        transactions.watcher = Watcher::Looks;
    }
}

impl Transactions {
    /// Those that have been open for so long and were not reported before.
    fn open_for(&mut self, after: Duration) -> Vec<Transaction> {
        let now = Instant::now();
        let late = self.open.values_mut().take_while(|it| now.duration_since(it.since) >= after);
        late.filter_map(|it| (!std::mem::replace(&mut it.is_told, true)).then(|| it.clone())).collect()
    }
}
