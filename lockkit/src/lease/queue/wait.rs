//! The wait loop: how the first caller of a queue asks the store, and how the others wait. See [`queue`](super::queue).

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
};

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

pub(crate) use super::asking::{FIRST_ANSWER, Outcome, Refused};
use super::{
    HandedOver, Queued, Queues,
    asking::{Asking, Next},
};
use crate::{
    lease::life::kept::Wants,
    observe,
    policy::jitter_between,
    value::{error::Result, key::Key},
};

/// The result of a wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited<T, L> {
    /// The lease is taken.
    Done(T),
    /// A holder of this process has handed its lease over to the caller.
    HandedOver(L),
    /// The deadline passed.
    Refused(Refused),
}

/// Completes when a store reports that a lease was released.
pub(crate) type Freed<'k> = Pin<Box<dyn Future<Output = ()> + Send + 'k>>;

/// What a caller waits for.
#[derive(Debug)]
pub(crate) struct Wait<'k> {
    pub(crate) queue_key: Key,
    /// The keys of the leases, if they are known in advance.
    pub(crate) keys: &'k [Key],
    pub(crate) deadline: Instant,
    /// Whether the caller was refused, and asks again. It then waits up to [`FIRST_ANSWER`] for its turn even if the
    /// deadline has passed, and no longer than until a caller before it learns who has the lease.
    pub(crate) is_again: bool,
    /// Whether the grant to one caller may leave something for the next one.
    pub(crate) is_shared: bool,
    /// The lease that the caller takes from a holder of this process.
    pub(crate) wants: Option<Wants>,
    /// The leases that the caller runs under.
    pub(crate) under: Vec<Key>,
}

impl<L: HandedOver> Queues<L> {
    /// Asks the store until the lease is granted or the deadline has passed. The first attempt may take up to
    /// [`FIRST_ANSWER`] even if the deadline is earlier, so a short wait still gets an answer.
    ///
    /// `ask(true)` tries to take the lease. `ask(false)` may read first, because the lease was held a moment ago. A
    /// release of any of the keys in this process ends a pause. After the first attempt without a grant,
    /// `freed_in_store` also ends a pause. While a lease of this process is held that can be handed over, the store is
    /// asked once a second.
    pub(crate) async fn wait<'k, T, Fut>(
        &self,
        Wait { queue_key, keys, deadline, is_again, is_shared, wants, under }: Wait<'k>,
        freed_in_store: impl Fn(&'k Key) -> Freed<'k>,
        mut ask: impl FnMut(bool) -> Fut,
    ) -> Result<Waited<T, L>>
    where
        Fut: Future<Output = Result<Outcome<T>>>,
    {
        let others: Vec<_> = keys.iter().filter(|it| **it != queue_key).map(|it| self.queue(it)).collect();
        let takes_over = wants.is_some();
        if let Some(other) = self.opposite(keys, &under) {
            observe::opposite_order(&queue_key, &other);
        }
        let queued = self.queue(&queue_key).join(wants, under);
        let its_turn = tokio::select! {
            biased;
            its_turn = queued.first_or_handed_over() => Some(its_turn),
            () = queued.answered(), if is_again => None,
            () = sleep_until(if is_again { Instant::now() + FIRST_ANSWER } else { deadline }) => None,
        };
        match its_turn {
            Some(None) => {}
            Some(Some(handed_over)) => return Ok(Waited::HandedOver(handed_over)),
            None => {
                // Who asks again is refused for want of time, not because those before it were granted.
                let answered = queued.is_answered() || is_again && queued.others_share();
                return Ok(queued.handed_over_or(Refused::NotFirst { answered }));
            }
        }
        // Boxed, because only the first of the queue needs it.
        Box::pin(async move {
            let queue = &queued.queue;
            let mut reports: Vec<Freed<'k>> = Vec::new();
            let mut likely_free = true;
            let mut asking = Asking::new(Instant::now(), deadline);
            loop {
                // Created before the attempt, so that a release during the attempt is not missed.
                let mut freed = pin!(queue.freed.notified());
                let mut others: Vec<_> = others.iter().map(|it| Box::pin(it.freed.notified())).collect();
                let released_here = poll_fn(|context| {
                    let is_other = others.iter_mut().any(|it| it.as_mut().poll(context).is_ready());
                    if is_other || freed.as_mut().poll(context).is_ready() { Poll::Ready(()) } else { Poll::Pending }
                });
                let now = Instant::now();
                if asking.is_over(now) {
                    return Ok(queued.handed_over_or(asking.known()));
                }
                let holder = if takes_over { asking.waits_for(now, queue.holder()) } else { None };
                let is_here = holder.is_some();
                let next = if let Some(holder) = holder {
                    // Its holder wakes this caller. If it is lost instead, nobody does.
                    queue.answered();
                    asking.held_here(now, holder.until().saturating_duration_since(now))
                } else {
                    let limit = asking.send(now);
                    let answer = tokio::select! {
                        biased;
                        handed_over = queued.handed_over() => return Ok(Waited::HandedOver(handed_over)),
                        answer = timeout_at(limit, ask(likely_free)) => answer,
                    };
                    let Ok(outcome) = answer else {
                        return Ok(queued.handed_over_or(asking.known()));
                    };
                    let outcome = outcome?;
                    match outcome {
                        Outcome::Silent => {}
                        Outcome::Done(_) if is_shared => queue.shared(),
                        _ => queue.answered(),
                    }
                    asking.answered(Instant::now(), outcome)
                };
                let pause = match next {
                    Next::Done(taken) => return Ok(Waited::Done(taken)),
                    Next::GiveUp(refused) => return Ok(queued.handed_over_or(refused)),
                    Next::Pause(pause) => pause,
                };
                if reports.is_empty() && !is_here {
                    reports = keys.iter().map(&freed_in_store).collect();
                }
                let released = async {
                    tokio::select! {
                        biased;
                        () = released_here => {}
                        () = first_of(keys, &mut reports, &freed_in_store) => {}
                    }
                    for _ in 1..pause.ahead {
                        tokio::select! {
                            biased;
                            () = queue.freed.notified() => {}
                            () = first_of(keys, &mut reports, &freed_in_store) => {}
                        }
                    }
                };
                likely_free = tokio::select! {
                    biased;
                    handed_over = queued.handed_over() => return Ok(Waited::HandedOver(handed_over)),
                    () = released => true,
                    () = sleep(jitter_between(pause.least, pause.most)) => false,
                };
            }
        })
        .await
    }
}

