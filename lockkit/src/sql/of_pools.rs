//! What is known of pools, for as long as each of them is open.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    task::{Context, Waker},
};

use parking_lot::Mutex;
use sqlx::{Pool, pool::CloseEvent};

use crate::sql::{Dialect, pool::address};

/// A value for each pool. It is forgotten when the pool is closed or dropped, because another pool may have its address
/// then.
pub(super) struct OfPools<T>(Mutex<HashMap<usize, (CloseEvent, T)>>);

impl<T> Default for OfPools<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> OfPools<T> {
    /// Reads or changes the value of this pool. `change` must not use any value of this `OfPools` again.
    pub(super) fn with<DB: Dialect, R>(&self, pool: &Pool<DB>, change: impl FnOnce(&mut Option<T>) -> R) -> R {
        let mut values = self.0.lock();
        let known = values
            .remove(&address(pool))
            .and_then(|(mut closed, value)| is_open(&mut closed).then_some((closed, value)));
        let (closed, mut value) = known.unzip();
        let result = change(&mut value);
        if let Some(value) = value {
            let closed = closed.unwrap_or_else(|| {
                values.retain(|_, (closed, _)| is_open(closed));
                pool.close_event()
            });
            values.insert(address(pool), (closed, value));
        }
        result
    }

    /// Takes the value of the pool that has this address, or had it before it was dropped, if it is the one meant.
    pub(super) fn take(&self, address: usize, is_meant: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut values = self.0.lock();
        let is_meant = values.get(&address).is_some_and(|(_, value)| is_meant(value));
        if is_meant { values.remove(&address).map(|(_, value)| value) } else { None }
    }
}

/// Whether the pool of the event is neither closed nor dropped.
fn is_open(event: &mut CloseEvent) -> bool {
    Pin::new(event).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}
