//! One claim of this process: its phase, and what is known of its child.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit::{Fence, Key};
use tokio::{
    sync::{Mutex as Turn, watch},
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use crate::{layout::Place, note::Note};

/// One claim of this process.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub(crate) key: Key,
    /// The path of the key's node.
    pub(crate) dir: String,
    pub(crate) holder: Arc<str>,
    /// The session that it belongs to.
    pub(crate) session: u64,
    /// Held by the call that changes the claim: one at a time.
    pub(crate) turn: Arc<Turn<()>>,
    pub(crate) phase: Phase,
    /// Keeps the place or the ttl. Ends with the claim.
    pub(crate) task: Option<Task>,
}

/// A task that is stopped when this is dropped.
#[derive(Debug)]
pub(crate) struct Task(AbortHandle);

impl Task {
    pub(crate) fn of<T>(task: &JoinHandle<T>) -> Self {
        Self(task.abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where a claim stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// It has no child so far, or none that is known.
    Claiming,
    /// It has a place in the queue.
    Waiting(Waiting),
    /// It holds the lease.
    Held(Held),
    /// Its child is being deleted. It is no longer renewed.
    Ending(Held),
}

/// A place in the queue.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) place: Place,
    pub(crate) fence: Fence,
    /// The server's time at the creation, in milliseconds.
    pub(crate) ctime: i64,
    pub(crate) created: Instant,
    pub(crate) ttl: Duration,
    /// Whether the place is the first of the queue. Closed when the place is given up.
    pub(crate) called: watch::Sender<bool>,
}

/// A granted lease.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) place: Place,
    pub(crate) fence: Fence,
    pub(crate) acquired_at: SystemTime,
    pub(crate) granted: Instant,
    pub(crate) until: Instant,
    pub(crate) ttl: Duration,
    /// The ttl that its child shows to others.
    pub(crate) shown_ttl: Duration,
    pub(crate) renewals: u64,
    /// The version of the note of this holder, or [`UNKNOWN`]. `None` for a node without a note.
    pub(crate) note: Option<i32>,
}

/// No node has this version: the end of the lease reads the note before it replaces it. A version that was only
/// expected may be that of the data of another owner.
pub(crate) const UNKNOWN: i32 = -2;

impl Held {
    /// The note that the end of the lease leaves, and the version of the one that it replaces. `None` for a node
    /// without a note.
    pub(crate) fn replaced_by<'n>(&self, note: &'n Note) -> Option<(&'n Note, i32)> {
        self.note.map(|version| (note, version))
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn a_task_is_stopped_when_its_claim_is_dropped() {
        let running = tokio::spawn(pending::<()>());
        drop(Task::of(&running));
        assert!(running.await.is_err_and(|it| it.is_cancelled()));
    }
}
