//! The rows that attempts of this process lock. Knows no database.

use std::{
    collections::HashMap,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

use crate::value::version::Row;

/// The number of retries that lock each row.
static LOCKED: LazyLock<Mutex<HashMap<Row, usize>>> = LazyLock::new(Mutex::default);

/// The number of rows, to see without the mutex that there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A retry that locks a row in its attempts. While there is one, other retries lock the row at once, without a conflict
/// of their own.
#[derive(Debug)]
pub(crate) struct Locking(Row);

impl Locking {
    pub(crate) fn start(row: Row) -> Self {
        let mut locked = LOCKED.lock();
        *locked.entry(row).or_default() += 1;
        COUNT.store(locked.len(), Ordering::Relaxed);
        Self(row)
    }

    pub(crate) fn row(&self) -> Row {
        self.0
    }

    /// Whether any retry locks any row.
    pub(crate) fn is_any() -> bool {
        COUNT.load(Ordering::Relaxed) > 0
    }

    /// Whether any retry locks this row.
    pub(crate) fn is_locked(row: Row) -> bool {
        LOCKED.lock().contains_key(&row)
    }
}

impl Drop for Locking {
    fn drop(&mut self) {
        let mut locked = LOCKED.lock();
        let Some(retries) = locked.get_mut(&self.0) else { return };
        *retries -= 1;
        if *retries == 0 {
            locked.remove(&self.0);
            COUNT.store(locked.len(), Ordering::Relaxed);
        }
    }
}
