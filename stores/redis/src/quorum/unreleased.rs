//! Releases that a server has not answered: repeated until it does, or the lease has expired.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::store::{Release, Token};
use tokio::time::{Instant, sleep};

use crate::{node::Node, runtime};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Maximum number of releases in one call.
const BATCH: usize = 500;

/// The releases that one server has not answered. One task at a time repeats them.
#[derive(Debug, Default)]
pub(crate) struct Unreleased {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<Token, Pending>,
    is_repeating: bool,
}

#[derive(Debug, Clone)]
struct Pending {
    release: Release,
    /// When the lease has expired at the latest.
    until: Instant,
}

impl Unreleased {
    /// Repeats the releases in the background, at most for `ttl`.
    pub(crate) fn add(self: &Arc<Self>, node: &Arc<Node>, releases: &[Release], ttl: Duration) {
        let until = Instant::now() + ttl;
        {
            let mut state = self.state();
            for release in releases {
                state.pending.insert(release.token, Pending { release: release.clone(), until });
            }
            if state.pending.is_empty() || std::mem::replace(&mut state.is_repeating, true) {
                return;
            }
        }
        if runtime::spawn(repeat(self.clone(), node.clone())).is_err() {
            // Without a thread, the leases expire. The next release tries again.
            self.state().is_repeating = false;
        }
    }

    fn put_back(&self, pending: Vec<Pending>) {
        let mut state = self.state();
        for it in pending {
            state.pending.entry(it.release.token).or_insert(it);
        }
    }

    /// Ignores poisoning: no code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn repeat(unreleased: Arc<Unreleased>, node: Arc<Node>) {
    loop {
        let pending = {
            let mut state = unreleased.state();
            let now = Instant::now();
            state.pending.retain(|_, it| it.until > now);
            if state.pending.is_empty() {
                // Under the same lock, so that a new release finds either the task or none.
                state.is_repeating = false;
                return;
            }
            let tokens: Vec<_> = state.pending.keys().copied().take(BATCH).collect();
            tokens.iter().filter_map(|it| state.pending.remove(it)).collect::<Vec<_>>()
        };
        let releases: Vec<_> = pending.iter().map(|it| it.release.clone()).collect();
        if node.release(&releases).await.is_err() {
            unreleased.put_back(pending);
            sleep(PAUSE).await;
        }
    }
}
