//! Two `#[with_lock]` on one function, in every order of the strategies: when each lock is taken and released,
//! against the commits.

use std::{
    fmt::Write,
    sync::Mutex,
    time::{Duration, Instant},
};

use lockkit::{Error, Leases, NamedLock, RowLock, SessionLock, Wait, dialect::SessionOps, with_lock};
use sqlx::{Encode, Pool, Type};
use support::{Backend, Server, TestDb, on_every_server};
use tokio::{sync::oneshot, time::sleep};

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// For how long the bodies hold their locks while others ask for them.
const HOLD: Duration = Duration::from_millis(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lease,
    LeaseTx,
    Row,
    Named,
    Session,
    Version,
}

use Kind::{Lease, LeaseTx, Named, Row, Session, Version};

/// What a function under test has.
struct Bench<'a, S: Backend> {
    db: &'a TestDb<S>,
    pool: &'a Pool<S::DB>,
    leases: &'a Leases<Pool<S::DB>>,
    upper: Kind,
    lower: Kind,
    started: Instant,
    reached: Mutex<Option<oneshot::Sender<()>>>,
    upper_taken: Mutex<Option<Duration>>,
    lower_taken: Mutex<Option<Duration>>,
}

impl<S: Backend<DB: SessionOps>> Bench<'_, S>
where
    i64: for<'q> Encode<'q, S::DB> + Type<S::DB>,
{
    /// Comes between the two locks, as an argument of the lower attribute.
    async fn between(&self) -> Duration {
        *self.upper_taken.lock().unwrap() = Some(self.started.elapsed());
        assert!(!self.is_free(self.upper, "upper").await, "{:?} above {:?}: taken first", self.upper, self.lower);
        assert!(self.lower == Version || self.is_free(self.lower, "lower").await, "taken second");
        PATIENCE
    }

    async fn inside(&self) {
        *self.lower_taken.lock().unwrap() = Some(self.started.elapsed());
        assert!(!self.is_free(self.upper, "upper").await, "held in the body");
        assert!(!self.is_free(self.lower, "lower").await, "held in the body");
        self.reached.lock().unwrap().take().unwrap().send(()).unwrap();
        sleep(HOLD).await;
    }

    /// Whether another process would get the lock. A version is never free, as it is never held.
    async fn is_free(&self, kind: Kind, which: &str) -> bool {
        let pool = &self.db.pool;
        // Asked by the task that runs the body, which does not wait for itself.
        match kind {
            Lease | LeaseTx => match Leases::new(pool.clone()).lease(which).try_acquire().await.unwrap() {
                Some(lease) => lease.release().await.is_ok(),
                None => false,
            },
            Session => match SessionLock::new(which).try_acquire(pool).await.unwrap() {
                Some(session) => session.release().await.is_ok(),
                None => false,
            },
            Version => false,
            Row | Named => match self.take(kind, which, Wait::Never).await {
                Ok(()) => true,
                Err(err) if err.is_contended() => false,
                Err(err) => panic!("{err:?}"),
            },
        }
    }

    /// Takes the lock as another process would, and gives it back.
    async fn take(&self, kind: Kind, which: &str, wait: Wait) -> Result<(), Error> {
        let pool = &self.db.pool;
        match kind {
            Lease | LeaseTx => {
                let wait = if wait == Wait::Never { Duration::ZERO } else { PATIENCE };
                Leases::new(pool.clone()).lease(which).wait(wait).acquire().await?.release().await?;
            }
            Row => {
                let mut tx = lockkit::begin(pool).await?;
                RowLock::table(&format!("{which}_item")).by("id", 1_i64).wait(wait).lock(&mut *tx).await?;
                tx.rollback().await?;
            }
            Named => {
                let mut tx = lockkit::begin(pool).await?;
                NamedLock::new(which).wait(wait).lock(&mut *tx).await?;
                tx.rollback().await?;
            }
            Session => SessionLock::new(which).wait(wait).acquire(pool).await?.release().await?,
            Version => {}
        }
        Ok(())
    }

    /// Waits for the lock; says when it came, and what was committed by then.
    async fn after(&self, kind: Kind, which: &str) -> (Duration, Vec<String>) {
        self.take(kind, which, Wait::AtMost(PATIENCE)).await.unwrap();
        let came = self.started.elapsed();
        let mut done = Vec::new();
        for which in ["upper", "lower"] {
            if self.db.fetch_i64(&format!("SELECT COUNT(*) FROM done WHERE name = '{which}'")).await == Some(1) {
                done.push(which.to_owned());
            }
        }
        (came, done)
    }
}

async fn done<S: Backend>(tx: &mut lockkit::Tx<S::DB>, which: &str) {
    S::execute(tx, &format!("INSERT INTO done VALUES ('{which}')")).await.unwrap();
}

