//! Faults that a test can inject between a process and a [`MemoryStore`](crate::testing::MemoryStore).
//!
//! A partition, a slow network or a lost answer is between one process and the store, so faults belong to a client: two
//! clients relate like two machines. Theft and a stepped clock belong to the store.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    time::Duration,
};

use tokio::{sync::watch, task::yield_now, time::sleep};

use crate::{
    mutex::Mutex,
    value::{
        error::{Error, Fault, Result},
        key::Key,
    },
};

/// The operations of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`lease_acquire`](crate::LeaseStore::lease_acquire),
    /// [`lease_acquire_all`](crate::LeaseStore::lease_acquire_all) and
    /// [`lease_acquire_each`](crate::LeaseStore::lease_acquire_each).
    Acquire,
    /// [`lease_look`](crate::LeaseStore::lease_look).
    Look,
    /// [`lease_renew`](crate::LeaseStore::lease_renew).
    Renew,
    /// [`lease_release`](crate::LeaseStore::lease_release).
    Release,
    /// [`lease_list`](crate::LeaseStore::lease_list) and [`lease_expired`](crate::LeaseStore::lease_expired).
    List,
    /// [`lease_sweep`](crate::LeaseStore::lease_sweep).
    Sweep,
}

/// How one call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// The call succeeds. Use it in a script for a call without a fault.
    None,
    /// The call fails at once. The request never reaches the store.
    Refused,
    /// The call fails although the store executed it: the answer was lost.
    AnswerLost,
    /// The call never completes. The request never reaches the store.
    Silent,
    /// The call takes this long. Half of the time passes before the request reaches the store.
    Slow(Duration),
}

/// The faults between one client and its store, from [`MemoryStore::faults`](crate::testing::MemoryStore::faults).
///
/// Other clients of the same store are not affected: see [`MemoryStore::client`](crate::testing::MemoryStore::client).
pub struct Faults {
    lasting: watch::Sender<Lasting>,
    scripts: Mutex<HashMap<Operation, Script>>,
}

#[derive(Debug, Default)]
struct Script {
    next: VecDeque<Failure>,
    calls: u64,
}

#[derive(Debug, Clone, Copy)]
struct Lasting {
    paused: bool,
    slow: Duration,
    otherwise: Failure,
}

impl Faults {
    pub(super) fn new() -> Self {
        let lasting = Lasting { paused: false, slow: Duration::ZERO, otherwise: Failure::None };
        Self { lasting: watch::Sender::new(lasting), scripts: Mutex::default() }
    }

    /// Holds all following calls before they reach the store, until [`resume`](Self::resume). The held calls then
    /// arrive late, as delayed packets do.
    pub fn pause(&self) {
        self.lasting.send_modify(|it| it.paused = true);
    }

    /// Ends [`pause`](Self::pause): the held calls reach the store, and new calls are no longer held.
    pub fn resume(&self) {
        self.lasting.send_modify(|it| it.paused = false);
    }

    /// Makes all following calls fail with [`Fault::Unavailable`]. No request reaches the store.
    pub fn partition(&self) {
        self.lasting.send_modify(|it| it.otherwise = Failure::Refused);
    }

    /// As [`partition`](Self::partition), but only in one direction: the store executes the requests, and the answers
    /// are lost.
    pub fn partition_answers(&self) {
        self.lasting.send_modify(|it| it.otherwise = Failure::AnswerLost);
    }

    /// Makes all following calls take this long. Half of the time passes before the request reaches the store. Zero
    /// ends it.
    pub fn slow(&self, latency: Duration) {
        self.lasting.send_modify(|it| it.slow = latency);
    }

    /// Ends all faults and clears the scripts.
    pub fn heal(&self) {
        self.scripts.lock().values_mut().for_each(|it| it.next.clear());
        self.lasting.send_replace(Lasting { paused: false, slow: Duration::ZERO, otherwise: Failure::None });
    }

    /// Scripts the outcomes of the next calls of an operation, in order. Calls after them succeed again. The outcomes
    /// are appended to those of earlier scripts.
    ///
    /// ```
    /// use lockkit::{Leases, testing::{Failure, MemoryStore, Operation}};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit::Result<()> {
    /// let leases = Leases::new(MemoryStore::new());
    /// leases.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
    ///
    /// // It was granted, but nobody heard of it. What nobody heard of is released.
    /// leases.lease("k").acquire().await.unwrap_err();
    /// leases.lease("k").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn script(&self, operation: Operation, failures: impl IntoIterator<Item = Failure>) {
        self.scripts.lock().entry(operation).or_default().next.extend(failures);
    }

    /// The number of calls of an operation so far, including failed ones.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.scripts.lock().get(&operation).map_or(0, |it| it.calls)
    }

    /// Runs one call: to the store, `act`, and back.
    pub(super) async fn call<T>(
        &self,
        operation: Operation,
        key: Option<&Key>,
        act: impl FnOnce() -> T + Send,
    ) -> Result<T> {
        let scripted = {
            let mut scripts = self.scripts.lock();
            let script = scripts.entry(operation).or_default();
            script.calls += 1;
            script.next.pop_front()
        };
        let failure = scripted.unwrap_or_else(|| self.lasting.borrow().otherwise);
        let slow = if let Failure::Slow(latency) = failure { latency } else { self.lasting.borrow().slow };
        travel(slow / 2).await;
        // Cannot fail: `self` owns the sender.
        let _ = self.lasting.subscribe().wait_for(|it| !it.paused).await;
        match failure {
            Failure::None | Failure::Slow(_) => {}
            Failure::Refused => return Err(unavailable(key, "the request was lost")),
            Failure::Silent => return std::future::pending().await,
            Failure::AnswerLost => {
                act();
                travel(slow / 2).await;
                return Err(unavailable(key, "the answer was lost"));
            }
        }
        let answer = act();
        travel(slow / 2).await;
        Ok(answer)
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("lasting", &*self.lasting.borrow()).finish_non_exhaustive()
    }
}

/// Yields even without latency, because a network call always lets other tasks run.
async fn travel(latency: Duration) {
    if latency.is_zero() {
        yield_now().await;
    } else {
        sleep(latency).await;
    }
}

fn unavailable(key: Option<&Key>, what: &'static str) -> Error {
    let source = io::Error::new(io::ErrorKind::ConnectionReset, what);
    Error::database("talking to a store in memory", key, Fault::Unavailable, source)
}
