//! Calls of a process that arrive together and share a statement. Pure: knows no store and no database.
//!
//! As in a group commit, nothing waits for company. Calls of one group, on one runtime, share a queue. A few calls at a
//! time go alone, because a task of one's own costs more than company saves. A further call joins the queue, from which
//! a runner takes batches, the oldest call first; while there is a runner, all calls join. A queue exists only while a
//! call is in flight.
//!
//! The runner is a task of its own, so a dropped caller takes no other call with it. A queue does not span runtimes:
//! one may end, or not be driven, and with it the runner.

use std::{collections::HashMap, fmt, future::Future, hash::Hash, sync::Arc, time::Duration};

use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
    time::Instant,
};

use crate::{
    body::task::until,
    fifo::{Fifo, Place},
    mutex::{Mutex, MutexGuard},
    value::{
        error::{BoxError, Error, Fault, Result},
        key::Key,
    },
};

/// Largest number of calls in one batch.
const MOST: usize = 256;

/// The queues of calls `C`, which are answered with `A`, by their groups.
pub(crate) struct Batches<K, C, A>(Mutex<Queues<K, C, A>>);

type Queues<K, C, A> = HashMap<(K, Id), Queue<Waiter<C, A>>>;

/// The calls that share a queue.
struct Group<K, C, A> {
    batches: Arc<Batches<K, C, A>>,
    which: (K, Id),
}

/// One queue, as a state machine: it knows no lock. It is over when nothing is in flight.
#[derive(Debug)]
struct Queue<W> {
    /// The calls in flight that go alone.
    singles: u32,
    has_runner: bool,
    waiting: Fifo<W>,
    /// When the runner began, or has last taken a batch.
    moved: Instant,
}

impl<W> Queue<W> {
    fn new() -> Self {
        Self { singles: 0, has_runner: false, waiting: Fifo::default(), moved: Instant::now() }
    }

    /// Whether a call goes alone, of which there may be `most`.
    fn goes_alone(&mut self, most: u32) -> bool {
        let goes = !self.has_runner && self.singles < most;
        self.singles += u32::from(goes);
        goes
    }

    /// A further call waits. Returns whether it needs a runner, which it starts.
    fn join(&mut self, place: Place, waiter: W) -> bool {
        self.waiting.put(place, waiter);
        let needs_runner = !std::mem::replace(&mut self.has_runner, true);
        if needs_runner {
            self.moved = Instant::now();
        }
        needs_runner
    }

    /// Whether no batch was taken for longer than a call stays.
    fn is_stuck(&self, leaves: Leaves) -> bool {
        self.has_runner && matches!(leaves, Leaves::WhenStuck(long) if self.moved.elapsed() >= long)
    }

    fn leave_at(&self, leaves: Leaves) -> Option<Instant> {
        match leaves {
            Leaves::At(deadline) => deadline,
            Leaves::WhenStuck(long) => Some(self.moved + long),
        }
    }

    fn single_ended(&mut self) {
        self.singles -= 1;
    }

    /// Returns the calls that go on alone, because nobody would answer them.
    fn runner_ended(&mut self) -> Fifo<W> {
        self.has_runner = false;
        std::mem::take(&mut self.waiting)
    }

    fn is_over(&self) -> bool {
        self.singles == 0 && !self.has_runner
    }
}

/// A call in the queue. Its caller may be gone.
#[derive(Debug)]
pub(crate) struct Waiter<C, A> {
    pub(crate) call: C,
    place: Place,
    answer: oneshot::Sender<Answer<A>>,
}

#[derive(Debug)]
enum Answer<A> {
    Given(A),
    Alone,
    Failed(Error),
}

impl<C, A> Waiter<C, A> {
    pub(crate) fn answer(self, answer: A) {
        self.send(Answer::Given(answer));
    }

    /// Nothing was done for this call. Its caller goes on alone, and gets its own errors.
    pub(crate) fn goes_alone(self) {
        self.send(Answer::Alone);
    }

    pub(crate) fn fail(self, err: Error) {
        self.send(Answer::Failed(err));
    }

    fn is_there(&self) -> bool {
        !self.answer.is_closed()
    }

    fn send(self, answer: Answer<A>) {
        // A caller that is gone needs no answer.
        _ = self.answer.send(answer);
    }
}

/// When a call that is still in the queue leaves it, and goes alone.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Leaves {
    At(Option<Instant>),
    /// When no batch was taken from the queue for so long.
    WhenStuck(Duration),
}

/// How a call goes on.
pub(crate) enum Turn<K: Hash + Eq, C, A> {
    /// A batch has answered it.
    Answered(A),
    /// It goes alone. Nothing was done for it. With a [`Single`], it is one of the few that may.
    Alone(Option<Single<K, C, A>>),
}

