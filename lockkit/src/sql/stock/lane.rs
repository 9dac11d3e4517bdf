//! The takes of a process that arrive together. Pure: no database.
//!
//! The takes from one stock, through one pool, on one runtime, share a lane. A take that finds the lane empty goes alone. A take
//! that finds another one in flight joins the queue, which a runner takes batches from, the oldest take first. A lane exists
//! only while a take is in flight.
//!
//! The runner is a task of its own, so a dropped caller takes no other call with it. A lane does not span runtimes: one
//! may end, or not be driven, and with it the runner.
//!
//! On SQLite a batch waits for the write lock as long as the least patient of its calls. A call whose wait ends in the
//! queue leaves it, but not before 20 ms.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
    time::Instant,
};

use crate::{error::Error, key::Key, sql::stock::Taken, task::until};

/// Largest number of takes in one batch.
const MOST: usize = 256;

/// Every lane of this process.
static LANES: LazyLock<Mutex<HashMap<Place, Lane>>> = LazyLock::new(Mutex::default);

/// The stock, the pool and the runtime of a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pool: usize,
    key: Key,
    runtime: Id,
}

impl Place {
    /// `pool` is the address of a pool, which every user of the lane keeps alive.
    pub(super) fn new(pool: usize, key: Key) -> Self {
        Self { pool, key, runtime: Handle::current().id() }
    }
}

#[derive(Default)]
struct Lane {
    /// Whether a take that found the lane empty is in flight.
    has_lone: bool,
    has_runner: bool,
    queue: VecDeque<Taker>,
    last_ticket: u64,
}

/// A take in the queue. Its caller may be gone.
#[derive(Debug)]
pub(super) struct Taker {
    pub(super) amount: u64,
    pub(super) wait_ends: Option<Instant>,
    ticket: u64,
    answer: oneshot::Sender<Answer>,
}

impl Taker {
    pub(super) fn answer(self, answer: Answer) {
        // A caller that is gone needs no answer.
        _ = self.answer.send(answer);
    }
}

/// What a take in the queue is told.
#[derive(Debug)]
pub(super) enum Answer {
    Taken(Taken),
    SoldOut {
        left: u64,
    },
    /// Nothing was taken. The caller goes on alone, and hears of its own errors.
    Alone,
    Failed(Error),
}

/// How a take goes on.
pub(super) enum Entered {
    /// No other take is in flight.
    Alone(Lone),
    /// The runner will answer.
    Queued(Queued),
    /// As `Queued`; the caller starts the runner.
    First(Queued, Runner),
}

/// Enters the lane.
pub(super) fn enter(place: Place, amount: u64, wait_ends: Option<Instant>) -> Entered {
    let mut lanes = lanes();
    let lane = match lanes.entry(place.clone()) {
        Entry::Vacant(empty) => {
            empty.insert(Lane { has_lone: true, ..Lane::default() });
            return Entered::Alone(Lone(place));
        }
        Entry::Occupied(lane) => lane.into_mut(),
    };
    lane.last_ticket += 1;
    let ticket = lane.last_ticket;
    let (sender, answer) = oneshot::channel();
    lane.queue.push_back(Taker { amount, wait_ends, ticket, answer: sender });
    let queued = Queued { place: place.clone(), ticket, answer };
    if lane.has_runner {
        return Entered::Queued(queued);
    }
    lane.has_runner = true;
    Entered::First(queued, Runner(place))
}

/// The place of a take in the queue.
pub(super) struct Queued {
    place: Place,
    ticket: u64,
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
        if leave_queue(&self.place, self.ticket) { Some(Answer::Alone) } else { self.answer.await.ok() }
    }
}

/// Removes a take from the queue. `false` if it is no longer there.
fn leave_queue(place: &Place, ticket: u64) -> bool {
    let mut lanes = lanes();
    let Some(Lane { queue, .. }) = lanes.get_mut(place) else { return false };
    let waiting = queue.len();
    queue.retain(|it| it.ticket != ticket);
    queue.len() < waiting
}

/// The take that found the lane empty, until its statement is answered.
pub(super) struct Lone(Place);

impl Drop for Lone {
    fn drop(&mut self) {
        leave(&self.0, |lane| lane.has_lone = false);
    }
}

/// The task that takes batches from the queue.
pub(super) struct Runner(Place);

impl Runner {
    /// Whether a take is in the queue. If not, the runner ends; a take that arrives before it is dropped goes alone. Callers that are gone leave the queue; they have taken nothing.
    pub(super) fn has_takers(&self) -> bool {
        self.with_queue(|queue| {
            queue.retain(|it| !it.answer.is_closed());
            !queue.is_empty()
        })
    }

    /// The next batch. Its sum fits in an `i64`.
    pub(super) fn next(&self) -> Vec<Taker> {
        self.with_queue(|queue| {
            queue.retain(|it| !it.answer.is_closed());
            let fitting = sums(queue.iter().map(|it| it.amount)).count().min(MOST);
            queue.drain(..fitting).collect()
        })
    }

    /// Puts takes back at the head of the queue.
    pub(super) fn put_back(&self, takers: Vec<Taker>) {
        self.with_queue(|queue| takers.into_iter().rev().for_each(|it| queue.push_front(it)));
    }

    fn with_queue<T>(&self, work: impl FnOnce(&mut VecDeque<Taker>) -> T) -> T {
        let mut lanes = lanes();
        work(&mut lanes.get_mut(&self.0).expect("BUG: a lane exists while it has a runner").queue)
    }
}

impl Drop for Runner {
    /// Also runs when the runtime ends or the runner panics. Then takes may be in the queue.
    fn drop(&mut self) {
        let mut left = VecDeque::new();
        leave(&self.0, |lane| {
            lane.has_runner = false;
            left = std::mem::take(&mut lane.queue);
        });
        for taker in left {
            taker.answer(Answer::Alone);
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

/// Changes a lane, and removes it if nothing is in flight.
fn leave(place: &Place, change: impl FnOnce(&mut Lane)) {
    let mut lanes = lanes();
    if let Some(lane) = lanes.get_mut(place) {
        change(lane);
        if !lane.has_lone && !lane.has_runner {
            lanes.remove(place);
        }
    }
}

/// No code panics while it holds the lock.
fn lanes() -> MutexGuard<'static, HashMap<Place, Lane>> {
    LANES.lock().unwrap_or_else(PoisonError::into_inner)
}
