//! The wait loop. The callers of one process queue per key, and only the head of a queue asks the store.

use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::Poll,
    time::Duration,
};

use tokio::{
    sync::{Mutex as FairMutex, Notify},
    time::{Instant, sleep, timeout_at},
};

use crate::{
    error::Result,
    key::Key,
    policy::{Backoff, half_jitter},
};

/// Pauses between two attempts. The first are short because many locks are held briefly.
const PAUSES: Backoff = Backoff { base: Duration::from_millis(4), cap: Duration::from_millis(250) };

/// How long a process remembers that it released a lease.
const LATELY: Duration = Duration::from_secs(1);

/// How often a process that reacquires the same lease in a loop checks for queued requests.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Time limit of the first attempt when the caller's own wait is shorter.
pub(crate) const FIRST_ANSWER: Duration = Duration::from_millis(500);

/// The result of one attempt.
pub(crate) enum Turn<T> {
    /// The lease is taken.
    Done(T),
    /// Another holder has the lease. It becomes free after `free_in`, unless it is renewed or released earlier. `None`:
    /// the expiry is unknown, for example because another transaction has the row locked.
    Held { free_in: Option<Duration> },
    /// Older tickets exist, or this request is the next one. Retry after `ahead` releases in this process, or after
    /// `pause`.
    Queued { ahead: u32, pause: Duration },
    /// The store did not answer within the time limit.
    Silent,
}

/// The result of a wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited<T> {
    /// The lease is taken.
    Done(T),
    /// Another holder had the lease when the deadline passed.
    Held,
    /// The deadline passed before the store answered.
    NoAnswer,
    /// The deadline passed before this caller reached the head of the queue: other callers of this process were before
    /// it.
    NoTurn,
}

/// Completes when a store reports that a lease was released.
pub(crate) type Freed<'k> = Pin<Box<dyn Future<Output = ()> + Send + 'k>>;

/// The queues of one process: one for each key with at least one waiter.
///
/// Only the head of a queue asks the store. The others wait in order, without a connection. A release in the same
/// process wakes the head at once.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    lines: Mutex<HashMap<Key, Weak<Line>>>,
    lately: Mutex<HashMap<Key, Lately>>,
}

/// A lease that this process released within [`LATELY`].
#[derive(Debug)]
struct Lately {
    given_back: Instant,
    /// The last time that a check found tickets.
    queued: Option<Instant>,
    /// The last time that a check found no tickets.
    nobody_queued: Option<Instant>,
}

#[derive(Debug, Default)]
struct Line {
    /// Tokio's mutex is fair: it grants in the order of arrival.
    first: FairMutex<()>,
    freed: Notify,
}

impl Lines {
    /// Asks the store until the lease is granted or `deadline` has passed. The first attempt may take up to
    /// [`FIRST_ANSWER`] even if `deadline` is earlier, so a short wait still gets an answer.
    ///
    /// `ask(true)` tries to take the lease. `ask(false)` may read first, because the lease was held a moment ago. A
    /// release of any of `keys` in this process ends a pause. After the first attempt without a grant, `freed_in_store`
    /// also ends a pause.
    pub(crate) async fn wait<'k, T, Fut>(
        &self,
        key: &Key,
        keys: &'k [Key],
        deadline: Instant,
        freed_in_store: impl Fn(&'k Key) -> Freed<'k>,
        mut ask: impl FnMut(bool) -> Fut,
    ) -> Result<Waited<T>>
    where
        Fut: Future<Output = Result<Turn<T>>>,
    {
        let line = self.line(key);
        let others: Vec<_> = keys.iter().filter(|it| *it != key).map(|it| self.line(it)).collect();
        let mut told: Vec<Freed<'k>> = Vec::new();
        let Ok(_first) = timeout_at(deadline, line.first.lock()).await else {
            return Ok(Waited::NoTurn);
        };
        let (mut pauses, mut locked_pauses) = (PAUSES.ceilings(), PAUSES.ceilings());
        let mut likely_free = true;
        let mut without = Waited::NoAnswer;
        let mut limit = deadline.max(Instant::now() + FIRST_ANSWER);
        loop {
            // Created before the attempt, so that a release during the attempt is not missed.
            let mut freed: Vec<_> = others.iter().chain([&line]).map(|it| Box::pin(it.freed.notified())).collect();
            let freed = poll_fn(|context| {
                let is_freed = freed.iter_mut().any(|it| it.as_mut().poll(context).is_ready());
                if is_freed { Poll::Ready(()) } else { Poll::Pending }
            });
            let Ok(turn) = timeout_at(limit, ask(likely_free)).await else {
                return Ok(without);
            };
            limit = deadline;
            let turn = turn?;
            if !matches!(turn, Turn::Silent) {
                without = Waited::Held;
            }
            let (ahead, pause) = match turn {
                Turn::Done(taken) => return Ok(Waited::Done(taken)),
                Turn::Held { free_in: Some(free_in) } => {
                    locked_pauses = PAUSES.ceilings();
                    let pause = half_jitter(pauses.next().unwrap_or(PAUSES.cap));
                    // Never sleep past the expiry of the holder's lease.
                    (0, pause.min(free_in + Duration::from_millis(1)))
                }
                // A row lock does not tell how long the lease is held, so these pauses grow on their own.
                Turn::Held { free_in: None } => (0, half_jitter(locked_pauses.next().unwrap_or(PAUSES.cap))),
                Turn::Queued { ahead, pause } => (ahead, pause.min(PAUSES.cap)),
                // The attempt itself took its full time limit, so the pause is short.
                Turn::Silent => (0, PAUSES.base),
            };
            if Instant::now() >= deadline {
                return Ok(without);
            }
            if told.is_empty() {
                told = keys.iter().map(&freed_in_store).collect();
            }
            let freed = async {
                tokio::select! {
                    () = freed => {}
                    () = first_of(keys, &mut told, &freed_in_store) => {}
                }
                for _ in 1..ahead {
                    tokio::select! {
                        () = line.freed.notified() => {}
                        () = first_of(keys, &mut told, &freed_in_store) => {}
                    }
                }
            };
            likely_free = tokio::select! {
                () = freed => true,
                () = sleep(pause.min(deadline.saturating_duration_since(Instant::now()))) => false,
            };
        }
    }