/// Runs the function whose two attributes are of the kinds that the bench names: there is one for every pair.
///
/// A kind is its arguments, and the name of its transaction in brackets, if it has one. The names in the arguments are
/// given first, so that they are those of the function, too.
macro_rules! run_nested {
    ($bench:ident, upper: { $($upper:ident $above:tt $above_tx:tt)* }, lower: $lower:tt) => {
        match $bench.upper {
            $($upper => run_nested!(@under $bench, $above, $above_tx, $lower),)*
        }
    };
    (@under $bench:ident, $above:tt, $above_tx:tt, { $($lower:ident $below:tt $below_tx:tt)* }) => {
        match $bench.lower {
            $($lower => run_nested!(@function $bench, $above, $above_tx, $below, $below_tx),)*
        }
    };
    (@function $bench:ident, ($($above:tt)*), [$($upper:ident)?], ($($below:tt)*), [$($lower:ident)?]) => {{
        #[with_lock($($above)*)]
        #[with_lock($($below)*)]
        async fn nested<S: Backend<DB: SessionOps>>($bench: &Bench<'_, S>) -> Result<(), Error>
        where
            i64: for<'q> Encode<'q, S::DB> + Type<S::DB>,
        {
            $bench.inside().await;
            $(done::<S>(&mut $upper, "upper").await;)?
            $(done::<S>(&mut $lower, "lower").await;)?
            Ok(())
        }
        nested($bench).await
    }};
}

async fn run<S: Backend<DB: SessionOps>>(bench: &Bench<'_, S>) -> Result<(), Error>
where
    i64: for<'q> Encode<'q, S::DB> + Type<S::DB>,
{
    run_nested! {
        bench,
        upper: {
            Lease (lease, on = bench.leases, key = "upper", wait = PATIENCE) []
            LeaseTx (lease, on = bench.leases, key = "upper", wait = PATIENCE, tx = upper) [upper]
            Row (row, on = bench.pool, table = "upper_item", by(id = 1_i64), wait = PATIENCE, tx = upper) [upper]
            Named (named, on = bench.pool, key = "upper", wait = PATIENCE, tx = upper) [upper]
            Session (session, on = bench.pool, key = "upper", wait = PATIENCE) []
            Version (version, on = bench.pool, deadline = PATIENCE, tx = upper) [upper]
        },
        lower: {
            Lease (lease, on = bench.leases, key = "lower", wait = bench.between().await) []
            LeaseTx (lease, on = bench.leases, key = "lower", wait = bench.between().await, tx = lower) [lower]
            Row (
                row,
                on = bench.pool,
                table = "lower_item",
                by(id = 1_i64),
                wait = bench.between().await,
                tx = lower
            ) [lower]
            Named (named, on = bench.pool, key = "lower", wait = bench.between().await, tx = lower) [lower]
            Session (session, on = bench.pool, key = "lower", wait = bench.between().await) []
            Version (version, on = bench.pool, deadline = bench.between().await, tx = lower) [lower]
        }
    }
}

on_every_server! {
    async fn locks_nest_as_they_are_written_in_every_order<S>(db: TestDb<S>) {
        for table in ["upper", "lower"] {
            db.execute(&format!("CREATE TABLE {table}_item (id BIGINT PRIMARY KEY)")).await;
            db.execute(&format!("INSERT INTO {table}_item VALUES (1)")).await;
        }
        db.execute("CREATE TABLE done (name VARCHAR(20))").await;
        let pool = db.pool_of(10).await;
        let leases = Leases::new(pool.clone());
        let kinds = [Lease, LeaseTx, Row, Named, Session, Version];
        let mut table = String::new();
        for (upper, lower) in kinds.into_iter().flat_map(|upper| kinds.map(|lower| (upper, lower))) {
            db.execute("DELETE FROM done").await;
            let (reached, here) = oneshot::channel();
            let bench = Bench {
                db: &db,
                pool: &pool,
                leases: &leases,
                upper,
                lower,
                started: Instant::now(),
                reached: Mutex::new(Some(reached)),
                upper_taken: Mutex::default(),
                lower_taken: Mutex::default(),
            };
            let others = async {
                here.await.unwrap();
                tokio::join!(bench.after(upper, "upper"), bench.after(lower, "lower"))
            };
            let (ran, (upper_free, lower_free)) = tokio::join!(run(&bench), others);
            let what = format!("{upper:?} above {lower:?}");
            ran.unwrap_or_else(|err| panic!("{what}: {err:?}"));

            let has_tx = |kind| matches!(kind, LeaseTx | Row | Named | Version);
            for (which, kind) in [("upper", upper), ("lower", lower)] {
                let is_done = |done: &[String]| done.iter().any(|it| it == which);
                assert!(!has_tx(kind) || upper == Version || is_done(&upper_free.1), "{what}: committed before the \
                                                                                      upper is free");
                if which == "lower" {
                    assert!(!has_tx(kind) || lower == Version || is_done(&lower_free.1), "{what}: committed before it \
                                                                                          is free");
                }
            }
            let at = |taken: &Mutex<Option<Duration>>| taken.lock().unwrap().unwrap().as_millis();
            let free = |kind, (at, done): &(Duration, Vec<String>)| match kind {
                Version => "never held".to_owned(),
                _ => format!("{} ms, committed: {}", at.as_millis(), done.join(" and ")),
            };
            writeln!(
                table,
                "| {what} | {} ms | {} ms | {} | {} |",
                at(&bench.upper_taken),
                at(&bench.lower_taken),
                free(lower, &lower_free),
                free(upper, &upper_free),
            )
            .unwrap();
        }
        println!("{}\n| | upper taken by | lower taken by | lower free again | upper free again \
                  |\n|---|---|---|---|---|\n{table}", S::NAME);
        db.assert_nothing_left().await;
    }
}
