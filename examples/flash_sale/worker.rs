//! One process of the sale, and how the first process talks to it: lines of JSON over its standard input and output.

use std::{
    collections::BTreeMap,
    io::{Write, stdin, stdout},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
#[cfg(feature = "stores")]
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use sqlx::{Encode, Type};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    task::JoinSet,
    time::interval,
};

use crate::{
    draws::Plan,
    sale::{Outcome, Sale, Strategy},
    shop::Shop,
};

/// What a worker is told first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) url: String,
    /// Another system that keeps leases.
    pub(crate) store: Option<String>,
    pub(crate) strategy: Strategy,
    pub(crate) process: u32,
    pub(crate) plan: Plan,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    /// It is connected and waits for the start.
    Ready,
    /// So many draws are done.
    Done(u64),
    /// All draws are done.
    Finished(Report),
}

/// What a worker counted.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Pieces won, by item.
    pub(crate) won: BTreeMap<i64, u64>,
    /// Draws that found the item too busy, by item.
    pub(crate) gave_up: BTreeMap<i64, u64>,
    /// Attempts beyond the first of each draw.
    pub(crate) retries: u64,
    /// How long each draw took, in microseconds.
    pub(crate) latencies: Vec<u64>,
    /// From the start to the last draw.
    pub(crate) elapsed: Duration,
}

impl Report {
    pub(crate) fn add(&mut self, other: Self) {
        let Self { won, gave_up, retries, latencies, elapsed } = other;
        for (item_id, pieces) in won {
            *self.won.entry(item_id).or_default() += pieces;
        }
        for (item_id, draws) in gave_up {
            *self.gave_up.entry(item_id).or_default() += draws;
        }
        self.retries += retries;
        self.latencies.extend(latencies);
        self.elapsed = self.elapsed.max(elapsed);
    }
}

/// What all processes together ask of a server.
const MOST_CONNECTIONS: u32 = 64;

/// Reads a worker's job from the standard input.
pub(crate) fn read_job() -> Result<Job> {
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    serde_json::from_str(&line).context("a worker process is started by the first process only")
}

/// Does a worker's job.
pub(crate) async fn work<DB: Shop>(job: Job) -> Result<()>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    let Job { url, store, strategy, process, plan } = job;
    let pool =
        DB::open(&url, (MOST_CONNECTIONS / plan.processes).clamp(1, plan.tasks)).await.context("cannot connect")?;
    let sale = Sale::new(pool);
    #[cfg(feature = "stores")]
    let sale = match store.filter(|_| strategy.needs_store()) {
        Some(store) => sale.with_store(&store).await.context("cannot connect to the store")?,
        None => sale,
    };
    #[cfg(not(feature = "stores"))]
    anyhow::ensure!(store.is_none(), "built without a store");
    let sale = Arc::new(sale);
    let (plan, done) = (Arc::new(plan), Arc::new(AtomicU64::new(0)));
    say(&Said::Ready)?;
    stdin().read_line(&mut String::new())?;

    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..plan.tasks {
        let (sale, plan, done) = (sale.clone(), plan.clone(), done.clone());
        tasks.spawn(async move {
            let mut report = Report::default();
            for draw in plan.draws_of(process, task) {
                let began = Instant::now();
                match sale.draw(strategy, draw).await {
                    Ok(Outcome::Won) => *report.won.entry(draw.item_id).or_default() += 1,
                    Ok(Outcome::SoldOut | Outcome::WonBefore) => {}
                    Err(err) if err.gave_up() => *report.gave_up.entry(draw.item_id).or_default() += 1,
                    Err(err) => bail!(err),
                }
                report.latencies.push(u64::try_from(began.elapsed().as_micros())?);
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, anyhow::Error>(report)
        });
    }

    let mut total = Report::default();
    let mut tick = interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            _ = tick.tick() => say(&Said::Done(done.load(Ordering::Relaxed)))?,
            report = tasks.join_next() => match report {
                Some(report) => total.add(report??),
                None => break,
            },
        }
    }
    total.elapsed = started.elapsed();
    total.retries = sale.retries();
    say(&Said::Finished(total))
}

