//! One worker process: does every kind of work at once, says what happens to it, and obeys orders.

mod leases;
mod op;
mod plain;

use std::io::Write;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use lockkit::Leases;
use sqlx::{Database, Pool, pool::PoolOptions};
use support::{Galera, MariaDb, MySql, Postgres, Sqlite};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::clock;
use crate::event::{Answer, Kind, Order, Said, What};
use crate::rig::{Rig, STOCK};
use crate::worker::op::{Failure, Op};

/// The caller's own limit for one statement of its work.
const STATEMENT: Duration = Duration::from_secs(2);
/// The caller's own limit for one operation, as a web server has one for a request.
const OPERATION: Duration = Duration::from_secs(5);
/// After how many microseconds an operation is dropped, at most. An operation takes a few milliseconds.
const LONGEST_DROPPED: u64 = 12_000;

#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerArgs {
    #[arg(long)]
    pub(crate) server: String,
    #[arg(long)]
    pub(crate) url: String,
    #[arg(long)]
    pub(crate) id: u32,
    #[arg(long)]
    pub(crate) ttl_ms: u64,
    /// Connections of the service's pool.
    #[arg(long)]
    pub(crate) pool: u32,
    /// Connections of the leases' own; 0 shares the service's pool.
    #[arg(long)]
    pub(crate) own: u32,
    /// The kinds of work, as JSON.
    #[arg(long)]
    pub(crate) kinds: String,
    /// Drop every other operation at some moment.
    #[arg(long)]
    pub(crate) drops: bool,
}

pub(crate) async fn run(args: WorkerArgs) -> Result<()> {
    match args.server.as_str() {
        Postgres::CODE => work::<Postgres>(args).await,
        MariaDb::CODE => work::<MariaDb>(args).await,
        MySql::CODE => work::<MySql>(args).await,
        Sqlite::CODE => work::<Sqlite>(args).await,
        Galera::CODE => work::<Galera>(args).await,
        other => bail!("{other} is not a server"),
    }
}

/// What the tasks of a worker share.
struct Worker<S: Rig> {
    id: u32,
    ttl: Duration,
    pool: Pool<S::DB>,
    sessions: Pool<S::DB>,
    leases: Leases<Pool<S::DB>>,
    aborts_in_commit: AtomicBool,
    drops: bool,
    finish: watch::Receiver<bool>,
}

async fn work<S: Rig>(args: WorkerArgs) -> Result<()> {
    let kinds: Vec<Kind> = serde_json::from_str(&args.kinds)?;
    let pool = |connections| -> PoolOptions<S::DB> {
        PoolOptions::new().max_connections(connections).acquire_timeout(Duration::from_secs(1))
    };
    let options = args.url.parse::<<<S::DB as Database>::Connection as sqlx::Connection>::Options>()?;
    let service = pool(args.pool).connect_lazy_with(options.clone());
    if args.id.is_multiple_of(2) {
        lockkit::dialect::reuse_connections(&service);
    }
    let ttl = Duration::from_millis(args.ttl_ms);
    let settings = Leases::builder(service.clone()).ttl(ttl).wait(ttl * 2).holder(format!("worker {}", args.id));
    let settings = if args.own == 0 { settings } else { settings.own_connections(args.own) };
    let (finishing, finish) = watch::channel(false);
    let worker = Arc::new(Worker::<S> {
        id: args.id,
        ttl,
        pool: service,
        sessions: pool(2).connect_lazy_with(options),
        leases: settings.build()?,
        aborts_in_commit: AtomicBool::new(false),
        drops: args.drops,
        finish,
    });

    say(&Said::Ready);
    let mut orders = BufReader::new(stdin()).lines();
    let mut tasks = JoinSet::new();
    loop {
        // The conductor is gone.
        let Some(line) = orders.next_line().await? else { process::exit(1) };
        match serde_json::from_str(&line)? {
            Order::Go => {
                for kind in &kinds {
                    tasks.spawn(Arc::clone(&worker).repeat(*kind));
                }
            }
            Order::AbortInCommit => worker.aborts_in_commit.store(true, Ordering::SeqCst),
            Order::Finish => break,
        }
    }
    finishing.send_replace(true);
    while tasks.join_next().await.is_some() {}
    say(&Said::Finished);
    // Gives the releases in the background a moment, as a service does on SIGTERM.
    sleep(Duration::from_millis(50)).await;
    Ok(())
}

