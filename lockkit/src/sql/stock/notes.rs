//! The notes that this process has free. A note in use belongs to one batch.
//!
//! A process reuses a note, but not one that was settled. Notes unused for a day are deleted when a new one is made.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{mutex::Mutex, sql::Note, value::token::Token};

/// How long a free note is kept. The database deletes notes that were unused for a day.
const KEPT: Duration = Duration::from_hours(1);

/// The free notes of a pool.
#[derive(Default)]
pub(super) struct Notes(Mutex<Vec<Free>>);

struct Free {
    note: Note,
    since: Instant,
}

/// A note for the next batch through the pool.
pub(super) struct Borrowed {
    notes: Arc<Notes>,
    pub(super) note: Note,
    /// Whether the database has the note, as far as is known.
    pub(super) is_made: bool,
}

impl Borrowed {
    pub(super) fn new(notes: Arc<Notes>) -> Self {
        let found = {
            let mut free = notes.0.lock();
            free.retain(|it| it.since.elapsed() < KEPT);
            free.pop().map(|it| it.note)
        };
        let is_made = found.is_some();
        Self { notes, note: found.unwrap_or_else(|| Note { id: Token::random(), number: 1 }), is_made }
    }

    /// Frees the note for another batch. Only after the answer to its last batch: a note whose batch may still be
    /// executed is dropped instead.
    pub(super) fn free(self) {
        let Self { notes, note: Note { id, number }, is_made } = self;
        if is_made {
            notes.0.lock().push(Free { note: Note { id, number: number + 1 }, since: Instant::now() });
        }
    }
}
