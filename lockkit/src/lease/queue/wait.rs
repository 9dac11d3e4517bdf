//! The wait loop: how the first caller of a queue asks the store, and how the others wait. See [`queue`](super::queue).

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    lease::{
        life::kept::Wants,
        queue::{Queued, Queues},
    },
    observe,
    policy::{Backoff, half_jitter},
    value::{error::Result, key::Key},
};

/// Pauses between two attempts. The first are short because many locks are held briefly.
const PAUSES: Backoff = Backoff { base: Duration::from_millis(4), cap: Duration::from_millis(250) };

/// How often a caller asks the store though a holder of its process has the lease.
const ASK_ANYWAY: Duration = Duration::from_secs(1);

/// Time limit of the first attempt when the caller's own wait is shorter.
pub(crate) const FIRST_ANSWER: Duration = Duration::from_millis(500);

/// The result of one attempt.
pub(crate) enum Outcome<T> {
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
pub(crate) enum Waited<T, H> {
    /// The lease is taken.
    Done(T),
    /// A holder of this process has handed its lease to the caller.
    Handed(H),
    /// The deadline passed.
    Refused(Refused),
}

/// What was known of the lease when the deadline passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another holder had the lease.
    Held,
    /// The store had not answered.
    NoAnswer,
    /// This caller had not reached the head of the queue: other callers of this process were before it. `answered`: the
    /// store had answered one of those in the meantime.
    NotFirst { answered: bool },
}

/// Completes when a store reports that a lease was released.
pub(crate) type Freed<'k> = Pin<Box<dyn Future<Output = ()> + Send + 'k>>;

/// What a caller waits for.
#[derive(Debug)]
pub(crate) struct Wait<'k> {
    /// The queue.
    pub(crate) queue: Key,
    /// The keys of the leases, if they are known in advance.
    pub(crate) keys: &'k [Key],
    pub(crate) deadline: Instant,
    /// The lease that the caller takes from a holder of this process.
    pub(crate) wants: Option<Wants>,
    /// The leases that the caller runs under.
    pub(crate) under: Vec<Key>,
}