    /// This process released the lease. Wakes waiters as [`freed`](Self::freed) does, and remembers the release for
    /// [`LATELY`].
    pub(crate) fn given_back(&self, key: &Key) {
        let now = Instant::now();
        {
            let mut lately = lock(&self.lately);
            match lately.get_mut(key) {
                Some(it) if it.given_back + LATELY > now => it.given_back = now,
                _ => {
                    if lately.len() == lately.capacity() {
                        lately.retain(|_, it| it.given_back + LATELY > now);
                    }
                    lately.insert(key.clone(), Lately { given_back: now, queued: None, nobody_queued: None });
                }
            }
        }
        self.freed(key);
    }

    /// Whether this process must check for tickets before it takes a lease again that it released a moment ago. A
    /// process that reacquires in a loop checks every [`LOOK_EVERY`], or every time if tickets were found within
    /// [`LATELY`].
    pub(crate) fn looks_at_queue(&self, key: &Key) -> bool {
        let now = Instant::now();
        lock(&self.lately).get(key).is_some_and(|it| {
            let is_contended = it.queued.is_some_and(|then| then + LATELY > now);
            it.given_back + LATELY > now
                && (is_contended || it.nobody_queued.is_none_or(|then| then + LOOK_EVERY <= now))
        })
    }

    /// Records the result of a check for tickets.
    pub(crate) fn looked_at_queue(&self, key: &Key, somebody_queues: bool) {
        if let Some(it) = lock(&self.lately).get_mut(key) {
            let seen = if somebody_queues { &mut it.queued } else { &mut it.nobody_queued };
            *seen = Some(Instant::now());
        }
    }

    /// Wakes the head of the key's queue, and the requests for several keys that include this key.
    pub(crate) fn freed(&self, key: &Key) {
        let line = self.lines().get(key).and_then(Weak::upgrade);
        if let Some(line) = line {
            line.freed.notify_waiters();
        }
    }

    fn line(&self, key: &Key) -> Arc<Line> {
        let mut lines = self.lines();
        if let Some(line) = lines.get(key).and_then(Weak::upgrade) {
            return line;
        }
        // Empty queues are removed whenever the map would have to grow, so its size stays in proportion to the number
        // of waiters.
        if lines.len() == lines.capacity() {
            lines.retain(|_, it| it.strong_count() > 0);
        }
        let line = Arc::new(Line::default());
        lines.insert(key.clone(), Arc::downgrade(&line));
        line
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Key, Weak<Line>>> {
        lock(&self.lines)
    }
}

/// Completes when the store reports a release of one of the keys. Never completes without keys.
async fn first_of<'k>(keys: &'k [Key], told: &mut [Freed<'k>], freed_in_store: impl Fn(&'k Key) -> Freed<'k>) {
    let (at, key) = poll_fn(|context| {
        let mut ready = told.iter_mut().zip(keys).enumerate();
        let ready = ready.find_map(|(at, (it, key))| it.as_mut().poll(context).is_ready().then_some((at, key)));
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await;
    // Created before the old future is dropped, so that the store keeps reporting.
    told[at] = freed_in_store(key);
}

/// Ignores poisoning: no code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A store that never reports releases.
    fn never(_key: &Key) -> Freed<'_> {
        Box::pin(std::future::pending())
    }

