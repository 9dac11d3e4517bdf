//! The notes that this process has free. A note in use belongs to one batch.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{lease::store::Token, sql::Note};

/// How long a free note is kept. The database deletes notes that were unused for a day.
const KEPT: Duration = Duration::from_hours(1);

static FREE: Mutex<Vec<Free>> = Mutex::new(Vec::new());

struct Free {
    pool: usize,
    note: Note,
    since: Instant,
}

/// A note for the next batch through the pool with this address.
pub(super) struct Borrowed {
    pool: usize,
    pub(super) note: Note,
    /// Whether the database has the note, as far as is known.
    pub(super) is_made: bool,
}

impl Borrowed {
    pub(super) fn new(pool: usize) -> Self {
        let mut free = free();
        free.retain(|it| it.since.elapsed() < KEPT);
        let found = free.iter().rposition(|it| it.pool == pool).map(|it| free.swap_remove(it).note);
        let is_made = found.is_some();
        Self { pool, note: found.unwrap_or_else(|| Note { id: Token::random(), number: 1 }), is_made }
    }

    /// Frees the note for another batch. Only after the answer to its last batch: a note whose batch may still be
    /// executed is dropped instead.
    pub(super) fn free(self) {
        let Self { pool, note: Note { id, number }, is_made } = self;
        if is_made {
            free().push(Free { pool, note: Note { id, number: number + 1 }, since: Instant::now() });
        }
    }
}

/// No code panics while it holds the lock.
fn free() -> MutexGuard<'static, Vec<Free>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}
