//! For unit tests: a store in memory with any profile, which counts its calls and fails some of them.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::time::sleep;

use crate::{
    lease::{
        bounded::is_refused,
        store::{Acquired, Answer, Claim, LeaseRecord, LeaseStore, Profile, Release, pass_on},
    },
    mutex::Mutex,
    testing::MemoryStore,
    value::{
        error::{Error, Fault, Result},
        key::Key,
        token::Token,
    },
};

/// How long it takes the store to refuse a call.
const LATENCY: Duration = Duration::from_millis(5);

/// The calls that are counted. Several leases are taken one after the other, as by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Acquire,
    AcquireEach,
    Look,
    Release,
    ReleaseUnpinned,
    ReleaseAllUnpinned,
}

#[derive(Debug, Clone)]
pub(crate) struct Scripted {
    pub(crate) store: MemoryStore,
    profile: Profile,
    calls: Arc<Mutex<Calls>>,
}

#[derive(Debug, Default)]
struct Calls {
    made: HashMap<Call, u32>,
    claims: Vec<Claim>,
    errors: HashMap<Call, VecDeque<Error>>,
}

impl Scripted {
    pub(crate) fn new(profile: Profile) -> Self {
        Self { store: MemoryStore::new(), profile, calls: Arc::default() }
    }

    /// The next calls fail with these errors. The store has executed them, unless the error says that it did not.
    pub(crate) fn fail(&self, call: Call, errors: impl IntoIterator<Item = Error>) {
        self.calls.lock().errors.entry(call).or_default().extend(errors);
    }

    /// The next calls do not fail.
    pub(crate) fn free(&self, call: Call) {
        self.calls.lock().errors.remove(&call);
    }

    pub(crate) fn calls(&self, call: Call) -> u32 {
        self.calls.lock().made.get(&call).copied().unwrap_or_default()
    }

    /// The claims that were sent alone, in their order.
    pub(crate) fn claims(&self) -> Vec<Claim> {
        self.calls.lock().claims.clone()
    }

    async fn call<T>(&self, call: Call, execute: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let error = {
            let mut calls = self.calls.lock();
            *calls.made.entry(call).or_default() += 1;
            calls.errors.get_mut(&call).and_then(VecDeque::pop_front)
        };
        let Some(error) = error else { return execute.await };
        let was_undone = matches!(&error, Error::Database { fault, .. } if fault.is_of_the_moment());
        if is_refused(&error) || was_undone {
            sleep(LATENCY).await;
        } else {
            execute.await?;
        }
        Err(error)
    }
}

/// A database error of this kind.
pub(crate) fn failed(fault: Fault) -> Error {
    Error::database("testing", None, fault, "as scripted")
}

impl LeaseStore for Scripted {
    pass_on!(lease_renew, lease_list, lease_sweep);

    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.calls.lock().claims.push(claim.clone());
        self.call(Call::Acquire, self.store.lease_acquire(claim)).await
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        assert!(claims.is_sorted_by(|one, next| one.key < next.key), "each key once, in their order");
        self.call(Call::AcquireEach, self.store.lease_acquire_each(claims)).await
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        self.call(Call::Look, self.store.lease_look(key)).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        self.call(Call::Release, self.store.lease_release(key, token, min_hold)).await
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        self.call(Call::ReleaseUnpinned, self.store.lease_release_unpinned(key, token)).await
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        self.call(Call::ReleaseAllUnpinned, self.store.lease_release_all_unpinned(releases)).await
    }

    fn profile(&self) -> Profile {
        self.profile
    }
}
