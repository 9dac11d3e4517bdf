//! The notes that this process has free. A note in use belongs to one batch.
//!
//! A process reuses a note, but not one that was settled. Notes unused for a day are deleted when a new one is made.

use std::{any::Any, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{sql::Note, value::token::Token};

/// How long a free note is kept. The database deletes notes that were unused for a day.
const KEPT: Duration = Duration::from_hours(1);

static FREE: Mutex<Vec<Free>> = Mutex::new(Vec::new());

struct Free {
    pool: Options,
    note: Note,
    since: Instant,
}

/// The options of a pool, which tell pools apart. A free note keeps them, so that no other pool gets their address.
type Options = Arc<dyn Any + Send + Sync>;

/// A note for the next batch through the pool with these options.
pub(super) struct Borrowed {
    pool: Options,
    pub(super) note: Note,
    /// Whether the database has the note, as far as is known.
    pub(super) is_made: bool,
}

impl Borrowed {
    pub(super) fn new(pool: Options) -> Self {
        let mut free = FREE.lock();
        free.retain(|it| it.since.elapsed() < KEPT);
        let found = free
            .iter()
            .rposition(|it| std::ptr::addr_eq(Arc::as_ptr(&it.pool), Arc::as_ptr(&pool)))
            .map(|it| free.swap_remove(it).note);
        let is_made = found.is_some();
        Self { pool, note: found.unwrap_or_else(|| Note { id: Token::random(), number: 1 }), is_made }
    }

    /// Frees the note for another batch. Only after the answer to its last batch: a note whose batch may still be
    /// executed is dropped instead.
    pub(super) fn free(self) {
        let Self { pool, note: Note { id, number }, is_made } = self;
        if is_made {
            FREE.lock().push(Free { pool, note: Note { id, number: number + 1 }, since: Instant::now() });
        }
    }
}
