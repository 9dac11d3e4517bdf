//! The takes of a process that arrive together. Pure: no database.
//!
//! The takes from one stock, through one pool, on one runtime, share a queue. A take that finds no other in flight goes
//! alone. A take that finds another one in flight joins the queue, from which a runner takes batches, the oldest take
//! first. A queue exists only while a take is in flight.
//!
//! The runner is a task of its own, so a dropped caller takes no other call with it. A queue does not span runtimes:
//! one may end, or not be driven, and with it the runner.
//!
//! On SQLite a batch waits for the write lock as long as the least patient of its calls. A call whose wait ends in the
//! queue leaves it, but not before 20 ms.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use parking_lot::{Mutex, MutexGuard};
use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
    time::Instant,
};

use crate::{
    body::task::until,
    fifo::{Fifo, Place},
    sql::stock::Taken,
    value::{error::Error, key::Key},
};

/// Largest number of takes in one batch.
const MOST: usize = 256;

/// The queues of a pool.
#[derive(Default)]
pub(super) struct Queues(Mutex<HashMap<(Key, Id), Queue>>);

/// The takes that share a queue.
#[derive(Clone)]
pub(super) struct Group {
    queues: Arc<Queues>,
    /// The key of the stock, and the runtime.
    which: (Key, Id),
}

impl Group {
    pub(super) fn new(queues: Arc<Queues>, key: Key) -> Self {
        Self { queues, which: (key, Handle::current().id()) }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<(Key, Id), Queue>> {
        self.queues.0.lock()
    }
}

#[derive(Default)]
struct Queue {
    /// Whether a take that goes alone is in flight.
    has_single: bool,
    has_runner: bool,
    waiting: Fifo<Waiter>,
}

/// A take in the queue. Its caller may be gone.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) amount: u64,
    pub(super) wait_ends: Option<Instant>,
    place: Place,
    answer: oneshot::Sender<Answer>,
}

impl Waiter {
    pub(super) fn answer(self, answer: Answer) {
        // A caller that is gone needs no answer.
        _ = self.answer.send(answer);
    }
}

/// The answer to a take in the queue.
#[derive(Debug)]
pub(super) enum Answer {
    Taken(Taken),
    SoldOut {
        left: u64,
    },
    /// Nothing was taken. The caller goes on alone, and gets its own errors.
    Alone,
    Failed(Error),
}

/// How a take goes on.
pub(super) enum Entered {
    /// No other take is in flight.
    Alone(Single),
    /// The runner will answer.
    Queued(Queued),
    /// As `Queued`; the caller starts the runner.
    First(Queued, Runner),
}

/// Enters the queue.
pub(super) fn enter(group: Group, amount: u64, wait_ends: Option<Instant>) -> Entered {
    let mut queues = group.queues();
    let queue = match queues.entry(group.which.clone()) {
        Entry::Vacant(empty) => {
            empty.insert(Queue { has_single: true, ..Queue::default() });
            drop(queues);
            return Entered::Alone(Single(group));
        }
        Entry::Occupied(queue) => queue.into_mut(),
    };
    let place = Place::behind_all();
    let (sender, answer) = oneshot::channel();
    queue.waiting.put(place, Waiter { amount, wait_ends, place, answer: sender });
    let waiting = Queued { group: group.clone(), place, answer };
    if queue.has_runner {
        return Entered::Queued(waiting);
    }
    queue.has_runner = true;
    drop(queues);
    Entered::First(waiting, Runner(group))
}

/// A take in the queue.
pub(super) struct Queued {
    group: Group,
    place: Place,
    answer: oneshot::Receiver<Answer>,
}

impl Queued {
    /// Waits for the answer. `None` when the runner ended with its runtime while the batch was in flight.
    ///
    /// A take that is still in the queue at `leave` leaves it and goes on alone.
    pub(super) async fn answer(mut self, leave: Option<Instant>) -> Option<Answer> {
        if let Some(answer) = until(leave, &mut self.answer).await {
            return answer.ok();
        }
        let was_in_queue =
            self.group.queues().get_mut(&self.group.which).and_then(|it| it.waiting.leave(self.place)).is_some();
        if was_in_queue { Some(Answer::Alone) } else { self.answer.await.ok() }
    }
}

/// A take that goes alone, until its statement is answered.
pub(super) struct Single(Group);

impl Drop for Single {
    fn drop(&mut self) {
        change(&self.0, |queue| queue.has_single = false);
    }
}

/// The task that takes batches from the queue.
pub(super) struct Runner(Group);

impl Runner {
    /// Whether a take is in the queue. If not, the runner ends; a take that arrives before it is dropped goes alone.
    /// Callers that are gone leave the queue; they have taken nothing.
    pub(super) fn has_waiters(&self) -> bool {
        self.with_waiting(|waiting| waiting.first().is_some())
    }

    /// The next batch. Its sum fits in an `i64`.
    pub(super) fn next(&self) -> Vec<Waiter> {
        self.with_waiting(|waiting| {
            let fitting = sums(waiting.iter().map(|it| it.amount)).count().min(MOST);
            (0..fitting).filter_map(|_| waiting.take_first()).map(|(_, it)| it).collect()
        })
    }

    /// Puts takes back to their places.
    pub(super) fn put_back(&self, waiters: Vec<Waiter>) {
        self.with_waiting(|waiting| waiters.into_iter().for_each(|it| waiting.put(it.place, it)));
    }

    fn with_waiting<T>(&self, work: impl FnOnce(&mut Fifo<Waiter>) -> T) -> T {
        let mut queues = self.0.queues();
        let queue = queues.get_mut(&self.0.which).expect("BUG: a queue exists while it has a runner");
        queue.waiting.retain(|it| !it.answer.is_closed());
        work(&mut queue.waiting)
    }
}

impl Drop for Runner {
    /// Also runs when the runtime ends or the runner panics. Then takes may be in the queue.
    fn drop(&mut self) {
        let mut left = Fifo::default();
        change(&self.0, |queue| {
            queue.has_runner = false;
            left = std::mem::take(&mut queue.waiting);
        });
        while let Some((_, waiter)) = left.take_first() {
            waiter.answer(Answer::Alone);
        }
    }
}

/// The ascending sums of the amounts, as far as they fit in an `i64`.
pub(super) fn sums(amounts: impl Iterator<Item = u64>) -> impl Iterator<Item = i64> {
    amounts.scan(0_i64, |sum, amount| {
        *sum = sum.checked_add_unsigned(amount)?;
        Some(*sum)
    })
}

/// Changes a queue, and removes it if nothing is in flight.
fn change(group: &Group, change: impl FnOnce(&mut Queue)) {
    let mut queues = group.queues();
    if let Some(queue) = queues.get_mut(&group.which) {
        change(queue);
        if !queue.has_single && !queue.has_runner {
            queues.remove(&group.which);
        }
    }
}
