//! Every public future, dropped after every poll: nothing stays locked, no transaction stays open, and the pool is
//! whole.
//!
//! `tests/source` fails when a public function that returns a future is not the first argument of a call of
//! [`Bench::drop_everywhere`] or [`Bench::drop_blocked`] here.

mod amid_statements;
mod attribute;
mod leases;
mod sessions;
mod several;
mod stocks;
mod transactions;
mod versions;

use std::cell::RefCell;
use std::fmt;
use std::panic;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;

use lockkit::testing::drop_at_every_await_of;
use lockkit::{Error, Lease, LeaseRequest, Leases, MultiLease};
use sqlx::Pool;
use support::{Backend, Server, TestDb};
use tokio::runtime::{self, Handle};

/// The connections of the pool under test.
const CONNECTIONS: u32 = 3;

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// Of all tests of this process.
static FUTURES: AtomicU32 = AtomicU32::new(0);

static POINTS: AtomicU32 = AtomicU32::new(0);

/// The panics of this process, each with the runtime of its test. Tokio hides those of background tasks, and
/// `panic = "abort"` ends the process for one.
static PANICS: Mutex<Vec<(runtime::Id, String)>> = Mutex::new(Vec::new());

/// Notes every panic from now on.
fn note_panics() {
    static HOOK: Once = Once::new();

    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if let Ok(runtime) = Handle::try_current() {
                PANICS.lock().expect("not poisoned").push((runtime.id(), info.to_string()));
            }
            before(info);
        }));
    });
}

/// The panics of this test's background tasks so far.
fn panics() -> Vec<String> {
    let here = Handle::current().id();
    let panics = PANICS.lock().expect("not poisoned");
    panics.iter().filter(|(runtime, _)| *runtime == here).map(|(_, panic)| panic.clone()).collect()
}

/// What is dropped: a public function, or another piece of code by a description, and in which case.
struct Tested {
    function: &'static str,
    case: String,
}

impl From<&'static str> for Tested {
    fn from(function: &'static str) -> Self {
        Self { function, case: String::new() }
    }
}

impl<C: Into<String>> From<(&'static str, C)> for Tested {
    fn from((function, case): (&'static str, C)) -> Self {
        Self { function, case: case.into() }
    }
}

impl fmt::Display for Tested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, case } = self;
        if case.is_empty() { f.write_str(function) } else { write!(f, "{function}, {case}") }
    }
}

/// The futures of one test: a database, and the pool that they run on.
struct Bench<S: Backend> {
    db: TestDb<S>,
    pool: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
}

type Made<S> = Lease<Pool<<S as Server>::DB>>;

type Request<S> = LeaseRequest<Pool<<S as Server>::DB>>;

type MadeAll<S> = MultiLease<Pool<<S as Server>::DB>>;

impl<S: Backend> Bench<S> {
    async fn new(db: TestDb<S>) -> Self {
        note_panics();
        db.execute(
            "CREATE TABLE item (id BIGINT NOT NULL PRIMARY KEY, stock BIGINT NOT NULL, version BIGINT NOT NULL)",
        )
        .await;
        db.execute("INSERT INTO item VALUES (1, 10, 1)").await;
        db.execute("CREATE TABLE t (n INT)").await;
        let pool = db.pool_of(CONNECTIONS).await;
        Self { leases: Leases::new(pool.clone()), pool, db }
    }

    /// Drops the future that `make` makes after each of its polls, until it is ready, and looks for what is left each
    /// time.
    ///
    /// `make` also returns what is kept while the future runs; `after` gets it back, to give up before the look.
    async fn drop_everywhere<Fut, Kept, T>(
        &self,
        tested: impl Into<Tested>,
        make: impl AsyncFnMut() -> (Fut, Kept),
        after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        self.drop_until(tested.into(), true, make, after).await;
    }

    /// As [`drop_everywhere`](Self::drop_everywhere), for a future that waits for somebody else in the end.
    async fn drop_blocked<Fut, Kept, T>(
        &self,
        tested: impl Into<Tested>,
        make: impl AsyncFnMut() -> (Fut, Kept),
        after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        self.drop_until(tested.into(), false, make, after).await;
    }

    async fn drop_until<Fut, Kept, T>(
        &self,
        tested: Tested,
        completes: bool,
        mut make: impl AsyncFnMut() -> (Fut, Kept),
        mut after: impl AsyncFnMut(Kept, bool),
    ) where
        Fut: Future<Output = Result<T, Error>>,
    {
        let name = &*tested.to_string();
        let kept = RefCell::new(None);
        #[expect(clippy::async_yields_async, reason = "it is to be dropped, not awaited")]
        let prepare = async || {
            let (future, keep) = make().await;
            kept.replace(Some(keep));
            async move { drop(future.await.unwrap_or_else(|err| panic!("{name} on {}: {err}", S::NAME))) }
        };
        let look = async |completed| {
            let keep = kept.take().expect("made together with the future");
            after(keep, completed).await;
            self.db.assert_nothing_left().await;
        };
        let mut dropping = drop_at_every_await_of(prepare).named(format!("{name} on {}", S::NAME));
        if completes {
            dropping = dropping.blocked_after(PATIENCE);
        }
        // Making tables takes MySQL a quarter of a second each time.
        if tested.function.ends_with("migrate") {
            dropping = dropping.asleep_only();
        }
        let drops = dropping.then(look).checking(&self.pool).await;
        assert_eq!(drops.completed, completes, "{name} on {}", S::NAME);
        assert_eq!(panics(), Vec::<String>::new(), "{name} on {}", S::NAME);
        let futures = FUTURES.fetch_add(1, Ordering::Relaxed) + 1;
        let points = POINTS.fetch_add(drops.points, Ordering::Relaxed) + drops.points;
        let (here, on) = (drops.points, S::NAME);
        println!("{name} on {on}: dropped at {here} points; so far {futures} futures at {points} points, nothing left");
    }

    async fn lease(&self) -> Made<S> {
        self.leases.lease("k").wait(PATIENCE).acquire().await.expect("acquire the lease")
    }

    async fn both(&self) -> MadeAll<S> {
        self.leases.all(["k", "l"]).wait(PATIENCE).acquire().await.expect("acquire the leases")
    }

    async fn two_rows_written(&self) -> lockkit::Tx<S::DB> {
        let mut tx = lockkit::begin(&self.pool).await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (1)").await.unwrap();
        S::execute(&mut tx, "INSERT INTO t VALUES (2)").await.unwrap();
        tx
    }

    /// For futures that commit.
    async fn all_or_none(&self, completed: bool) {
        self.db.assert_nothing_left().await;
        let rows = self.db.fetch_i64("SELECT COUNT(*) FROM t").await.unwrap();
        assert!(if completed { rows == 2 } else { rows == 0 || rows == 2 }, "{rows} rows");
        self.db.execute("DELETE FROM t").await;
    }
}

/// For futures that keep nothing and need nothing afterwards.
async fn nothing((): (), _completed: bool) {}