impl<L: HandedOver> Queued<L> {
    /// The lease that was handed over to this caller, or else the end of its wait.
    fn handed_over_or<T>(&self, refused: Refused) -> Waited<T, L> {
        self.take().map_or(Waited::Refused(refused), Waited::HandedOver)
    }
}

/// Completes when the store reports a release of one of the keys. Never completes without keys.
async fn first_of<'k>(keys: &'k [Key], reports: &mut [Freed<'k>], freed_in_store: impl Fn(&'k Key) -> Freed<'k>) {
    let (at, key) = poll_fn(|context| {
        let mut ready = reports.iter_mut().zip(keys).enumerate();
        let ready = ready.find_map(|(at, (it, key))| it.as_mut().poll(context).is_ready().then_some((at, key)));
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await;
    // Created before the old future is dropped, so that the store keeps reporting.
    reports[at] = freed_in_store(key);
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc, Mutex,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use super::*;

    impl HandedOver for () {
        fn is_trusted(&self) -> bool {
            unreachable!("nothing is handed over")
        }
    }

    /// Waits in a queue in which nothing is handed over, for a store that never reports releases.
    async fn wait<T, Fut: Future<Output = Result<Outcome<T>>>>(
        queues: &Queues<()>,
        deadline: Instant,
        ask: impl FnMut(bool) -> Fut,
    ) -> Waited<T, ()> {
        let wait = Wait {
            queue_key: Key::from("k"),
            keys: &[],
            deadline,
            is_again: false,
            is_shared: false,
            wants: None,
            under: Vec::new(),
        };
        let never = |_: &Key| -> Freed<'_> { Box::pin(std::future::pending()) };
        queues.wait(wait, never, ask).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn one_process_sends_one_query_at_a_time_and_serves_in_order() {
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
            async move { Ok(if asked < 2 { Outcome::Ticketed { ahead, pause } } else { Outcome::Done(()) }) }
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
    async fn no_attempt_is_sent_that_has_no_time_for_an_answer() {
        let (queues, deadline) = (Queues::default(), Instant::now() + Duration::from_secs(2));
        let ask = |_| async move {
            assert!(Instant::now() < deadline);
            Ok(Outcome::<()>::Held { free_in: None })
        };
        assert_eq!(wait(&queues, deadline, ask).await, Waited::Refused(Refused::Held));
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
