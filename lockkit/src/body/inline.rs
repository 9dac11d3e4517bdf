//! Work in the task of its caller, which continues without the caller. Knows no store and no database.
//!
//! A task of its own costs more than a short statement. But a caller can be dropped, or stop to poll: a `select!` in a
//! loop, for example, polls nothing else while it runs one of its branches, and that branch may wait for the connection
//! that this work occupies. So the work continues in a task when its caller is dropped, and when it takes long.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{runtime::Handle, task::JoinHandle, time::Instant};

use crate::{
    body::{
        guard::{Guard, Hold},
        per_runtime::PerRuntime,
        task::result_of,
    },
    mutex::Mutex,
    value::error::Result,
};

/// How long work may take in the task of its caller.
const LONG: Duration = Duration::from_millis(50);

/// The work that runs in the tasks of its callers, in the order of its beginning. Some may have ended.
#[derive(Default)]
pub(crate) struct Inline(PerRuntime<Running>);

struct Running {
    begun: Instant,
    work: Weak<dyn Work>,
}

impl Inline {
    /// Does the work in the task of the caller for as long as that polls it, for [`LONG`] at most, and then in a task.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> {
        // Before there is a future that has room for it.
        let work = Box::pin(work);
        async move {
            let place = Mutex::new(Place::Inline { work, caller: Waker::noop().clone() });
            let work = Arc::new(Shared { place, runtime: Handle::current() });
            let weak: Weak<Shared<T>> = Arc::downgrade(&work);
            if let Some(list) = self.0.push(Running { begun: Instant::now(), work: weak }) {
                list.check_every(LONG / 2, |running| {
                    running.retain(|it| it.work.strong_count() > 0);
                    let long = running.iter().take_while(|it| it.begun.elapsed() >= LONG);
                    let long: Vec<_> = long.filter_map(|it| it.work.upgrade()).collect();
                    move || long.iter().for_each(|it| it.continue_in_task())
                });
            }
            let caller = Guard::new(Caller(work));
            let done = poll_fn(|cx| caller.0.poll(cx, doing)).await;
            drop(caller.defuse());
            done
        }
    }
}

trait Work: Send + Sync {
    /// Lets it continue in a task, unless it is there already, is polled at this moment, or has ended.
    fn continue_in_task(&self);
}

struct Shared<T> {
    place: Mutex<Place<T>>,
    runtime: Handle,
}

enum Place<T> {
    Inline {
        work: Pin<Box<dyn Future<Output = Result<T>> + Send>>,
        caller: Waker,
    },
    Task(JoinHandle<Result<T>>),
    /// It is polled at this moment, or has ended. What panics is not polled again.
    Taken,
}

impl<T: Send + 'static> Shared<T> {
    fn poll(&self, cx: &mut Context<'_>, doing: &'static str) -> Poll<Result<T>> {
        // The caller may be polled outside of a runtime, or on another one.
        let _inside = self.runtime.enter();
        let taken = mem::replace(&mut *self.place.lock(), Place::Taken);
        let (polled, place) = match taken {
            Place::Inline { mut work, mut caller } => {
                caller.clone_from(cx.waker());
                (work.as_mut().poll(cx), Place::Inline { work, caller })
            }
            Place::Task(mut task) => (Pin::new(&mut task).poll(cx).map(|it| result_of(doing, it)), Place::Task(task)),
            Place::Taken => unreachable!("BUG: only the caller polls, and not after the end"),
        };
        if polled.is_pending() {
            *self.place.lock() = place;
        }
        polled
    }
}

impl<T: Send + 'static> Work for Shared<T> {
    fn continue_in_task(&self) {
        let mut place = self.place.lock();
        match mem::replace(&mut *place, Place::Taken) {
            Place::Inline { work, caller } => {
                *place = Place::Task(self.runtime.spawn(work));
                drop(place);
                // Its next poll waits for the task.
                caller.wake();
            }
            other => *place = other,
        }
    }
}

struct Caller<T: Send + 'static>(Arc<Shared<T>>);

