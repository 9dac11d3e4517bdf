//! Drops a future at every possible point, and checks what it leaves behind.
//!
//! Each future is dropped twice at each await. Dropped as soon as it waits, its request is in flight; dropped when it
//! has been woken, the answer has arrived and was not read. The two leave different things behind.

use std::{
    fmt,
    future::{Future, IntoFuture, poll_fn},
    pin::{Pin, pin},
    task::Poll,
    time::Duration,
};

use tokio::time::timeout;

/// If a future is not woken for this long, it waits for another task or process.
const BLOCKED: Duration = Duration::from_millis(200);

/// A future with more points than this is treated as one that never ends.
const MOST_POINTS: u32 = 10_000;

/// Polls a new future once and drops it, polls another one twice and drops it, and so on until one is ready. So a
/// future is dropped at each of its awaits, as `tokio::select!`, a timeout or a disconnected client may drop it.
///
/// Each point is tested twice. One future is dropped as soon as it waits, while its request is in flight. Another one
/// is dropped after it was woken, before it is polled with the answer. If a future waits for another task for more than
/// [`blocked_after`](DropAtEveryAwait::blocked_after), it is dropped there and has no further points.
///
/// `make` is called once for each point. Setup that must not be interrupted belongs in [`drop_at_every_await_of`].
///
/// # Panics
/// When awaited: if the future panics, if a check fails, or if the future has more than 10,000 points.
///
/// # Example
/// ```
/// use lockkit::testing::drop_at_every_await;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # // A file: a connection that is closed takes a database in memory with it.
/// # let file = std::env::temp_dir().join(format!("lockkit-awaits-{}.db", std::process::id()));
/// # let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}?mode=rwc", file.display())).await?;
/// # let leases = lockkit::Leases::new(pool.clone()); leases.migrate().await?;
/// let nightly = || async {
///     let lease = leases.lease("nightly").acquire().await?;
///     let mut tx = lockkit::begin(&pool).await?;
///     sqlx::query("CREATE TABLE report (id INTEGER)").execute(&mut *tx).await.unwrap();
/// #   sqlx::query("DROP TABLE report").execute(&mut *tx).await.unwrap();
///     lease.commit(tx).await
/// };
/// let drops = drop_at_every_await(nightly).checking(&pool);
/// # let drops = drops.blocked_after(std::time::Duration::from_secs(60)); // A busy machine may pause for long.
/// let drops = drops.await;
/// assert!(drops.completed && drops.points > 5);
/// # pool.close().await; std::fs::remove_file(file)?; Ok(()) }
/// ```
pub fn drop_at_every_await<'a, Fut: Future + 'a>(
    mut make: impl FnMut() -> Fut + 'a,
) -> DropAtEveryAwait<'a, impl AsyncFnMut() -> Fut + 'a> {
    drop_at_every_await_of(async move || make())
}

/// As [`drop_at_every_await`], for a future with an async setup that must not be interrupted.
///
/// ```
/// # use lockkit::testing::drop_at_every_await_of;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # // A file: a connection that is closed takes a database in memory with it.
/// # let file = std::env::temp_dir().join(format!("lockkit-awaits-of-{}.db", std::process::id()));
/// # let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}?mode=rwc", file.display())).await?;
/// # let leases = lockkit::Leases::new(pool.clone()); leases.migrate().await?;
/// let release = async || leases.lease("k").acquire().await.unwrap().release();
/// drop_at_every_await_of(release).checking(&pool).await;
/// # pool.close().await; std::fs::remove_file(file)?; Ok(()) }
/// ```
pub fn drop_at_every_await_of<'a, Prepare, Fut>(prepare: Prepare) -> DropAtEveryAwait<'a, Prepare>
where
    Prepare: AsyncFnMut() -> Fut + 'a,
    Fut: Future + 'a,
{
    DropAtEveryAwait {
        prepare,
        name: "the future".to_owned(),
        blocked_after: BLOCKED,
        whens: &[When::Asleep, When::Woken],
        checks: Vec::new(),
    }
}

/// The result of [`drop_at_every_await`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drops {
    /// The number of futures that were dropped before they were ready.
    pub points: u32,
    /// Whether the last futures became ready. `false` if one waited for another task or process.
    pub completed: bool,
}

/// A future to be dropped at every point, made by [`drop_at_every_await`]. Awaiting it runs the test.
#[must_use = "nothing is dropped until this is awaited"]
pub struct DropAtEveryAwait<'a, Prepare> {
    prepare: Prepare,
    name: String,
    blocked_after: Duration,
    whens: &'a [When],
    pub(super) checks: Vec<Box<dyn Check + 'a>>,
}

impl<'a, Prepare> DropAtEveryAwait<'a, Prepare> {
    /// Sets the name of the future in panic messages.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets how long the future may go without being woken before it counts as waiting for another task or process.
    /// Defaults to 200 ms.
    pub fn blocked_after(mut self, after: Duration) -> Self {
        self.blocked_after = after;
        self
    }