impl<K, C, A> Batches<K, C, A>
where
    K: Clone + Eq + Hash + Send + 'static,
    C: Send + 'static,
    A: Send + 'static,
{
    /// Makes this call, together with others if some of its group are in flight. `run` takes batches from the queue
    /// until it [has no waiters](Runner::has_waiters). `alone` calls of a group may go alone at a time.
    ///
    /// # Errors
    /// The one of the batch. The call may have been executed.
    pub(crate) async fn enter<F: Future<Output = ()> + Send + 'static>(
        self: &Arc<Self>,
        group: K,
        call: C,
        alone: u32,
        leaves: Leaves,
        (doing, key): (&'static str, &Key),
        run: impl FnOnce(Runner<K, C, A>) -> F,
    ) -> Result<Turn<K, C, A>> {
        let group = Group { batches: self.clone(), which: (group, Handle::current().id()) };
        let place = Place::next();
        let (sender, mut answer) = oneshot::channel();
        let (is_first, mut leave) = {
            let mut queues = group.queues();
            let queue = queues.entry(group.which.clone()).or_insert_with(Queue::new);
            if queue.goes_alone(alone) {
                drop(queues);
                return Ok(Turn::Alone(Some(Single(group))));
            }
            if queue.is_stuck(leaves) {
                return Ok(Turn::Alone(None));
            }
            let is_first = queue.join(place, Waiter { call, place, answer: sender });
            (is_first, queue.leave_at(leaves))
        };
        if is_first {
            tokio::spawn(run(Runner(group.clone())));
        }
        let answered = loop {
            if let Some(answered) = until(leave, &mut answer).await {
                break answered;
            }
            match group.leave(place, leaves) {
                Left::Alone => return Ok(Turn::Alone(None)),
                Left::Taken => break answer.await,
                Left::Stays { leave: later } => leave = later,
            }
        };
        match answered {
            Ok(Answer::Given(answer)) => Ok(Turn::Answered(answer)),
            Ok(Answer::Alone) => Ok(Turn::Alone(None)),
            Ok(Answer::Failed(err)) => Err(err),
            // The runner panicked, or ended with its runtime, while the batch was in flight.
            Err(_) => Err(Error::database(doing, Some(key), Fault::Unavailable, Unanswered)),
        }
    }
}

impl<K: Eq + Hash, C, A> Group<K, C, A> {
    fn queues(&self) -> MutexGuard<'_, Queues<K, C, A>> {
        self.batches.0.lock()
    }

    fn leave(&self, place: Place, leaves: Leaves) -> Left {
        let mut queues = self.queues();
        let Some(queue) = queues.get_mut(&self.which).filter(|it| it.waiting.has(place)) else { return Left::Taken };
        if matches!(leaves, Leaves::WhenStuck(_)) && !queue.is_stuck(leaves) {
            return Left::Stays { leave: queue.leave_at(leaves) };
        }
        queue.waiting.leave(place);
        Left::Alone
    }

    /// Changes the queue, and removes it when it is over.
    fn change<T>(&self, change: impl FnOnce(&mut Queue<Waiter<C, A>>) -> T) -> Option<T> {
        let mut queues = self.queues();
        let queue = queues.get_mut(&self.which)?;
        let changed = change(queue);
        if queue.is_over() {
            queues.remove(&self.which);
        }
        Some(changed)
    }
}

/// What has become of a call that wants to leave the queue.
enum Left {
    Alone,
    /// A batch has it.
    Taken,
    /// The queue moves. The call leaves it at this time, if it still waits then.
    Stays {
        leave: Option<Instant>,
    },
}

/// A call that goes alone, until its statement is answered.
pub(crate) struct Single<K: Eq + Hash, C, A>(Group<K, C, A>);

impl<K: Eq + Hash, C, A> Drop for Single<K, C, A> {
    fn drop(&mut self) {
        self.0.change(Queue::single_ended);
    }
}

/// Takes batches from a queue.
pub(crate) struct Runner<K: Eq + Hash, C, A>(Group<K, C, A>);

impl<K: Eq + Hash, C, A> Runner<K, C, A> {
    /// Whether a call is in the queue. If not, the runner ends; a call that arrives before it is dropped goes alone.
    pub(crate) fn has_waiters(&self) -> bool {
        self.with_queue(|queue| queue.waiting.iter().any(Waiter::is_there))
    }

    /// The next batch: the oldest calls, as many as are `fitting` and at most 256. Callers that are gone leave the
    /// queue; nothing was done for them.
    pub(crate) fn next(&self, fitting: impl FnOnce(&mut dyn Iterator<Item = &C>) -> usize) -> Vec<Waiter<C, A>> {
        self.with_queue(|queue| {
            queue.moved = Instant::now();
            queue.waiting.retain(Waiter::is_there);
            let fitting = fitting(&mut queue.waiting.iter().map(|it| &it.call)).min(MOST);
            (0..fitting).filter_map(|_| queue.waiting.take_first()).map(|(_, it)| it).collect()
        })
    }

