//! The locks that the running code is under, so that a task does not wait for itself. Only bodies that lockkit runs are
//! known, because a guard that the caller keeps may be given to another task.
//!
//! A body runs in a `tokio::task_local!` scope that names its locks, by key and by owner: the `Leases` or the pool. The
//! scope is computed at each poll, with the task's id. So a body that moved to another task is not under the locks of
//! the first one, and a task that a body drives (on its own `LocalSet`) is not under the body's. A lease that the body
//! has released or lost no longer counts. `assert_locked!` reads the same scope.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use tokio::task;

use crate::{
    mutex::Mutex,
    value::{key::Key, token::Token},
};

tokio::task_local! {
    /// The locks of this body and of its enclosing ones.
    static LOCKS: Arc<Scope>;
}

pub(crate) struct Scope {
    locks: Vec<Lock>,
    /// Where the body is being polled. `None` while it is dropped.
    place: Mutex<Option<Place>>,
}

/// The task and the enclosing scope of a poll. They can differ from poll to poll.
#[derive(Clone)]
struct Place {
    /// A body can drive other tasks, as a `LocalSet` does. Those tasks are not under its locks.
    task: Option<task::Id>,
    around: Option<Arc<Scope>>,
}

impl Scope {
    fn around(&self) -> Option<Arc<Self>> {
        self.place.lock().as_ref()?.around.clone()
    }

    /// Runs `poll`, which polls the body. Determines the place anew each time, because the body may have moved to
    /// another task. That task is not under the locks that enclosed the first poll.
    fn at<T>(&self, poll: impl FnOnce() -> T) -> T {
        *self.place.lock() = Some(Place { task: task::try_id(), around: innermost() });
        let polled = poll();
        let left = self.place.lock().take();
        drop(left);
        polled
    }

    fn is_of_this_task(&self) -> bool {
        self.place.lock().as_ref().is_none_or(|it| it.task == task::try_id())
    }
}

/// A lock that a body runs under.
pub(crate) struct Lock {
    pub(crate) key: Key,
    pub(crate) realm: Realm,
    /// The token, if the lock is a lease.
    pub(crate) token: Option<Token>,
    /// Whether the body is still under the lock.
    pub(crate) still: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Lock {
    /// A lock that is held for as long as its body runs.
    pub(crate) fn of(realm: Realm, key: Key) -> Self {
        Self { key, realm, token: None, still: Box::new(|| true) }
    }
}

/// The scope in which two locks of one key are the same lock, as far as this process knows. The variants hold the
/// address of an object that outlives the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Realm {
    /// The leases of one `Leases`.
    Leases(usize),
    /// The named locks of one pool.
    Named(usize),
    /// The locks of the answers that are stored through one pool.
    Answers(usize),
    /// The row locks of one pool, by the names of their tables.
    Rows(usize),
    /// The session locks of one pool.
    Sessions(usize),
    /// A lock of which only the key is known.
    Elsewhere,
}

/// The locks of the running code that `which` selects.
fn find<T>(which: impl Fn(&Lock) -> Option<T>) -> Vec<T> {
    let mut found = Vec::new();
    let mut scope = innermost();
    while let Some(it) = scope {
        found.extend(it.locks.iter().filter(|it| (it.still)()).filter_map(&which));
        scope = it.around();
    }
    found
}

/// The number of locks of the running code that `which` selects.
pub(crate) fn count(which: impl Fn(&Lock) -> bool) -> usize {
    find(|it| which(it).then_some(())).len()
}

/// Whether the running code is under a lock that `which` selects.
pub(crate) fn is_under(which: impl Fn(&Lock) -> bool) -> bool {
    count(which) > 0
}

/// The leases of the running code that `which` selects.
pub(crate) fn leases(which: impl Fn(&Lock) -> bool) -> Vec<(Key, Token)> {
    find(|it| it.token.filter(|_| which(it)).map(|token| (it.key.clone(), token)))
}

fn innermost() -> Option<Arc<Scope>> {
    LOCKS.try_with(Arc::clone).ok().filter(|it| it.is_of_this_task())
}

/// The locks of a body, to enter them for each poll.
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

    /// Runs `body` under the locks. They are also registered while the body is dropped.
    pub(crate) async fn run<F: Future>(self, body: F) -> F::Output {
        let Self(scope) = self;
        let mut body = pin!(LOCKS.scope(scope.clone(), body));
        poll_fn(|context| scope.at(|| body.as_mut().poll(context))).await
    }

    /// Runs `poll` with the locks registered.
    pub(crate) fn enter<T>(&self, poll: impl FnOnce() -> T) -> T {
        self.0.at(|| LOCKS.sync_scope(self.0.clone(), poll))
    }
}

/// Whether the running code is under the lock of this key. If not, the error lists its locks.
#[cfg(feature = "testing")]
pub(crate) fn is_locked(key: &Key) -> Result<(), String> {
    let mut scope = innermost();
    let mut others = Vec::new();
    while let Some(it) = scope {
        for Lock { key: locked, still, .. } in &it.locks {
            match (locked == key, still()) {
                (true, true) => return Ok(()),
                (true, false) => return Err(format!("the lease of `{key}` was lost or released")),
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

/// Runs a body with its locks registered.
pub(crate) struct Under<'a, F> {
    record: Record,
    body: Pin<&'a mut F>,
}

impl<'a, F> Under<'a, F> {
    pub(crate) fn new(record: Record, body: Pin<&'a mut F>) -> Self {
        Self { record, body }
    }
}

impl<F: Future> Future for Under<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { record, body } = &mut *self;
        record.enter(|| body.as_mut().poll(context))
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn a_task_that_a_body_drives_is_not_under_the_locks_of_the_body() {
        let is_locked = || is_under(|it| it.key == "k");
        let body = async {
            assert!(is_locked());
            let driven = LocalSet::new();
            let task = driven.spawn_local(async move { is_locked() });
            driven.run_until(task).await.unwrap()
        };
        let record = Record::new([Lock::of(Realm::Elsewhere, Key::from("k"))]);
        assert!(!record.run(body).await);
    }
}
