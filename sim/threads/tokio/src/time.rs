//! A clock that a test sets.

use std::{
    cell::RefCell,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

pub use original::time::Instant;

thread_local! {
    /// What sleeps, and until when. All of it is on one thread.
    static SLEEPING: RefCell<Vec<(Instant, Waker)>> = const { RefCell::new(Vec::new()) };
}

/// The time is over.
#[derive(Debug)]
pub struct Elapsed(());

/// Lets time pass, and wakes what sleeps no longer. Everything else may run before that notices.
pub fn advance(by: Duration) {
    // It has advanced the clock when it is polled for the first time.
    _ = pin!(original::time::advance(by)).poll(&mut Context::from_waker(Waker::noop()));
    let now = Instant::now();
    let due = SLEEPING.with_borrow_mut(|it| it.extract_if(.., |(until, _)| *until <= now).collect::<Vec<_>>());
    for (_, waker) in due {
        waker.wake();
    }
}

/// Calls `run` with a clock that stands still, and forgets what sleeps.
pub(crate) fn paused(run: impl FnOnce()) {
    let clock = original::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let clock = clock.expect("a runtime without I/O");
    let _entered = clock.enter();
    run();
}

/// A new run begins.
pub(crate) fn forget() {
    SLEEPING.with_borrow_mut(Vec::clear);
}

/// As in Tokio.
#[derive(Debug)]
pub struct Sleep(Instant);

/// As in Tokio.
pub fn sleep_until(until: Instant) -> Sleep {
    Sleep(until)
}

/// As in Tokio.
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(Instant::now() + duration)
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.0 <= Instant::now() {
            return Poll::Ready(());
        }
        SLEEPING.with_borrow_mut(|it| it.push((self.0, context.waker().clone())));
        Poll::Pending
    }
}

/// As in Tokio.
///
/// # Errors
/// The deadline has passed.
pub async fn timeout_at<T>(deadline: Instant, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    original::select! {
        biased;
        done = future => Ok(done),
        () = sleep_until(deadline) => Err(Elapsed(())),
    }
}

/// As in Tokio.
pub fn timeout<T>(duration: Duration, future: impl Future<Output = T>) -> impl Future<Output = Result<T, Elapsed>> {
    timeout_at(Instant::now() + duration, future)
}