    /// Puts calls back to their places.
    pub(crate) fn put_back(&self, waiters: Vec<Waiter<C, A>>) {
        self.with_queue(|queue| waiters.into_iter().for_each(|it| queue.waiting.put(it.place, it)));
    }

    fn with_queue<T>(&self, work: impl FnOnce(&mut Queue<Waiter<C, A>>) -> T) -> T {
        let mut queues = self.0.queues();
        let queue = queues.get_mut(&self.0.which).expect("BUG: a queue exists while it has a runner");
        work(queue)
    }
}

impl<K: Eq + Hash, C, A> Drop for Runner<K, C, A> {
    /// Also runs when the runtime ends or the runner panics. Then calls may be in the queue.
    fn drop(&mut self) {
        let mut left = self.0.change(Queue::runner_ended);
        while let Some((_, waiter)) = left.as_mut().and_then(Fifo::take_first) {
            waiter.goes_alone();
        }
    }
}

impl<K: Clone, C, A> Clone for Group<K, C, A> {
    fn clone(&self) -> Self {
        Self { batches: self.batches.clone(), which: self.which.clone() }
    }
}

impl<K, C, A> Default for Batches<K, C, A> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Fails all calls of a batch with one error, as if each had been made alone.
pub(crate) fn fail<C, A>(mut waiters: Vec<Waiter<C, A>>, doing: &'static str, key: impl Fn(&C) -> Key, err: Error) {
    if waiters.len() == 1 {
        return waiters.remove(0).fail(err);
    }
    let failed: Box<dyn Fn(&Key) -> Error> = match err {
        Error::PoolStarved { held, waiting, size, hint } => {
            Box::new(move |_| Error::PoolStarved { held, waiting, size, hint })
        }
        Error::Database { fault, source, .. } => {
            let source = Arc::new(source);
            Box::new(move |key| Error::database(doing, Some(key), fault, Shared(source.clone())))
        }
        err => {
            let source = Arc::new(BoxError::from(err));
            Box::new(move |key| Error::database(doing, Some(key), Fault::Other, Shared(source.clone())))
        }
    };
    for waiter in waiters {
        let err = failed(&key(&waiter.call));
        waiter.fail(err);
    }
}

/// Fails all calls of a batch of which nobody knows whether it was executed.
pub(crate) fn fail_unknown<C, A>(waiters: Vec<Waiter<C, A>>, err: Error) {
    let source = Arc::new(BoxError::from(err));
    for waiter in waiters {
        waiter.fail(Error::OutcomeUnknown { source: Shared(source.clone()).into() });
    }
}

/// Why a call that a batch has taken was not answered.
#[derive(Debug, thiserror::Error)]
#[error("the task that sent a statement for several calls ended: its runtime has shut down, or it panicked")]
struct Unanswered;

/// The error of a batch, as one of its callers gets it.
#[derive(Debug)]
struct Shared(Arc<BoxError>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a statement for several calls failed")
    }
}

