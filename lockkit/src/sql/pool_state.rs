//! The one registry of what this process knows of a pool. It ends with the pool.
//!
//! Each module keeps its own type here, so none of them has a `static` keyed by a pool. The address of a pool alone
//! says little: another pool may have it later.

use std::{
    any::Any,
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, LazyLock},
    task::{Context, Waker},
};

use sqlx::{Pool, pool::CloseEvent};
use tokio::runtime::{Handle, Id};

use crate::{body::scope::Realm, mutex::Mutex, sql::Dialect};

static POOLS: LazyLock<Mutex<HashMap<usize, PoolState>>> = LazyLock::new(Mutex::default);

/// The values of one pool, at most one of each type.
struct PoolState {
    closed: CloseEvent,
    values: Vec<Arc<dyn Any + Send + Sync>>,
}

impl PoolState {
    /// Whether the pool is neither closed nor dropped.
    fn is_open(&mut self) -> bool {
        Pin::new(&mut self.closed).poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    fn value<T: Any + Default + Send + Sync>(&mut self) -> Arc<T> {
        if let Some(Ok(known)) = self.values.iter().find(|it| it.is::<T>()).map(|it| it.clone().downcast()) {
            return known;
        }
        let value = Arc::<T>::default();
        self.values.push(value.clone());
        value
    }
}

/// The pool's value of this type, which begins as the default. All callers get the same one until the pool is closed or
/// dropped.
pub(super) fn of_pool<T: Any + Default + Send + Sync, DB: Dialect>(pool: &Pool<DB>) -> Arc<T> {
    if pool.is_closed() {
        return Arc::default();
    }
    let mut pools = POOLS.lock();
    if let Some(state) = pools.get_mut(&address(pool))
        && state.is_open()
    {
        return state.value();
    }
    pools.retain(|_, state| state.is_open());
    let state = PoolState { closed: pool.close_event(), values: Vec::new() };
    pools.entry(address(pool)).insert_entry(state).get_mut().value()
}

struct OfRuntimes<T>(Mutex<HashMap<Id, Arc<T>>>);

impl<T> Default for OfRuntimes<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// As [`of_pool`], with a value for each runtime: one that is not driven holds up no other. It is kept for as long as
/// somebody has it, or no other runtime asks.
pub(super) fn of_runtime<T: Any + Send + Sync, DB: Dialect>(pool: &Pool<DB>, new: impl FnOnce() -> T) -> Arc<T> {
    let all = of_pool::<OfRuntimes<T>, _>(pool);
    let (mut all, runtime) = (all.0.lock(), Handle::current().id());
    if !all.contains_key(&runtime) {
        all.retain(|_, it| Arc::strong_count(it) > 1);
    }
    all.entry(runtime).or_insert_with(|| Arc::new(new())).clone()
}

/// The address of the options, which all handles to one pool share.
pub(crate) fn address<DB: Dialect>(pool: &Pool<DB>) -> usize {
    std::ptr::from_ref(pool.options()).addr()
}

impl Realm {
    /// The realm of this pool's named locks.
    pub(crate) fn named<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Named(address(pool))
    }

    /// The realm of the answers that are stored through this pool.
    #[cfg(feature = "idempotent")]
    pub(crate) fn answers<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Answers(address(pool))
    }

    /// The realm of this pool's row locks.
    pub(crate) fn rows<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Rows(address(pool))
    }

    /// The realm of this pool's session locks.
    pub(crate) fn sessions<DB: Dialect>(pool: &Pool<DB>) -> Self {
        Self::Sessions(address(pool))
    }

    /// Whether the lock belongs to a transaction that began in this pool and is open while the body runs.
    pub(crate) fn has_transaction_of<DB: Dialect>(self, pool: &Pool<DB>) -> bool {
        matches!(self, Self::Named(it) | Self::Answers(it) | Self::Rows(it) if it == address(pool))
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::{
        collections::HashSet,
        sync::atomic::{AtomicU8, Ordering},
    };

    use sqlx::{Sqlite, SqlitePool};

    use super::*;

    #[derive(Default)]
    struct Number(AtomicU8);

    fn pool() -> Pool<Sqlite> {
        SqlitePool::connect_lazy("sqlite::memory:").unwrap()
    }

    fn number(pool: &Pool<Sqlite>) -> u8 {
        of_pool::<Number, _>(pool).0.load(Ordering::Relaxed)
    }

    fn set(pool: &Pool<Sqlite>, number: u8) {
        of_pool::<Number, _>(pool).0.store(number, Ordering::Relaxed);
    }

    #[tokio::test]
    async fn all_handles_to_a_pool_have_one_value_and_other_pools_have_their_own() {
        let (one, other) = (pool(), pool());
        set(&one, 1);
        set(&other, 2);
        assert_eq!((number(&one.clone()), number(&other)), (1, 2));
    }

    #[tokio::test]
    async fn a_value_ends_with_its_pool_also_for_a_later_one_at_its_address() {
        let mut addresses = HashSet::new();
        loop {
            let pool = pool();
            assert_eq!(number(&pool), 0);
            set(&pool, 1);
            if !addresses.insert(address(&pool)) {
                return;
            }
            drop(pool);
            // Until the tasks of the pool have ended, its address is not free.
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn nothing_is_kept_of_a_closed_pool() {
        let pool = pool();
        set(&pool, 1);
        pool.close().await;
        assert_eq!(number(&pool), 0);
    }
}