    /// Drops the future only as soon as it waits, not after it was woken. That is half of the points, for futures with
    /// a slow setup.
    pub fn asleep_only(mut self) -> Self {
        self.whens = &[When::Asleep];
        self
    }

    /// Runs `check` after each drop (with `false`), and after the last future was ready (with `true`). Use it to
    /// release a lock that blocks the future, or to check the data. Checks run in the order in which they were added.
    pub fn then(mut self, check: impl AsyncFnMut(bool) + 'a) -> Self {
        self.checks.push(Box::new(Then(check)));
        self
    }
}

impl<Prepare> fmt::Debug for DropAtEveryAwait<'_, Prepare> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prepare: _, name, blocked_after, whens, checks } = self;
        f.debug_struct("DropAtEveryAwait")
            .field("name", name)
            .field("blocked_after", blocked_after)
            .field("whens", whens)
            .field("checks", &checks.len())
            .finish()
    }
}

impl<'a, Prepare, Fut> IntoFuture for DropAtEveryAwait<'a, Prepare>
where
    Prepare: AsyncFnMut() -> Fut + 'a,
    Fut: Future + 'a,
{
    type Output = Drops;
    type IntoFuture = Pin<Box<dyn Future<Output = Drops> + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(drop_everywhere(self))
    }
}

/// The moment at which a future is dropped.
#[derive(Debug, Clone, Copy)]
enum When {
    /// As soon as it waits, while its request is in flight.
    Asleep,
    /// After it was woken, before it is polled with the answer.
    Woken,
}

/// How the run of a future to be dropped ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The future was ready before the drop.
    Completed,
    Dropped,
    /// The future waited for another task or process, and was dropped there.
    Blocked,
}

async fn drop_everywhere<Prepare, Fut>(dropping: DropAtEveryAwait<'_, Prepare>) -> Drops
where
    Prepare: AsyncFnMut() -> Fut,
    Fut: Future,
{
    let DropAtEveryAwait { mut prepare, name, blocked_after, whens, mut checks } = dropping;
    for check in &mut checks {
        check.begin().await;
    }
    let mut drops = Drops { points: 0, completed: true };
    for &when in whens {
        for polls in 0.. {
            let ended = drop_after_polls(polls, when, blocked_after, prepare().await).await;
            for check in &mut checks {
                if let Err(left) = check.check(ended == Ended::Completed).await {
                    panic!("{name}, dropped {when:?} after {polls} polls: {left}");
                }
            }
            drops.points += u32::from(ended != Ended::Completed);
            drops.completed &= ended != Ended::Blocked;
            if ended != Ended::Dropped {
                break;
            }
            assert!(polls < MOST_POINTS, "{name} never ends");
        }
    }
    drops
}

/// Polls a future up to `polls` times, and drops it.
async fn drop_after_polls(polls: u32, when: When, blocked_after: Duration, future: impl Future) -> Ended {
    let mut future = pin!(future);
    let mut polled = 0;
    let ended = poll_fn(|context| {
        if polled == polls {
            return Poll::Ready(Ended::Dropped);
        }
        polled += 1;
        match (future.as_mut().poll(context), when) {
            (Poll::Ready(_), _) => Poll::Ready(Ended::Completed),
            (Poll::Pending, When::Asleep) if polled == polls => Poll::Ready(Ended::Dropped),
            (Poll::Pending, _) => Poll::Pending,
        }
    });
    timeout(blocked_after, ended).await.unwrap_or(Ended::Blocked)
}

pub(super) type Checked<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + 'a>>;

/// A check that runs after each drop.
pub(super) trait Check {
    fn begin(&mut self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
    fn check(&mut self, completed: bool) -> Checked<'_>;
}

struct Then<C>(C);

impl<C: AsyncFnMut(bool)> Check for Then<C> {
    fn begin(&mut self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(std::future::ready(()))
    }

    fn check(&mut self, completed: bool) -> Checked<'_> {
        Box::pin(async move {
            (self.0)(completed).await;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::task::yield_now;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn every_await_is_a_point_before_and_after_its_wake_up() {
        let (begun, ended) = (Cell::new(0), Cell::new(0));
        let work = || async {
            begun.set(begun.get() + 1);
            yield_now().await;
            yield_now().await;
            ended.set(ended.get() + 1);
        };
        let drops = drop_at_every_await(work).await;
        // Dropped unpolled, at the first await and at the second await; then the same once more.
        assert_eq!(drops, Drops { points: 6, completed: true });
        assert_eq!((begun.get(), ended.get()), (6, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_future_that_waits_for_somebody_else_is_dropped_there() {
        let mut completed = Vec::new();
        let waiting = drop_at_every_await(std::future::pending::<()>).then(async |it| completed.push(it)).await;
        assert!(!waiting.completed);
        assert!(!completed.is_empty() && !completed.contains(&true));
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "dropped in the middle")]
    async fn a_check_that_fails_is_heard() {
        let half_done = Cell::new(false);
        let work = || async {
            half_done.set(true);
            yield_now().await;
            half_done.set(false);
        };
        drop_at_every_await(work).then(async |_| assert!(!half_done.get(), "dropped in the middle")).await;
    }
}