impl std::error::Error for Shared {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&**self.0)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::value::error::chain;

    #[test]
    fn a_queue_has_one_runner_at_a_time_and_ends_with_all_that_is_in_flight() {
        let mut queue = Queue::new();
        assert!(queue.goes_alone(1) && !queue.goes_alone(1), "one at a time");
        let [first, second, third] = [0; 3].map(|_| Place::next());
        assert!(queue.join(first, "first"), "it needs a runner");
        assert!(!queue.join(second, "second"), "it has one");
        queue.single_ended();
        assert!(!queue.is_over(), "the runner is in flight");
        let mut left = queue.runner_ended();
        let left: Vec<_> = std::iter::from_fn(|| left.take_first()).collect();
        assert_eq!(left, [(first, "first"), (second, "second")]);
        assert!(queue.is_over() && queue.waiting.first().is_none());

        let mut queue = Queue::new();
        assert!(queue.goes_alone(2) && queue.goes_alone(2) && !queue.goes_alone(2), "two at a time");
        queue.single_ended();
        assert!(queue.join(first, "first"));
        assert_eq!(queue.runner_ended().take_first(), Some((first, "first")));
        assert!(!queue.is_over(), "the call that goes alone is in flight");
        assert!(queue.join(third, "third"), "the last runner has ended");
        queue.single_ended();
        assert!(!queue.goes_alone(2), "a runner is there");
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn batches() -> Arc<Batches<(), u32, u32>> {
        Arc::default()
    }

    /// Makes a call that stays in the queue. `alone` calls go alone at a time.
    async fn enter<F: Future<Output = ()> + Send + 'static>(
        batches: &Arc<Batches<(), u32, u32>>,
        (call, alone): (u32, u32),
        run: impl FnOnce(Runner<(), u32, u32>) -> F,
    ) -> Result<Turn<(), u32, u32>> {
        let stays = Leaves::At(None);
        batches.enter((), call, alone, stays, ("testing", &Key::from("k")), run).await
    }

    /// Answers each call with itself, after a second for others to arrive.
    async fn echo(runner: Runner<(), u32, u32>) {
        sleep(SECOND).await;
        while runner.has_waiters() {
            for waiter in runner.next(|calls| calls.count()) {
                let call = waiter.call;
                waiter.answer(call);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_goes_alone_again_when_an_earlier_one_is_done() {
        let batches = batches();
        for _ in 0..3 {
            let turn = enter(&batches, (1, 1), echo).await.unwrap();
            assert!(matches!(turn, Turn::Alone(Some(_))));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_a_runner_leaves_go_alone() {
        let run = |runner| async move { drop::<Runner<_, _, _>>(runner) };
        let turn = timeout(SECOND, enter(&batches(), (1, 0), run)).await.expect("it does not wait").unwrap();
        assert!(matches!(turn, Turn::Alone(None)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_whose_caller_is_gone_is_in_no_batch() {
        let (batches, taken) = (batches(), Arc::new(Mutex::new(Vec::new())));
        let noted = taken.clone();
        let run = |runner: Runner<(), u32, u32>| async move {
            sleep(SECOND).await;
            while runner.has_waiters() {
                let waiters = runner.next(|calls| calls.count());
                noted.lock().extend(waiters.iter().map(|it| it.call));
                for waiter in waiters {
                    waiter.answer(0);
                }
            }
        };
        let gone = async { timeout(SECOND / 2, enter(&batches, (2, 0), echo)).await.map(drop) };
        let (first, gone, third) = tokio::join!(enter(&batches, (1, 0), run), gone, enter(&batches, (3, 0), echo));
        assert!(first.is_ok() && gone.is_err() && third.is_ok());
        assert_eq!(*taken.lock(), [1, 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_were_put_back_are_taken_again_in_their_order() {
        let (batches, taken) = (batches(), Arc::new(Mutex::new(Vec::new())));
        let noted = taken.clone();
        let run = |runner: Runner<(), u32, u32>| async move {
            sleep(SECOND).await;
            let two = runner.next(|_| 2);
            runner.put_back(two);
            let all = runner.next(|calls| calls.count());
            noted.lock().extend(all.iter().map(|it| it.call));
            for waiter in all {
                waiter.answer(0);
            }
        };
        let calls = (enter(&batches, (1, 0), run), enter(&batches, (2, 0), echo), enter(&batches, (3, 0), echo));
        let (first, second, third) = tokio::join!(calls.0, calls.1, calls.2);
        assert!([first, second, third].into_iter().all(|it| matches!(it, Ok(Turn::Answered(0)))));
        assert_eq!(*taken.lock(), [1, 2, 3]);
    }

    type Receiver = oneshot::Receiver<Answer<u32>>;

    /// The calls of a batch, and where their answers arrive.
    fn taken(calls: u32) -> (Vec<Waiter<u32, u32>>, Vec<Receiver>) {
        let call = |call| {
            let (answer, receiver) = oneshot::channel();
            (Waiter { call, place: Place::next(), answer }, receiver)
        };
        (0..calls).map(call).unzip()
    }

    fn error(mut receiver: Receiver) -> Error {
        match receiver.try_recv() {
            Ok(Answer::Failed(err)) => err,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_call_of_a_batch_that_failed_gets_the_error_with_its_own_key_and_its_cause() {
        let key = |call: &u32| Key::from(format!("k{call}"));
        let failed = || Error::database("testing", Some(&key(&0)), Fault::Deadlock, "a victim");
        let cause = |err: &Error| chain(err).last().map(ToString::to_string);
        for calls in [1, 2] {
            let (waiters, receivers) = taken(calls);
            fail(waiters, "testing", key, failed());
            for (call, err) in (0..).zip(receivers.into_iter().map(error)) {
                assert!(matches!(err, Error::Database { fault: Fault::Deadlock, .. }), "{err:?}");
                assert_eq!((err.key(), cause(&err)), (Some(&key(&call)), Some("a victim".to_owned())));
            }
            let (waiters, receivers) = taken(calls);
            fail_unknown(waiters, failed());
            for err in receivers.into_iter().map(error) {
                assert!(matches!(err, Error::OutcomeUnknown { .. }), "{err:?}");
                assert_eq!(cause(&err).as_deref(), Some("a victim"));
            }
        }
    }
}
