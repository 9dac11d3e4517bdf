//! What a task of a process does with stocks and with rows that have versions.

use std::{
    future::Future,
    marker::PhantomData,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use lockkit::{Error, Result, RetryPolicy, Stock, Versioned, VersionedRow, begin, testing::simulation};
use sqlx_core::{from_row::FromRow, pool::Pool};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    driver::{Found, Simulated},
    trade::{self, Deal, Taker, Update},
    world::{Shared, World},
};

/// A row that counts. The realm keeps the rows of two processes apart, and those of two runs: the turns of all of them
/// are in one process of the operating system. The server pays no heed to it.
#[derive(Debug, Versioned)]
#[versioned(table = "counters", key("realm", "row"))]
struct Counter {
    realm: i64,
    row: i64,
    value: i64,
    version: i64,
}

/// Works with the pool of a process.
#[derive(Debug, Clone)]
pub(crate) struct Clerk {
    world: Shared,
    process: usize,
    pool: Pool<Simulated>,
    segments: u32,
    realm: i64,
    /// Whether the world is at rest, so that nothing may fail.
    is_at_rest: bool,
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A realm that no other process has.
fn realm() -> i64 {
    static LAST: AtomicI64 = AtomicI64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

impl FromRow<'_, Found> for Counter {
    fn from_row(Found { realm, row, value, version }: &Found) -> sqlx_core::Result<Self> {
        Ok(Self { realm: *realm, row: *row, value: *value, version: *version })
    }
}

impl Clerk {
    pub(crate) fn new(world: &Shared, process: usize, pool: Pool<Simulated>, segments: u32) -> Self {
        Self { world: world.clone(), process, pool, segments, realm: realm(), is_at_rest: false }
    }

    fn stock(&self, stock: u32) -> Stock<Simulated> {
        Stock::new(self.pool.clone(), trade::name(stock)).segments(self.segments)
    }

    fn log(&self, what: impl FnOnce() -> String) {
        self.world.lock().log_of(self.process, what);
    }

    /// An error, which may not be in a calm run, nor in a world at rest.
    fn fails(&self, what: &str, err: &Error) {
        let mut world = self.world.lock();
        if world.judge.is_calm || self.is_at_rest {
            let process = self.process;
            world.violation(format!("p{process} {what}, and nothing was in its way: {err}"));
        }
    }

    pub(crate) async fn does(&self, deal: Deal) {
        match deal {
            Deal::Put { stock, amount, segments } => self.puts(stock, amount, segments).await,
            Deal::Takes { stock, takers } => {
                let mut calls = JoinSet::new();
                for taker in takers {
                    let clerk = self.clone();
                    calls.spawn(async move { clerk.takes(stock, taker).await });
                }
                calls.join_all().await;
            }
            Deal::Order { stock, amounts, pause, commits, dropped } => {
                dropped_after(dropped, self.orders(stock, amounts, pause, commits)).await;
            }
            Deal::Rebalance { stock, segments } => {
                if let Err(err) = self.stock(stock).segments(segments).rebalance().await {
                    self.fails("could not rebalance", &err);
                }
            }
            Deal::Update(update) => Box::pin(self.updates(update)).await,
        }
    }

    async fn puts(&self, stock: u32, amount: u64, segments: u32) {
        let stock = self.stock(stock).segments(segments);
        let pending = Pending::new(&self.world, |world, put| world.has_put(stock.key(), amount, put));
        let put = stock.put(amount).await;
        self.log(|| format!("puts {amount} into `{}`: {put:?}", stock.key()));
        pending.is(&put);
        if let Err(err) = put {
            self.fails("could not put", &err);
        }
    }

