//! Releases that a server has not heard: repeated until it answers, or the lease has expired.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::store::{Release, Token};
use tokio::time::{Instant, sleep};

use crate::{home, node::Node};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Maximum number of releases in one call.
const BATCH: usize = 500;

/// The releases that one server is owed. One task at a time repeats them.
#[derive(Debug, Default)]
pub(crate) struct Debts {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    owed: HashMap<Token, Owed>,
    is_repeating: bool,
}

#[derive(Debug, Clone)]
struct Owed {
    release: Release,
    /// When the lease has expired at the latest.
    until: Instant,
}

impl Debts {
    /// Repeats the releases in the background, at most for `ttl`.
    pub(crate) fn owe(self: &Arc<Self>, node: &Arc<Node>, releases: &[Release], ttl: Duration) {
        let until = Instant::now() + ttl;
        {
            let mut state = self.state();
            for release in releases {
                state.owed.insert(release.token, Owed { release: release.clone(), until });
            }
            if state.owed.is_empty() || std::mem::replace(&mut state.is_repeating, true) {
                return;
            }
        }
        if home::spawn(repeat(self.clone(), node.clone())).is_err() {
            // Without a thread, the leases expire. The next debt tries again.
            self.state().is_repeating = false;
        }
    }

    fn put_back(&self, owed: Vec<Owed>) {
        let mut state = self.state();
        for it in owed {
            state.owed.entry(it.release.token).or_insert(it);
        }
    }

    /// Ignores poisoning: no code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn repeat(debts: Arc<Debts>, node: Arc<Node>) {
    loop {
        let owed = {
            let mut state = debts.state();
            let now = Instant::now();
            state.owed.retain(|_, it| it.until > now);
            if state.owed.is_empty() {
                // Under the same lock, so that a new debt finds either the task or none.
                state.is_repeating = false;
                return;
            }
            let tokens: Vec<_> = state.owed.keys().copied().take(BATCH).collect();
            tokens.iter().filter_map(|it| state.owed.remove(it)).collect::<Vec<_>>()
        };
        let releases: Vec<_> = owed.iter().map(|it| it.release.clone()).collect();
        let nobody: Vec<_> = releases.iter().map(|_| Token::nobody()).collect();
        if node.release(&releases, &nobody).await.is_err() {
            debts.put_back(owed);
            sleep(PAUSE).await;
        }
    }
}
