//! One claim of this process: its phase, and what is known of its key.

use std::{sync::Arc, time::Duration};

use lockkit::store::Token;
use tokio::time::Instant;

use crate::{layout::Place, session::Session};

/// How far a claim has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No answer came so far: its key may or may not exist.
    Claiming,
    /// Its key was created at this revision. It waits.
    Waiting { revision: i64 },
    /// It holds the lease.
    Held { revision: i64, since: Instant },
}

/// What is known of a claim.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    pub(crate) place: Arc<Place>,
    pub(crate) token: Token,
    pub(crate) path: String,
    pub(crate) session: Arc<Session>,
    pub(crate) phase: Phase,
    /// The value that its key has when it holds the lease.
    pub(crate) record: String,
    /// The revision at which its key was last written, as far as is known.
    pub(crate) written: i64,
    /// The sessions of requests to write the key that were not answered, and may still be executed.
    pub(crate) doubts: Vec<Arc<Session>>,
    /// The lease has expired or is being released: its key is to be removed.
    pub(crate) ended: bool,
    /// Until when the key stays taken after its release.
    pub(crate) stays: Option<Instant>,
    /// The etcd lease that keeps the key after a release.
    pub(crate) left_to: Option<i64>,
    pub(crate) until: Instant,
    pub(crate) renewals: u64,
    pub(crate) ttl: Duration,
    /// When it is looked at next. Its other entries in the heap are out of date.
    pub(crate) scheduled: Option<Instant>,
}

impl Claimed {
    pub(crate) fn revision(&self) -> Option<i64> {
        match self.phase {
            Phase::Claiming => None,
            Phase::Waiting { revision } | Phase::Held { revision, .. } => Some(revision),
        }
    }

    /// Whether it has held the lease.
    pub(crate) fn held_once(&self) -> bool {
        matches!(self.phase, Phase::Held { .. })
    }

    /// Whether a request to write its key may still be executed.
    pub(crate) fn is_in_doubt(&self) -> bool {
        !self.doubts.is_empty()
    }

    /// Since when it holds the lease, if it does and the lease has not expired.
    pub(crate) fn held_since(&self) -> Option<Instant> {
        self.unexpired_since().filter(|_| !self.ended)
    }

    /// As [`held_since`](Self::held_since), also while the lease is being released: a release may be repeated.
    pub(crate) fn unexpired_since(&self) -> Option<Instant> {
        match self.phase {
            Phase::Held { since, .. } if self.until > Instant::now() => Some(since),
            _ => None,
        }
    }
}