    async fn takes(&self, stock: u32, Taker { pause, amount, wait, dropped }: Taker) {
        sleep(ms(pause)).await;
        let stock = self.stock(stock).wait(ms(wait));
        let (number, began) = (self.world.lock().takes(stock.key()), Instant::now());
        let pending = Pending::new(&self.world, |world, taken| world.has_taken(number, amount, taken));
        let Some(taken) = dropped_after(dropped, stock.take(amount)).await else {
            self.log(|| format!("drops its take of {amount} from `{}`", stock.key()));
            return;
        };
        self.log(|| format!("takes {amount} from `{}`: {taken:?}", stock.key()));
        pending.is(&taken);
        match taken {
            Err(err @ Error::Contended { .. }) if wait >= 10_000 => self.fails("waited in vain", &err),
            Ok(_) | Err(Error::SoldOut { .. } | Error::Contended { .. }) => {}
            Err(err) => self.fails("could not take", &err),
        }
        let took = began.elapsed();
        // It waits for the only connection before it waits for the row.
        let pool = self.pool.options();
        let first = if pool.get_max_connections() == 1 { pool.get_acquire_timeout() } else { Duration::ZERO };
        let mut world = self.world.lock();
        if world.judge.is_calm && took > first + ms(wait) + ms(1500) {
            let process = self.process;
            world.violation(format!("p{process} had a take last {took:?} that was to wait for {wait} ms"));
        }
    }

    async fn orders(&self, stock: u32, amounts: Vec<u64>, pause: u64, commits: bool) {
        let stock = self.stock(stock);
        let mut all = Vec::new();
        let ordering = async {
            let mut tx = begin(&self.pool).await?;
            for amount in amounts {
                match stock.take_in(&mut tx, amount).await {
                    Ok(taken) => all.push(taken),
                    Err(Error::SoldOut { .. }) => {}
                    Err(err) => {
                        tx.rollback().await?;
                        return Err(err);
                    }
                }
            }
            sleep(ms(pause)).await;
            Ok::<_, Error>(tx)
        };
        // A statement of a transaction may wait as long as the connection lives.
        let tx = match timeout(ms(15_000), ordering).await {
            Ok(Ok(tx)) => tx,
            Ok(Err(err)) => {
                self.log(|| format!("could not order: {err}"));
                if !err.is_transient() {
                    self.fails("could not order", &err);
                }
                return;
            }
            Err(_) => return self.log(|| "gives its order up".to_owned()),
        };
        if !commits {
            return drop(tx);
        }
        let pending = Pending::new(&self.world, |world, committed| world.ordered(stock.key(), &all, committed));
        if let Ok(committed) = timeout(ms(15_000), tx.commit()).await {
            self.log(|| format!("orders {all:?} of `{}`: {committed:?}", stock.key()));
            pending.is(&committed);
            if let Err(err) = committed {
                self.fails("could not commit an order", &err);
            }
        }
    }

    async fn updates(&self, update: Update) {
        let (number, began) = (self.world.lock().updates(self.process, &update.rows), Instant::now());
        let pending = Pending::new(&self.world, |world, updated| world.has_updated(number, &update, updated));
        let (mut count, unanswered) = (0, Mutex::new(None));
        let policy = RetryPolicy::new().attempts(update.attempts).deadline(ms(update.deadline));
        let updating = policy.retry(|attempt| {
            count += 1;
            self.world.lock().attempts(self.process, number, &update, attempt, count);
            self.log(|| format!("tries to update {:?}, attempt {attempt}", update.rows));
            let ends = Ends(|| self.world.lock().attempted(self.process, number, &update));
            let attempt = self.tries(&update, &unanswered);
            async {
                let _ends = ends;
                attempt.await
            }
        });
        let Some(mut updated) = dropped_after(update.dropped, updating).await else {
            return self.log(|| format!("drops its update of {:?}", update.rows));
        };
        self.log(|| format!("updates {:?}: {updated:?}", update.rows));
        self.world.lock().retried(self.process, &update, &updated, began.elapsed());
        // The struct has the version from before the commit: it can only be saved if that was not executed.
        let counter = unanswered.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let (Err(Error::OutcomeUnknown { .. }), Some(mut counter)) = (&updated, counter) {
            let saved: Option<Result<()>> = dropped_after(Some(2000), counter.save(&self.pool)).await;
            self.log(|| format!("saves {counter:?} again: {saved:?}"));
            if let Some(Ok(())) = saved {
                updated = Ok(());
            }
        }
        pending.is(&updated);
        if let (Err(err), true) = (updated, self.is_at_rest) {
            self.fails("could not update a row", &err);
        }
    }