    #[tokio::test(start_paused = true)]
    async fn one_process_asks_with_one_voice_and_serves_in_order() {
        let lines = Arc::new(Lines::default());
        let (asked, served) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(Vec::new())));
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut waiters = Vec::new();
        for number in 0..10 {
            let (lines, asked, served) = (lines.clone(), asked.clone(), served.clone());
            waiters.push(tokio::spawn(async move {
                let ask = |_| async {
                    // Held for the first 20 attempts.
                    if asked.fetch_add(1, Ordering::Relaxed) < 20 {
                        return Ok(Turn::Held { free_in: None });
                    }
                    Ok(Turn::Done(()))
                };
                assert_eq!(lines.wait(&Key::from("k"), &[], deadline, never, ask).await.unwrap(), Waited::Done(()));
                served.lock().unwrap().push(number);
            }));
            tokio::task::yield_now().await;
        }
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(*served.lock().unwrap(), (0..10).collect::<Vec<_>>());
        assert_eq!(asked.load(Ordering::Relaxed), 30, "20 while it was held, then one for each waiter");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_never_sleeps_past_the_holders_expiry() {
        let (lines, started) = (Lines::default(), Instant::now());
        let expiry = started + Duration::from_millis(700);
        let ask = |_| async {
            let left = expiry.saturating_duration_since(Instant::now());
            Ok(if left.is_zero() { Turn::Done(()) } else { Turn::Held { free_in: Some(left) } })
        };
        assert_eq!(
            lines.wait(&Key::from("k"), &[], started + Duration::from_secs(60), never, ask).await.unwrap(),
            Waited::Done(())
        );
        assert!(started.elapsed() <= Duration::from_millis(702), "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_in_the_same_process_ends_the_pause() {
        let (lines, started) = (Arc::new(Lines::default()), Instant::now());
        let free = Arc::new(AtomicU32::new(0));
        let ask = |likely_free| {
            let free = free.clone();
            async move {
                let is_free = likely_free && free.load(Ordering::Relaxed) == 1;
                Ok(if is_free { Turn::Done(()) } else { Turn::Held { free_in: None } })
            }
        };
        let key = Key::from("k");
        let release = async {
            sleep(Duration::from_secs(5)).await;
            free.store(1, Ordering::Relaxed);
            lines.freed(&key);
        };
        let (taken, ()) = tokio::join!(lines.wait(&key, &[], started + Duration::from_secs(60), never, ask), release);
        assert_eq!(taken.unwrap(), Waited::Done(()));
        assert_eq!(started.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn releases_that_are_for_others_wake_nobody() {
        let (lines, started) = (Lines::default(), Instant::now());
        let asked = AtomicU32::new(0);
        let ask = |likely_free| {
            let asked = asked.fetch_add(1, Ordering::Relaxed);
            assert_eq!(likely_free, asked != 2);
            let (ahead, pause) =
                if asked == 0 { (3, Duration::from_millis(200)) } else { (0, Duration::from_millis(20)) };
            async move { Ok(if asked < 2 { Turn::Queued { ahead, pause } } else { Turn::Done(()) }) }
        };
        let key = Key::from("k");
        let releases = async {
            for _ in 0..3 {
                sleep(Duration::from_millis(10)).await;
                lines.freed(&key);
            }
        };
        let (taken, ()) = tokio::join!(lines.wait(&key, &[], started + Duration::from_secs(60), never, ask), releases);
        assert_eq!(taken.unwrap(), Waited::Done(()));
        assert_eq!(started.elapsed(), Duration::from_millis(50), "asked after the third release, and after the pause");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_at_the_deadline_and_asks_at_least_once() {
        let (lines, started) = (Lines::default(), Instant::now());
        let held = |_| async { Ok(Turn::<()>::Held { free_in: None }) };
        let key = Key::from("k");
        assert_eq!(lines.wait(&key, &[], started + Duration::from_secs(2), never, held).await.unwrap(), Waited::Held);
        assert_eq!(started.elapsed(), Duration::from_secs(2));
        let free = |_| async { Ok(Turn::Done(1)) };
        assert_eq!(lines.wait(&key, &[], Instant::now(), never, free).await.unwrap(), Waited::Done(1));
        let silent = |_| std::future::pending::<Result<Turn<()>>>();
        assert_eq!(lines.wait(&key, &[], Instant::now(), never, silent).await.unwrap(), Waited::NoAnswer);
    }
}
