//! Which locks the code that runs now is under, so that a task does not wait for itself. Only a body that lockkit runs is
//! known: a guard that the caller keeps may be given to another task.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task;

use crate::{key::Key, lease::store::Token};

tokio::task_local! {
    /// The locks of this body, and of those around it.
    static LOCKS: Arc<Scope>;
}

pub(crate) struct Scope {
    locks: Vec<Lock>,
    /// Where the body is polled at this moment; `None` while it is dropped.
    place: Mutex<Option<Place>>,
}

/// Where a body is polled. It may be another place each time.
#[derive(Clone)]
struct Place {
    /// A body can drive other tasks, as a `LocalSet` does. Those are not under its locks.
    task: Option<task::Id>,
    around: Option<Arc<Scope>>,
}

impl Scope {
    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        // No code panics while it holds the lock.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn around(&self) -> Option<Arc<Self>> {
        self.place().as_ref()?.around.clone()
    }

    /// Runs `poll`, which polls the body. Where that is, is found anew each time: the body may have gone on in another task,
    /// which is not under what was around the first.
    fn at<T>(&self, poll: impl FnOnce() -> T) -> T {
        *self.place() = Some(Place { task: task::try_id(), around: innermost() });
        let polled = poll();
        let left = self.place().take();
        drop(left);
        polled
    }

    fn is_of_this_task(&self) -> bool {
        self.place().as_ref().is_none_or(|it| it.task == task::try_id())
    }
}

/// A lock that a body runs under.
pub(crate) struct Lock {
    pub(crate) key: Key,
    pub(crate) realm: Realm,
    /// Of a lease.
    pub(crate) token: Option<Token>,
    /// Whether the body still is under it.
    pub(crate) still: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Lock {
    /// A lock that is held for as long as its body runs.
    pub(crate) fn of(realm: Realm, key: Key) -> Self {
        Self { key, realm, token: None, still: Box::new(|| true) }
    }
}

/// Where two locks of one key are one lock, as far as this process knows. Whatever the address is of lives longer than the
/// body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Realm {
    /// The leases of one `Leases`.
    Leases(usize),
    /// The named locks of one pool.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    Named(usize),
    /// The row locks of one pool, by the names of their tables.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    Rows(usize),
    /// The session locks of one pool.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    Sessions(usize),
    /// Nothing is known of it but the key.
    #[cfg_attr(not(feature = "testing"), allow(dead_code))]
    Elsewhere,
}

/// The locks of this kind that the code which runs now is under.
fn find<T>(which: impl Fn(&Lock) -> Option<T>) -> Vec<T> {
    let mut found = Vec::new();
    let mut scope = innermost();
    while let Some(it) = scope {
        found.extend(it.locks.iter().filter(|it| (it.still)()).filter_map(&which));
        scope = it.around();
    }
    found
}

/// How many of these locks the code that runs now is under.
pub(crate) fn count(which: impl Fn(&Lock) -> bool) -> usize {
    find(|it| which(it).then_some(())).len()
}

/// Whether the code that runs now is under one of these locks.
pub(crate) fn is_under(which: impl Fn(&Lock) -> bool) -> bool {
    count(which) > 0
}

/// The leases of this kind that the code which runs now is under.
pub(crate) fn leases(which: impl Fn(&Lock) -> bool) -> Vec<(Key, Token)> {
    find(|it| it.token.filter(|_| which(it)).map(|token| (it.key.clone(), token)))
}

fn innermost() -> Option<Arc<Scope>> {
    LOCKS.try_with(Arc::clone).ok().filter(|it| it.is_of_this_task())
}

/// The locks of a body that is polled where they are entered.
#[derive(Clone)]
pub struct Record(Arc<Scope>);

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").finish_non_exhaustive()
    }
}

impl Record {
    pub(crate) fn new(locks: impl IntoIterator<Item = Lock>) -> Self {
        Self(Arc::new(Scope { locks: locks.into_iter().collect(), place: Mutex::new(None) }))
    }

    /// Runs `body` under the locks. They are on record while it is dropped, too.
    pub(crate) async fn run<F: Future>(self, body: F) -> F::Output {
        let Self(scope) = self;
        let mut body = pin!(LOCKS.scope(scope.clone(), body));
        poll_fn(|context| scope.at(|| body.as_mut().poll(context))).await
    }

    /// Runs `poll`, with a record that it is under the locks.
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        self.0.at(|| LOCKS.sync_scope(self.0.clone(), poll))
    }
}

/// Whether the code that runs now is under the lock of this key; if not, what it is under.
#[cfg(feature = "testing")]
pub(crate) fn is_locked(key: &Key) -> Result<(), String> {
    let mut scope = innermost();
    let mut others = Vec::new();
    while let Some(it) = scope {
        for Lock { key: locked, still, .. } in &it.locks {
            match (locked == key, still()) {
                (true, true) => return Ok(()),
                (true, false) => return Err(format!("the lease of `{key}` was lost, or given back")),
                (false, _) => others.push(format!("`{locked}`")),
            }
        }
        scope = it.around();
    }
    Err(match &*others {
        [] => "it is under no lock".to_owned(),
        others => format!("it is under {}", others.join(", ")),
    })
}