    /// An attempt. Keeps the struct if the commit was not answered.
    async fn tries(&self, update: &Update, unanswered: &Mutex<Option<Counter>>) -> Result<()> {
        let [row, others @ ..] = &*update.rows else { return Ok(()) };
        if !update.in_tx {
            let mut counter = Counter::load(&self.pool, self.realm, *row).await?;
            sleep(ms(update.pause)).await;
            counter.value += 1;
            return counter.save(&self.pool).await;
        }
        let mut tx = begin(&self.pool).await?;
        let mut counter = Counter::load(&mut tx, self.realm, *row).await?;
        let mut other = match others.first() {
            Some(row) => Some(Counter::load(&mut tx, self.realm, *row).await?),
            None => None,
        };
        sleep(ms(update.pause)).await;
        counter.value += 1;
        let mut saved = counter.save(&mut tx).await?;
        if let Some(other) = &mut other {
            other.value += 1;
            saved = saved.and(other.save(&mut tx).await?);
        }
        let committed = saved.commit(tx).await;
        if let (Err(Error::OutcomeUnknown { .. }), None) = (&committed, other) {
            *unanswered.lock().unwrap_or_else(PoisonError::into_inner) = Some(counter);
        }
        committed
    }

    /// What is left of the work of the process: rows that tasks take turns to write, and connections in use.
    pub(crate) fn left(&self) -> Vec<String> {
        let counter = |row| VersionedRow::<Simulated>::table("counters").by("realm", self.realm).by("row", row);
        let turns = trade::rows().filter(|it| simulation::has_turns(&counter(*it)));
        let mut left: Vec<_> = turns.map(|it| format!("turns to write row {it}")).collect();
        let used = self.pool.size() as usize - self.pool.num_idle();
        if used > 0 {
            left.push(format!("{used} connections in use"));
        }
        left
    }

    /// Uses each stock and each row once, in a world at rest.
    pub(crate) async fn probes(mut self) {
        self.is_at_rest = true;
        for number in trade::stocks() {
            self.puts(number, 2, self.segments).await;
            self.takes(number, Taker { pause: 0, amount: 2, wait: 10_000, dropped: None }).await;
        }
        for row in trade::rows() {
            let (attempts, deadline) = (1, 1000);
            self.updates(Update { rows: vec![row], in_tx: row % 2 == 0, attempts, deadline, pause: 0, dropped: None })
                .await;
        }
    }
}

/// Drops the future after this long, in milliseconds.
async fn dropped_after<T>(after: Option<u64>, future: impl Future<Output = T>) -> Option<T> {
    match after {
        Some(after) => timeout(ms(after), future).await.ok(),
        None => Some(future.await),
    }
}

/// A call that has not returned yet. Dropped, it never will.
struct Pending<T, F: FnMut(&mut World, Option<&Result<T>>)> {
    world: Shared,
    tell: F,
    is_over: bool,
    result: PhantomData<fn(T)>,
}

impl<T, F: FnMut(&mut World, Option<&Result<T>>)> Pending<T, F> {
    fn new(world: &Shared, tell: F) -> Self {
        Self { world: world.clone(), tell, is_over: false, result: PhantomData }
    }

    fn is(mut self, result: &Result<T>) {
        self.is_over = true;
        (self.tell)(&mut self.world.lock(), Some(result));
    }
}

impl<T, F: FnMut(&mut World, Option<&Result<T>>)> Drop for Pending<T, F> {
    fn drop(&mut self) {
        if !self.is_over {
            (self.tell)(&mut self.world.lock(), None);
        }
    }
}

/// Does this when it is dropped.
struct Ends<F: Fn()>(F);

impl<F: Fn()> Drop for Ends<F> {
    fn drop(&mut self) {
        self.0();
    }
}
