//! What can go wrong between a process and a [`MemoryStore`](crate::testing::MemoryStore), as a test says.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, task::yield_now, time::sleep};

use crate::{
    error::{Error, Fault, Result},
    key::Key,
};

/// The operations of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`lease_acquire`](crate::LeaseStore::lease_acquire) and
    /// [`lease_acquire_all`](crate::LeaseStore::lease_acquire_all).
    Acquire,
    /// [`lease_look`](crate::LeaseStore::lease_look).
    Look,
    /// [`lease_renew`](crate::LeaseStore::lease_renew).
    Renew,
    /// [`lease_release`](crate::LeaseStore::lease_release).
    Release,
    /// [`lease_list`](crate::LeaseStore::lease_list).
    List,
    /// [`lease_sweep`](crate::LeaseStore::lease_sweep).
    Sweep,
}

/// How one call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// It does not: a place in a script for a call that goes well.
    None,
    /// An error, at once. The store never hears of it.
    Refused,
    /// An error, although the store has done what was asked: the answer was lost on its way.
    AnswerLost,
    /// It never ends, and the store never hears of it.
    Silent,
    /// It takes so long, half of it on the way there.
    Slow(Duration),
}

/// What goes wrong between one client and its store. Got by [`MemoryStore::faults`](crate::testing::MemoryStore::faults).
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

    /// From now on calls wait on their way to the store, and arrive when [`resume`](Self::resume) is called: late, as a
    /// packet that was held up does.
    pub fn pause(&self) {
        self.lasting.send_modify(|it| it.paused = true);
    }

    /// Lets the calls go on that [`pause`](Self::pause) holds, and those that come.
    pub fn resume(&self) {
        self.lasting.send_modify(|it| it.paused = false);
    }

    /// From now on every call fails with [`Fault::Unavailable`], and the store never hears of it.
    pub fn partition(&self) {
        self.lasting.send_modify(|it| it.otherwise = Failure::Refused);
    }

    /// As [`partition`](Self::partition), in one direction: the store does what is asked, and its answers are lost.
    pub fn partition_answers(&self) {
        self.lasting.send_modify(|it| it.otherwise = Failure::AnswerLost);
    }

    /// From now on every call takes this long, half of it on the way to the store. Zero ends it.
    pub fn slow(&self, latency: Duration) {
        self.lasting.send_modify(|it| it.slow = latency);
    }

    /// Ends whatever was called above, and forgets what was scripted.
    pub fn heal(&self) {
        self.scripts().values_mut().for_each(|it| it.next.clear());
        self.lasting.send_replace(Lasting { paused: false, slow: Duration::ZERO, otherwise: Failure::None });
    }

    /// What becomes of the next calls of an operation, one after the other; those after them go well again. Added to what
    /// was scripted before.
    ///
    /// ```
    /// use lockkit::{Leases, testing::{Failure, MemoryStore, Operation}};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit::Result<()> {
    /// let leases = Leases::new(MemoryStore::new());
    /// leases.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
    ///
    /// // It was granted, but nobody heard of it. What nobody heard of is given back.
    /// leases.lease("k").acquire().await.unwrap_err();
    /// leases.lease("k").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn script(&self, operation: Operation, failures: impl IntoIterator<Item = Failure>) {
        self.scripts().entry(operation).or_default().next.extend(failures);
    }

    /// How often an operation was called so far, whatever became of it.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.scripts().get(&operation).map_or(0, |it| it.calls)
    }

    /// Runs one call: there, `act` in the store, and back.
    pub(super) async fn call<T>(
        &self,
        operation: Operation,
        key: Option<&Key>,
        act: impl FnOnce() -> T + Send,
    ) -> Result<T> {
        let scripted = {
            let mut scripts = self.scripts();
            let script = scripts.entry(operation).or_default();
            script.calls += 1;
            script.next.pop_front()
        };
        let failure = scripted.unwrap_or_else(|| self.lasting.borrow().otherwise);
        let slow = if let Failure::Slow(latency) = failure { latency } else { self.lasting.borrow().slow };
        travel(slow / 2).await;
        // The sender is a part of `self`, so this does not fail.
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

    fn scripts(&self) -> MutexGuard<'_, HashMap<Operation, Script>> {
        self.scripts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("lasting", &*self.lasting.borrow()).finish_non_exhaustive()
    }
}

/// A call over a network always lets others run, on its way there and back.
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