fn say(said: &Said) -> Result<()> {
    let mut out = stdout().lock();
    serde_json::to_writer(&mut out, said)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Runs one strategy in as many processes as the plan says. Calls `progress` with the number of draws done.
pub(crate) async fn run_processes(
    job: impl Fn(u32) -> Job,
    plan: &Plan,
    stops: Option<Duration>,
    progress: impl Fn(u64) + Send + Sync + 'static,
) -> Result<Report> {
    let mut workers = Vec::new();
    for process in 0..plan.processes {
        workers.push(Worker::start(&job(process)).await?);
    }
    for worker in &mut workers {
        match worker.hear().await? {
            Said::Ready => {}
            other => bail!("a worker said {other:?} before it started"),
        }
    }

    let progress =
        Arc::new(Progress { by_process: (0..plan.processes).map(|_| AtomicU64::new(0)).collect(), progress });
    #[cfg(feature = "stores")]
    let _stopping = stops.map(|stop| Stopping::begin(workers.iter().filter_map(|it| it.child.id()).collect(), stop));
    #[cfg(not(feature = "stores"))]
    anyhow::ensure!(stops.is_none(), "built without a store");
    let mut finishing = JoinSet::new();
    for (process, mut worker) in workers.into_iter().enumerate() {
        worker.tell("go").await?;
        let progress = progress.clone();
        finishing.spawn(async move {
            loop {
                match worker.hear().await? {
                    Said::Ready => {}
                    Said::Done(draws) => progress.done(process, draws),
                    Said::Finished(report) => return Ok::<_, anyhow::Error>(report),
                }
            }
        });
    }
    let mut total = Report::default();
    while let Some(report) = finishing.join_next().await {
        total.add(report??);
    }
    Ok(total)
}

struct Progress<F> {
    by_process: Vec<AtomicU64>,
    progress: F,
}

impl<F: Fn(u64)> Progress<F> {
    fn done(&self, process: usize, draws: u64) {
        self.by_process[process].store(draws, Ordering::Relaxed);
        (self.progress)(self.by_process.iter().map(|it| it.load(Ordering::Relaxed)).sum());
    }
}

/// Stops one process after the other with SIGSTOP, until this is dropped.
#[cfg(feature = "stores")]
struct Stopping(tokio::task::JoinHandle<()>, Vec<u32>);

#[cfg(feature = "stores")]
impl Stopping {
    fn begin(processes: Vec<u32>, stop: Duration) -> Self {
        let stopped = processes.clone();
        let stopping = tokio::spawn(async move {
            for process in processes.into_iter().cycle() {
                tokio::time::sleep(Duration::from_millis(200)).await;
                signal(process, Signal::STOP);
                tokio::time::sleep(stop).await;
                signal(process, Signal::CONT);
            }
        });
        Self(stopping, stopped)
    }
}

#[cfg(feature = "stores")]
impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.abort();
        self.1.iter().for_each(|process| signal(*process, Signal::CONT));
    }
}

/// Sends a signal to a process, unless it has ended.
#[cfg(feature = "stores")]
fn signal(process: u32, signal: Signal) {
    if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(process, signal);
    }
}

/// A worker process, as the first process sees it. It dies with this handle.
struct Worker {
    #[cfg_attr(not(feature = "stores"), expect(dead_code, reason = "it dies when this is dropped"))]
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    async fn start(job: &Job) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker process")?;
        let input = child.stdin.take().context("a worker has no standard input")?;
        let output = child.stdout.take().context("a worker has no standard output")?;
        let mut worker = Self { child, input, output: BufReader::new(output).lines() };
        worker.tell(&serde_json::to_string(job)?).await?;
        Ok(worker)
    }

    async fn tell(&mut self, line: &str) -> Result<()> {
        self.input.write_all(format!("{line}\n").as_bytes()).await.context("a worker process has ended")
    }

    async fn hear(&mut self) -> Result<Said> {
        let line = self.output.next_line().await?.context("a worker process failed; see what it wrote above")?;
        serde_json::from_str(&line).with_context(|| format!("a worker said {line:?}"))
    }
}
