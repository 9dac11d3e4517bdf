//! Turns: tasks of this process whose writes of one row conflicted write it one after the other. Knows no database.
//!
//! A turn only saves attempts; exclusion comes from the versions. A task that does not get its turn in time continues
//! without it: it passes on after 250 ms while others wait. An attempt that runs in another one, which may have a turn
//! or locks, takes none, so nested retries cannot deadlock.
//!
//! The row is a hash of the kind of database, table, key columns and key. Two rows with one hash share their turns, and
//! one key that is bound with two Rust types counts as two rows: both only cost time.
//!
//! A derived `load` on a pool joins before it borrows a connection. In a transaction a new writer has a connection and
//! perhaps locks, which the task with the turn may need: so its read fails, the transaction is rolled back, and the
//! attempt starts again with the turn, at most once in a retry. Otherwise new writers would overtake.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::{
    fifo::{Fifo, Place},
    mutex::Mutex,
    value::version::Row,
};

/// How long a turn lasts while others wait for theirs. Afterwards it passes on, so a body that hangs delays others
/// once.
const LASTS: Duration = Duration::from_millis(250);

/// The longest wait for a turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// The queues of the rows that are somebody's turn. A row without a holder has no queue.
static QUEUES: LazyLock<Mutex<HashMap<Row, Queue>>> = LazyLock::new(Mutex::default);

/// The number of queues, to see without the mutex that there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The turns of one row, as a state machine: it knows no clock and no lock. `C` is whom to call when a turn comes.
#[derive(Debug)]
struct Queue<C = Arc<Notify>> {
    holder: Place,
    since: Instant,
    waiting: Fifo<C>,
}

/// A place in the queue of a row, as its holder or behind it. Dropping it leaves the queue and calls the next.
#[derive(Debug)]
pub(crate) struct Turn {
    row: Row,
    place: Place,
    called: Arc<Notify>,
}

impl<C> Queue<C> {
    /// Its holder's turn begins.
    fn begin(now: Instant) -> Self {
        Self { holder: Place::next(), since: now, waiting: Fifo::default() }
    }

    fn lapses(&self) -> Instant {
        self.since + LASTS
    }

    /// Passes a turn that has lasted long enough to the first who waits. Returns whom to call.
    fn pass_on_if_lapsed(&mut self, now: Instant) -> Option<C> {
        if self.lapses() <= now { self.pass_on(now) } else { None }
    }

    /// Returns whom to call. When the holder leaves and nobody waits, the queue is over.
    fn leave(&mut self, place: Place, now: Instant) -> Leaver<C> {
        if self.holder != place {
            self.waiting.leave(place);
            return Leaver::NoTurn;
        }
        self.pass_on(now).map_or(Leaver::LastTurn, Leaver::Turn)
    }

    fn pass_on(&mut self, now: Instant) -> Option<C> {
        let (place, called) = self.waiting.take_first()?;
        (self.holder, self.since) = (place, now);
        Some(called)
    }
}

/// What a caller who leaves had.
#[derive(Debug, PartialEq, Eq)]
enum Leaver<C> {
    /// No turn: it was waiting, or its turn had passed on.
    NoTurn,
    /// The turn, which passes to this caller.
    Turn(C),
    /// The turn, and nobody waits: the queue is over.
    LastTurn,
}

impl Turn {
    /// The row, if tasks take turns to write it. `row` is only computed if any row has turns.
    pub(crate) fn contested(row: impl FnOnce() -> Option<Row>) -> Option<Row> {
        if COUNT.load(Ordering::Relaxed) == 0 {
            return None;
        }
        row().filter(|it| QUEUES.lock().contains_key(it))
    }

    /// Waits for the turn to write this row, in the order of the calls. `None` if the turn did not come until the
    /// deadline, or within 10 s, or if it has passed on before this future was polled.
    pub(crate) async fn wait(row: Row, deadline: Option<Instant>) -> Option<Self> {
        let patience = Instant::now() + PATIENCE;
        let until = deadline.map_or(patience, |it| it.min(patience));
        // Leaves the queue when this future is dropped.
        let turn = Self::join(row);
        while let Some(lapses) = turn.pass_on_lapsed() {
            let called = timeout_at(lapses.min(until), turn.called.notified()).await;
            if called.is_err() && until <= Instant::now() {
                break;
            }
        }
        turn.is_current().then_some(turn)
    }