impl<S: Rig> Worker<S> {
    /// Does one kind of work until told to finish.
    async fn repeat(self: Arc<Self>, kind: Kind) {
        let mut finish = self.finish.clone();
        let mut number = 0;
        while !*finish.borrow() {
            number += 1;
            let key = if kind == Kind::Own { self.id } else { fastrand::u32(0..kind.keys()) };
            let op = Op::new(self.id, kind, key, number);
            op.say(What::Asked);
            let mut attempt = Box::pin(self.attempt(&op));
            let result = tokio::select! {
                result = &mut attempt => result,
                () = finished(&mut finish, &op) => Err(Failure::of_the_caller("it was told to finish")),
                () = dropped(self.drops) => Err(Failure::of_the_caller("it was dropped")),
                () = sleep(OPERATION) => Err(Failure::of_the_caller("its own limit was reached")),
            };
            // The belief ends before what it is about is dropped.
            op.end();
            drop(attempt);
            op.conclude(result);
            sleep(Duration::from_millis(fastrand::u64(1..10))).await;
        }
    }

    async fn attempt(&self, op: &Op) -> Result<(), Failure> {
        match op.kind {
            Kind::Lease | Kind::Own => self.commit_under_a_lease(op).await,
            Kind::Fenced => self.write_fenced(op).await,
            Kind::Several => self.move_a_cent(op).await,
            Kind::PlainCommit => self.commit_beside_a_lease(op).await,
            Kind::Named => self.under_a_name(op).await,
            Kind::Row => self.under_a_row_lock(op).await,
            Kind::Version => self.by_version(op).await,
            Kind::Stock => self.take_from_stock(op).await,
            Kind::Session => self.under_a_session_lock(op).await,
            Kind::NoLock => self.without_a_lock(op).await,
        }
    }

    /// Sends a commit, or dies during it if so ordered.
    async fn committing<E: Into<Failure>>(
        &self,
        op: &Op,
        commit: impl Future<Output = Result<(), E>>,
    ) -> Result<(), Failure> {
        op.sent();
        if self.aborts_in_commit.swap(false, Ordering::SeqCst) {
            let _ = timeout(Duration::from_micros(fastrand::u64(0..3_000)), commit).await;
            // The server may give what it held to somebody else before the conductor sees that it is dead.
            say(&Said::Aborts { at: clock::now() });
            process::abort();
        }
        commit.await.map_err(Into::into)
    }

    /// Reads the value of an account on a connection of the pool, outside of any transaction.
    async fn read(&self, account: i64) -> Result<i64, Failure> {
        let mut conn = self.pool.acquire().await.map_err(|err| Failure::sql("read", &err))?;
        if let Ok(value) = timeout(STATEMENT, op::value::<S>(&mut conn, account)).await {
            return value;
        }
        drop(conn.detach());
        Err(Failure::of_the_caller("a read was not answered in time"))
    }
}

/// Resolves for every other operation, at some moment, if operations are to be dropped.
async fn dropped(drops: bool) {
    if !drops || fastrand::bool() {
        return std::future::pending().await;
    }
    sleep(Duration::from_micros(fastrand::u64(0..LONGEST_DROPPED))).await;
}

/// Resolves when the operation is to be dropped: at the end, unless its commit is on its way.
async fn finished(finish: &mut watch::Receiver<bool>, op: &Op) {
    // An error says that the process ends.
    let _ = finish.wait_for(|finish| *finish).await;
    while op.is_committing() {
        sleep(Duration::from_millis(10)).await;
    }
}

/// Writes a line, or ends the process: nobody listens any more.
fn say(said: &Said) {
    let mut line = serde_json::to_string(said).unwrap_or_default();
    line.push('\n');
    if std::io::stdout().lock().write_all(line.as_bytes()).is_err() {
        process::exit(1);
    }
}

/// What the caller of a commit was told by an error of `lockkit`.
fn answer(err: &lockkit::Error) -> Answer {
    match err {
        lockkit::Error::OutcomeUnknown { .. } => Answer::Unknown,
        _ => Answer::Refused,
    }
}

/// The stock that all workers take from.
fn stock<S: Rig>(pool: &Pool<S::DB>) -> lockkit::Stock<S::DB> {
    lockkit::Stock::new(pool.clone(), Kind::Stock.key(0)).segments(4)
}

/// Fills the stock at the start of a lane.
pub(crate) async fn fill_stock<S: Rig>(pool: &Pool<S::DB>) -> lockkit::Result<()> {
    stock::<S>(pool).put(STOCK).await
}

/// What is left in the stock.
pub(crate) async fn left_in_stock<S: Rig>(pool: &Pool<S::DB>) -> lockkit::Result<u64> {
    stock::<S>(pool).left().await
}
