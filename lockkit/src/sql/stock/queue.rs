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

use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
    time::Instant,
};

use crate::{
    body::task::until,
    fifo::{Fifo, Place},
    mutex::{Mutex, MutexGuard},
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

/// One queue, as a state machine: it knows no database and no lock. It is over when nothing is in flight.
#[derive(Debug)]
struct Queue<W = Waiter> {
    /// Whether a take that goes alone is in flight.
    has_single: bool,
    has_runner: bool,
    waiting: Fifo<W>,
}

impl<W> Queue<W> {
    /// The first take goes alone.
    fn begin() -> Self {
        Self { has_single: true, has_runner: false, waiting: Fifo::default() }
    }

    /// A further take waits. Returns whether it needs a runner, which it starts.
    fn join(&mut self, place: Place, waiter: W) -> bool {
        self.waiting.put(place, waiter);
        !std::mem::replace(&mut self.has_runner, true)
    }

    fn single_ended(&mut self) {
        self.has_single = false;
    }

    /// Returns the takes that go on alone, because nobody would answer them.
    fn runner_ended(&mut self) -> Fifo<W> {
        self.has_runner = false;
        std::mem::take(&mut self.waiting)
    }

    fn is_over(&self) -> bool {
        !self.has_single && !self.has_runner
    }
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
            empty.insert(Queue::begin());
            drop(queues);
            return Entered::Alone(Single(group));
        }
        Entry::Occupied(queue) => queue.into_mut(),
    };
    let place = Place::next();
    let (sender, answer) = oneshot::channel();
    let is_first = queue.join(place, Waiter { amount, wait_ends, place, answer: sender });
    drop(queues);
    let waiting = Queued { group: group.clone(), place, answer };
    if is_first { Entered::First(waiting, Runner(group)) } else { Entered::Queued(waiting) }
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
        change(&self.0, Queue::single_ended);
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
        let mut left = change(&self.0, Queue::runner_ended);
        while let Some((_, waiter)) = left.as_mut().and_then(Fifo::take_first) {
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

/// Changes a queue, and removes it when it is over.
fn change<T>(group: &Group, change: impl FnOnce(&mut Queue) -> T) -> Option<T> {
    let mut queues = group.queues();
    let queue = queues.get_mut(&group.which)?;
    let changed = change(queue);
    if queue.is_over() {
        queues.remove(&group.which);
    }
    Some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_one_runner_at_a_time_and_ends_with_all_that_is_in_flight() {
        let mut queue = Queue::begin();
        let [first, second, third] = [0; 3].map(|_| Place::next());
        assert!(queue.join(first, "first"), "it needs a runner");
        assert!(!queue.join(second, "second"), "it has one");
        queue.single_ended();
        assert!(!queue.is_over(), "the runner is in flight");
        let mut left = queue.runner_ended();
        let left: Vec<_> = std::iter::from_fn(|| left.take_first()).collect();
        assert_eq!(left, [(first, "first"), (second, "second")]);
        assert!(queue.is_over() && queue.waiting.first().is_none());

        let mut queue = Queue::begin();
        assert!(queue.join(first, "first"));
        assert_eq!(queue.runner_ended().take_first(), Some((first, "first")));
        assert!(!queue.is_over(), "the take that goes alone is in flight");
        assert!(queue.join(third, "third"), "the last runner has ended");
    }
}