impl<T: Send + 'static> Hold for Caller<T> {
    fn abandon(self) {
        let place = mem::replace(&mut *self.0.place.lock(), Place::Taken);
        // After the mutex is unlocked: on a runtime that has ended, it is dropped here.
        if let Place::Inline { work, .. } = place {
            self.0.runtime.spawn(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::{
        sync::oneshot,
        time::{sleep, timeout},
    };

    use super::*;

    #[tokio::test]
    async fn work_is_done_in_the_task_of_its_caller() {
        let here = tokio::task::try_id();
        let there = Inline::default().run("testing", async { Ok(tokio::task::try_id()) }).await.unwrap();
        assert_eq!(there, here);
    }

    #[tokio::test]
    async fn work_continues_when_its_caller_is_dropped() {
        let inline = Inline::default();
        let ((go, gone), (done, is_done)) = (oneshot::channel::<()>(), oneshot::channel());
        let work = async {
            gone.await.unwrap();
            done.send(()).unwrap();
            Ok(())
        };
        timeout(Duration::from_millis(1), inline.run("testing", work)).await.unwrap_err();
        go.send(()).unwrap();
        is_done.await.unwrap();
    }

    #[tokio::test]
    async fn work_continues_when_its_caller_does_not_poll_it() {
        let inline = Inline::default();
        let ((go, gone), (done, is_done)) = (oneshot::channel::<()>(), oneshot::channel());
        let work = async {
            gone.await.unwrap();
            done.send(()).unwrap();
            Ok(7)
        };
        let mut running = pin!(inline.run("testing", work));
        assert!(poll_once(running.as_mut()).await.is_none());
        go.send(()).unwrap();
        is_done.await.unwrap();
        assert_eq!(running.await.unwrap(), 7);
    }

    #[tokio::test]
    async fn its_caller_gets_the_result_of_long_work() {
        let inline = Inline::default();
        let work = async {
            sleep(3 * LONG).await;
            Ok(tokio::task::try_id())
        };
        assert_ne!(inline.run("testing", work).await.unwrap(), tokio::task::try_id());
    }

    #[tokio::test(start_paused = true)]
    async fn work_leaves_the_task_of_its_caller_soon_after_it_has_become_long() {
        for (takes, is_moved) in [(LONG * 3 / 4, false), (LONG * 7 / 4, true)] {
            let work = async move {
                sleep(takes).await;
                Ok(tokio::task::try_id())
            };
            let id = Inline::default().run("testing", work).await.unwrap();
            assert_eq!(id != tokio::task::try_id(), is_moved, "{takes:?}");
        }
    }

    #[tokio::test]
    async fn work_continues_beside_a_runtime_that_is_not_driven_or_has_ended() {
        let inline = Inline::default();
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let its_own = async { Ok(()) };
        let begun = std::thread::scope(|it| it.spawn(|| other.block_on(inline.run("testing", its_own))).join());
        begun.unwrap().unwrap();
        for _ in 0..2 {
            let (done, is_done) = oneshot::channel();
            let work = async {
                sleep(LONG).await;
                Ok(done.send(()))
            };
            let mut running = pin!(inline.run("testing", work));
            assert!(poll_once(running.as_mut()).await.is_none());
            is_done.await.unwrap();
            running.await.unwrap().unwrap();
        }
        other.shutdown_background();
        assert!(inline.0.runtimes() <= 1);
    }

    #[tokio::test]
    async fn work_can_be_polled_outside_of_a_runtime() {
        let inline = Arc::new(Inline::default());
        let (go, gone) = oneshot::channel::<()>();
        let work = async {
            gone.await.unwrap();
            Ok(Handle::current().id())
        };
        let its = inline.clone();
        let mut running = Box::pin(async move { its.run("testing", work).await });
        assert!(poll_once(running.as_mut()).await.is_none());
        go.send(()).unwrap();
        let polled = std::thread::spawn(move || running.as_mut().poll(&mut Context::from_waker(Waker::noop())));
        assert!(matches!(polled.join().unwrap(), Poll::Ready(Ok(it)) if it == Handle::current().id()));
    }

    async fn poll_once<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        tokio::select! {
            biased;
            done = future => Some(done),
            () = std::future::ready(()) => None,
        }
    }
}