    pub(crate) fn row(&self) -> Row {
        self.row
    }

    /// Whether the turn has come, and has not passed on.
    pub(crate) fn is_current(&self) -> bool {
        QUEUES.lock().get(&self.row).is_some_and(|it| it.holder == self.place)
    }

    fn join(row: Row) -> Self {
        let called = Arc::default();
        let mut queues = QUEUES.lock();
        let place = if let Some(queue) = queues.get_mut(&row) {
            queue.waiting.join(Arc::clone(&called))
        } else {
            let queue = Queue::begin(Instant::now());
            let holder = queue.holder;
            queues.insert(row, queue);
            COUNT.store(queues.len(), Ordering::Relaxed);
            holder
        };
        Self { row, place, called }
    }

    /// Passes on a turn that has lapsed. Returns when the current one lapses, or `None` if this caller waits no longer.
    fn pass_on_lapsed(&self) -> Option<Instant> {
        let mut queues = QUEUES.lock();
        let queue = queues.get_mut(&self.row)?;
        let lapses = |queue: &Queue| queue.waiting.has(self.place).then(|| queue.lapses());
        lapses(queue)?;
        if let Some(called) = queue.pass_on_if_lapsed(Instant::now()) {
            called.notify_one();
        }
        lapses(queue)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut queues = QUEUES.lock();
        let Some(queue) = queues.get_mut(&self.row) else { return };
        match queue.leave(self.place, Instant::now()) {
            Leaver::NoTurn => {}
            Leaver::Turn(called) => called.notify_one(),
            Leaver::LastTurn => {
                queues.remove(&self.row);
                COUNT.store(queues.len(), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::Future, pin::pin, task::Poll};

    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The tests share the queues of the process.
    fn row() -> Row {
        Row(fastrand::u64(..))
    }

    fn is_taken(row: Row) -> bool {
        Turn::contested(|| Some(row)).is_some()
    }

    /// Polls once, so that the caller has its place in the queue.
    async fn queued<F: Future<Output: std::fmt::Debug>>(mut waiting: std::pin::Pin<&mut F>) {
        std::future::poll_fn(|context| {
            assert!(waiting.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
    }

    #[test]
    fn each_event_passes_the_turn_on_only_if_it_is_over_and_somebody_waits() {
        let start = Instant::now();
        let lapsed = start + LASTS;
        for waiting in [0, 1, 2] {
            let queue = || {
                let mut queue = Queue::begin(start);
                let places: Vec<_> = (0..waiting).map(|number| queue.waiting.join(number)).collect();
                (queue.holder, queue, places)
            };
            let first = (waiting > 0).then_some(0);
            let (_, mut early, _) = queue();
            assert_eq!((early.pass_on_if_lapsed(lapsed - Duration::from_nanos(1)), early.lapses()), (None, lapsed));
            let (holder, mut late, _) = queue();
            assert_eq!(late.pass_on_if_lapsed(lapsed), first);
            assert_eq!(late.lapses() == lapsed + LASTS, waiting > 0, "the next turn lasts as long");
            let gone = late.leave(holder, lapsed);
            assert_eq!(gone == Leaver::NoTurn, waiting > 0, "a turn that has passed on is not passed on again");
            let (holder, mut left, _) = queue();
            assert_eq!(left.leave(holder, start), first.map_or(Leaver::LastTurn, Leaver::Turn));
            for leaves in 0..waiting {
                let (holder, mut queue, places) = queue();
                assert_eq!(queue.leave(places[leaves], lapsed), Leaver::NoTurn);
                let next = (0..waiting).find(|it| *it != leaves);
                assert_eq!(queue.leave(holder, start), next.map_or(Leaver::LastTurn, Leaver::Turn));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turns_come_in_the_order_of_the_requests() {
        let row = row();
        let first = Turn::wait(row, None).await.unwrap();
        let (mut second, mut third) = (pin!(Turn::wait(row, None)), pin!(Turn::wait(row, None)));
        queued(second.as_mut()).await;
        queued(third.as_mut()).await;
        assert!(first.is_current() && is_taken(row));
        drop(first);
        queued(third.as_mut()).await;
        let second = second.await.unwrap();
        queued(third.as_mut()).await;
        drop(second);
        drop(third.await.unwrap());
        assert!(!is_taken(row));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_takes_too_long_passes_on() {
        let (row, started) = (row(), Instant::now());
        let hangs = Turn::wait(row, None).await.unwrap();
        sleep(60 * SECOND).await;
        assert!(hangs.is_current(), "nobody waits");
        let next = Turn::wait(row, None).await.unwrap();
        assert!(!hangs.is_current() && next.is_current());
        assert_eq!(started.elapsed(), 60 * SECOND);
        let last = Turn::wait(row, None).await.unwrap();
        assert!(started.elapsed() <= 60 * SECOND + LASTS + Duration::from_millis(1));
        drop(hangs);
        drop(next);
        assert!(last.is_current());
        drop(last);
        assert!(!is_taken(row));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_passed_on_is_none_in_a_later_queue_of_its_row() {
        let row = row();
        let hangs = Turn::wait(row, None).await.unwrap();
        sleep(LASTS).await;
        drop(Turn::wait(row, None).await.unwrap());
        assert!(!is_taken(row));
        let later = Turn::wait(row, None).await.unwrap();
        assert!(!hangs.is_current());
        drop(hangs);
        assert!(later.is_current());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_turn_ends_at_the_deadline_and_after_ten_seconds() {
        let (row, started) = (row(), Instant::now());
        let holder = Turn::wait(row, None).await.unwrap();
        let deadline = started + LASTS / 2;
        assert!(Turn::wait(row, Some(deadline)).await.is_none());
        assert_eq!(Instant::now(), deadline);
        drop(holder);
        // Turns that all last as long as they may: the last of this many waits longer than 10 s without the bound.
        let mut waits = tokio::task::JoinSet::new();
        for _ in 0..80 {
            waits.spawn(async move {
                let turn = Turn::wait(row, None).await;
                sleep(60 * SECOND).await;
                turn.is_some()
            });
        }
        let got = waits.join_all().await;
        assert!(got.iter().any(|it| !it) && got.iter().any(|it| *it));
        assert!(started.elapsed() <= 71 * SECOND);
        assert!(!is_taken(row));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_leaves_while_waiting_or_just_called_blocks_no_other() {
        let row = row();
        let first = Turn::wait(row, None).await.unwrap();
        let mut called = Box::pin(Turn::wait(row, None));
        let mut gone = Box::pin(Turn::wait(row, None));
        let mut last = pin!(Turn::wait(row, None));
        queued(called.as_mut()).await;
        queued(gone.as_mut()).await;
        queued(last.as_mut()).await;
        drop(gone);
        drop(first);
        drop(called);
        let now = Instant::now();
        drop(last.await.unwrap());
        assert_eq!(Instant::now(), now);
        assert!(!is_taken(row));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_is_polled_too_late_continues_without_a_turn() {
        let row = row();
        let first = Turn::wait(row, None).await.unwrap();
        let mut late = pin!(Turn::wait(row, None));
        queued(late.as_mut()).await;
        drop(first);
        sleep(2 * LASTS).await;
        let other = Turn::wait(row, None).await.unwrap();
        let now = Instant::now();
        assert!(late.await.is_none());
        assert_eq!(Instant::now(), now);
        assert!(other.is_current());
        drop(other);
        assert!(!is_taken(row));
    }

    #[test]
    fn turns_pass_from_one_runtime_to_another() {
        let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (one, other, row) = (runtime(), runtime(), row());
        let first = one.block_on(Turn::wait(row, None)).unwrap();
        let next = other.spawn(Turn::wait(row, None));
        drop(first);
        drop(one);
        drop(other.block_on(next).unwrap().unwrap());
        assert!(!is_taken(row));
    }
}