impl<H> Queues<H> {
    /// Asks the store until the lease is granted or the deadline has passed. The first attempt may take up to
    /// [`FIRST_ANSWER`] even if the deadline is earlier, so a short wait still gets an answer.
    ///
    /// `ask(true)` tries to take the lease. `ask(false)` may read first, because the lease was held a moment ago. A
    /// release of any of the keys in this process ends a pause. After the first attempt without a grant,
    /// `freed_in_store` also ends a pause. While a lease of this process is held that will be handed on, the
    /// store is not asked.
    pub(crate) async fn wait<'k, T, Fut>(
        &self,
        Wait { queue, keys, deadline, wants, under }: Wait<'k>,
        freed_in_store: impl Fn(&'k Key) -> Freed<'k>,
        mut ask: impl FnMut(bool) -> Fut,
    ) -> Result<Waited<T, H>>
    where
        Fut: Future<Output = Result<Outcome<T>>>,
    {
        let others: Vec<_> = keys.iter().filter(|it| **it != queue).map(|it| self.queue(it)).collect();
        let takes_over = wants.is_some();
        if let Some(other) = self.opposite(keys, &under) {
            observe::opposite_order(&queue, &other);
        }
        let queued = self.queue(&queue).join(wants, under);
        match timeout_at(deadline, queued.first_or_handed()).await {
            Ok(None) => {}
            Ok(Some(handed)) => return Ok(Waited::Handed(handed)),
            Err(_) => return Ok(queued.handed_or(Refused::NotFirst { answered: queued.is_answered() })),
        }
        // Boxed, because only the first of the queue needs it.
        Box::pin(async move {
            let queue = &queued.queue;
            let mut told: Vec<Freed<'k>> = Vec::new();
            let (mut pauses, mut locked_pauses) = (PAUSES.ceilings(), PAUSES.ceilings());
            let mut likely_free = true;
            let mut without = Refused::NoAnswer;
            let mut limit = deadline.max(Instant::now() + FIRST_ANSWER);
            let mut asked_at = Instant::now();
            loop {
                // Created before the attempt, so that a release during the attempt is not missed.
                let mut freed: Vec<_> = others.iter().chain([queue]).map(|it| Box::pin(it.freed.notified())).collect();
                let freed = poll_fn(|context| {
                    let is_freed = freed.iter_mut().any(|it| it.as_mut().poll(context).is_ready());
                    if is_freed { Poll::Ready(()) } else { Poll::Pending }
                });
                // Also asks from time to time: the lease may have been stolen from its holder.
                let is_known = takes_over && asked_at.elapsed() < ASK_ANYWAY;
                let holder = if is_known { queue.holder() } else { None };
                let asking = Instant::now();
                let (outcome, is_here) = if let Some(holder) = holder {
                    // Its holder wakes this caller. If it is lost instead, nobody does.
                    let left = holder.until().saturating_duration_since(Instant::now());
                    (Outcome::Held { free_in: Some(left) }, true)
                } else {
                    let asked = tokio::select! {
                        biased;
                        handed = queued.handed() => return Ok(Waited::Handed(handed)),
                        asked = timeout_at(limit, ask(likely_free)) => asked,
                    };
                    let Ok(outcome) = asked else {
                        return Ok(queued.handed_or(without));
                    };
                    asked_at = Instant::now();
                    (outcome?, false)
                };
                let took = asking.elapsed();
                limit = deadline;
                if !matches!(outcome, Outcome::Silent) {
                    without = Refused::Held;
                    queue.answered();
                }
                let (ahead, pause) = match outcome {
                    Outcome::Done(taken) => return Ok(Waited::Done(taken)),
                    Outcome::Held { free_in: Some(free_in) } => {
                        locked_pauses = PAUSES.ceilings();
                        let pause = if is_here { PAUSES.cap } else { half_jitter(pauses.next().unwrap_or(PAUSES.cap)) };
                        // Never sleep past the expiry of the holder's lease.
                        (0, pause.min(free_in + Duration::from_millis(1)))
                    }
                    Outcome::Queued { ahead, pause } => (ahead, pause.min(PAUSES.cap)),
                    // The attempt itself took its full time limit, so the pause is short.
                    Outcome::Silent if took > PAUSES.cap => (0, PAUSES.base),
                    // Neither a row lock nor a quick failure tells how long the lease is held, so these pauses grow on
                    // their own.
                    Outcome::Held { free_in: None } | Outcome::Silent => {
                        (0, half_jitter(locked_pauses.next().unwrap_or(PAUSES.cap)))
                    }
                };
                if Instant::now() >= deadline {
                    return Ok(queued.handed_or(without));
                }
                if told.is_empty() && !is_here {
                    told = keys.iter().map(&freed_in_store).collect();
                }
                let freed = async {
                    tokio::select! {
                        () = freed => {}
                        () = first_of(keys, &mut told, &freed_in_store) => {}
                    }
                    for _ in 1..ahead {
                        tokio::select! {
                            () = queue.freed.notified() => {}
                            () = first_of(keys, &mut told, &freed_in_store) => {}
                        }
                    }
                };
                likely_free = tokio::select! {
                    biased;
                    handed = queued.handed() => return Ok(Waited::Handed(handed)),
                    () = freed => true,
                    () = sleep(pause.min(deadline.saturating_duration_since(Instant::now()))) => false,
                };
            }
        })
        .await
    }
}

impl<H> Queued<H> {
    /// The lease that was handed to this caller, or else the end of its wait.
    fn handed_or<T>(&self, refused: Refused) -> Waited<T, H> {
        self.take().map_or(Waited::Refused(refused), Waited::Handed)
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

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    /// Waits in a queue in which nothing is handed on, for a store that never reports releases.
    async fn wait<T, Fut: Future<Output = Result<Outcome<T>>>>(
        queues: &Queues<()>,
        deadline: Instant,
        ask: impl FnMut(bool) -> Fut,
    ) -> Waited<T, ()> {
        let wait = Wait { queue: Key::from("k"), keys: &[], deadline, wants: None, under: Vec::new() };
        let never = |_: &Key| -> Freed<'_> { Box::pin(std::future::pending()) };
        queues.wait(wait, never, ask).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_process_asks_with_one_voice_and_serves_in_order() {
        let queues = Arc::new(Queues::default());
        let (asked, served) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(Vec::new())));
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut waiters = Vec::new();
        for number in 0..10 {
            let (queues, asked, served) = (queues.clone(), asked.clone(), served.clone());
            waiters.push(tokio::spawn(async move {
                let ask = |_| async {
                    // Held for the first 20 attempts.
                    if asked.fetch_add(1, Ordering::Relaxed) < 20 {
                        return Ok(Outcome::Held { free_in: None });
                    }
                    Ok(Outcome::Done(()))
                };
                assert_eq!(wait(&queues, deadline, ask).await, Waited::Done(()));
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
        let (queues, started) = (Queues::default(), Instant::now());
        let expiry = started + Duration::from_millis(700);
        let ask = |_| async {
            let left = expiry.saturating_duration_since(Instant::now());
            Ok(if left.is_zero() { Outcome::Done(()) } else { Outcome::Held { free_in: Some(left) } })
        };
        assert_eq!(wait(&queues, started + Duration::from_secs(60), ask).await, Waited::Done(()));
        assert!(started.elapsed() <= Duration::from_millis(702), "{:?}", started.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_in_the_same_process_ends_the_pause() {
        let (queues, started) = (Arc::new(Queues::default()), Instant::now());
        let free = Arc::new(AtomicU32::new(0));
        let ask = |likely_free| {
            let free = free.clone();
            async move {
                let is_free = likely_free && free.load(Ordering::Relaxed) == 1;
                Ok(if is_free { Outcome::Done(()) } else { Outcome::Held { free_in: None } })
            }
        };
        let key = Key::from("k");
        let release = async {
            sleep(Duration::from_secs(5)).await;
            free.store(1, Ordering::Relaxed);
            queues.freed(&key);
        };
        let (taken, ()) = tokio::join!(wait(&queues, started + Duration::from_secs(60), ask), release);
        assert_eq!(taken, Waited::Done(()));
        assert_eq!(started.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn releases_that_are_for_others_wake_nobody() {
        let (queues, started) = (Queues::default(), Instant::now());
        let asked = AtomicU32::new(0);
        let ask = |likely_free| {
            let asked = asked.fetch_add(1, Ordering::Relaxed);
            assert_eq!(likely_free, asked != 2);
            let (ahead, pause) =
                if asked == 0 { (3, Duration::from_millis(200)) } else { (0, Duration::from_millis(20)) };
            async move { Ok(if asked < 2 { Outcome::Queued { ahead, pause } } else { Outcome::Done(()) }) }
        };
        let key = Key::from("k");
        let releases = async {
            for _ in 0..3 {
                sleep(Duration::from_millis(10)).await;
                queues.freed(&key);
            }
        };
        let (taken, ()) = tokio::join!(wait(&queues, started + Duration::from_secs(60), ask), releases);
        assert_eq!(taken, Waited::Done(()));
        assert_eq!(started.elapsed(), Duration::from_millis(50), "asked after the third release, and after the pause");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_at_the_deadline_and_asks_at_least_once() {
        let (queues, started) = (Queues::default(), Instant::now());
        let held = |_| async { Ok(Outcome::<()>::Held { free_in: None }) };
        assert_eq!(wait(&queues, started + Duration::from_secs(2), held).await, Waited::Refused(Refused::Held));
        assert_eq!(started.elapsed(), Duration::from_secs(2));
        let free = |_| async { Ok(Outcome::Done(1)) };
        assert_eq!(wait(&queues, Instant::now(), free).await, Waited::Done(1));
        let silent = |_| std::future::pending::<Result<Outcome<()>>>();
        assert_eq!(wait(&queues, Instant::now(), silent).await, Waited::Refused(Refused::NoAnswer));
    }
}
