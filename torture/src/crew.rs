//! The worker processes of a lane: started, told what to do, stopped, killed; and all that they said.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::env;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::broadcast;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::clock;
use crate::event::{Event, Kind, Order, Said, What};
use crate::history::Panic;

/// How long the workers may take to end after they were told to.
const END: Duration = Duration::from_secs(8);

/// How the workers of a lane are made.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) server: &'static str,
    /// Each worker has one of these.
    pub(crate) urls: Vec<String>,
    pub(crate) ttl: Duration,
    pub(crate) pool: u32,
    pub(crate) own: u32,
    pub(crate) kinds: Vec<Kind>,
    /// Whether the workers drop operations at any moment.
    pub(crate) drops: bool,
}

pub(crate) struct Crew {
    recipe: Recipe,
    log: Rc<Log>,
    workers: BTreeMap<u32, Worker>,
    /// When each worker began, and when it was killed.
    pub(crate) lives: BTreeMap<u32, Life>,
    next: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Life {
    pub(crate) began: u64,
    /// When the conductor killed it, or it aborted on command.
    pub(crate) killed: Option<u64>,
    /// It did not end by itself when it was told to.
    pub(crate) hung: bool,
}

struct Worker {
    child: Child,
    orders: ChildStdin,
    /// When it said that it ends.
    ends: Rc<Cell<Option<u64>>>,
}

/// All that was said, and who holds what.
struct Log {
    events: RefCell<Vec<Event>>,
    panics: RefCell<Vec<Panic>>,
    news: broadcast::Sender<Event>,
}

impl Crew {
    pub(crate) fn new(recipe: Recipe) -> Self {
        let log = Log { events: RefCell::default(), panics: RefCell::default(), news: broadcast::Sender::new(4_096) };
        Self { recipe, log: Rc::new(log), workers: BTreeMap::new(), lives: BTreeMap::new(), next: 1 }
    }

    /// Starts a worker and lets it go to work.
    pub(crate) async fn add(&mut self) -> Result<u32> {
        let id = self.next;
        self.next += 1;
        let Recipe { server, urls, ttl, pool, own, kinds, drops } = &self.recipe;
        let url = &urls[id as usize % urls.len()];
        // It dies with the conductor, also while it is stopped.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(env::current_exe()?)
            .args(["worker", "--server", server, "--url", url, "--id", &id.to_string()])
            .args(["--ttl-ms", &ttl.as_millis().to_string()])
            .args(["--pool", &pool.to_string(), "--own", &own.to_string()])
            .args(["--kinds", &serde_json::to_string(kinds)?])
            .args(drops.then_some("--drops"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let orders = child.stdin.take().context("a worker has an input")?;
        let mut said = BufReader::new(child.stdout.take().context("a worker has an output")?);
        let errors = BufReader::new(child.stderr.take().context("a worker has an output for errors")?);
        spawn_local(note_panics(errors, Rc::clone(&self.log), id));
        let mut ready = String::new();
        said.read_line(&mut ready).await?;
        let Said::Ready = serde_json::from_str(&ready).context("a worker did not start")? else {
            anyhow::bail!("a worker began with {ready}");
        };
        let ends = Rc::new(Cell::new(None));
        spawn_local(listen(said, Rc::clone(&self.log), Rc::clone(&ends)));
        let mut worker = Worker { child, orders, ends };
        worker.tell(Order::Go).await?;
        self.workers.insert(id, worker);
        self.lives.insert(id, Life { began: clock::now(), ..Life::default() });
        Ok(id)
    }

    /// A worker that was just granted a lock of this kind, or any one if there is none for a while.
    pub(crate) async fn next_holder(&self, kind: Kind) -> Option<u32> {
        let mut news = self.log.news.subscribe();
        let granted = async {
            loop {
                match news.recv().await {
                    Ok(event) if event.kind == kind && matches!(event.what, What::Granted { .. }) => {
                        return Some(event.worker);
                    }
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return None,
                }
            }
        };
        let holder = timeout(Duration::from_secs(2), granted).await.ok().flatten();
        holder.filter(|id| self.workers.contains_key(id)).or_else(|| self.any())
    }

    pub(crate) fn any(&self) -> Option<u32> {
        fastrand::choice(self.workers.keys().copied())
    }

    pub(crate) async fn kill(&mut self, id: u32) -> Result<()> {
        let Some(mut worker) = self.workers.remove(&id) else { return Ok(()) };
        self.lives.entry(id).or_default().killed = Some(clock::now());
        worker.child.kill().await?;
        Ok(())
    }

    /// Stops a worker for some time.
    pub(crate) async fn stop_for(&self, id: u32, time: Duration) -> Result<()> {
        let Some(pid) = self.pid(id) else { return Ok(()) };
        kill_process(pid, Signal::STOP)?;
        sleep(time).await;
        kill_process(pid, Signal::CONT)?;
        Ok(())
    }

    /// Lets a worker abort during its next commit under a lease; whether it did within the time.
    pub(crate) async fn abort_in_commit(&mut self, id: u32, within: Duration) -> Result<bool> {
        let Some(worker) = self.workers.get_mut(&id) else { return Ok(false) };
        // One that was ordered to before may have aborted since.
        let _ = worker.tell(Order::AbortInCommit).await;
        if timeout(within, worker.child.wait()).await.is_err() {
            return Ok(false);
        }
        let aborted = worker.last_words().await.unwrap_or_else(clock::now);
        self.workers.remove(&id);
        self.lives.entry(id).or_default().killed = Some(aborted);
        Ok(true)
    }

    /// Tells all workers to release what they have and to end, and kills those that do not.
    pub(crate) async fn finish(&mut self) {
        for worker in self.workers.values_mut() {
            // One that has died is seen below.
            let _ = worker.tell(Order::Finish).await;
        }
        let deadline = Instant::now() + END;
        for (id, mut worker) in std::mem::take(&mut self.workers) {
            let ended = tokio::time::timeout_at(deadline, worker.child.wait()).await;
            let life = self.lives.entry(id).or_default();
            if ended.is_err() {
                life.hung = true;
                life.killed = Some(clock::now());
                let _ = worker.child.kill().await;
            } else {
                life.hung = worker.last_words().await.is_none();
            }
        }
    }

    /// All that was said so far, in the order of the common clock.
    pub(crate) fn events(&self) -> Vec<Event> {
        let mut events = self.log.events.borrow().clone();
        events.sort_by_key(|it| it.at);
        events
    }

    /// The panics of all workers so far.
    pub(crate) fn panics(&self) -> Vec<Panic> {
        self.log.panics.borrow().clone()
    }

    fn pid(&self, id: u32) -> Option<Pid> {
        let id = self.workers.get(&id)?.child.id()?;
        Pid::from_raw(i32::try_from(id).ok()?)
    }
}

impl Worker {
    /// When the process, which has ended, said that it would. What it said last may still be on its way.
    async fn last_words(&self) -> Option<u64> {
        for _ in 0..200 {
            if self.ends.get().is_some() {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
        self.ends.get()
    }

    async fn tell(&mut self, order: Order) -> Result<()> {
        let mut line = serde_json::to_string(&order)?;
        line.push('\n');
        Ok(self.orders.write_all(line.as_bytes()).await?)
    }
}

/// Reads what a worker writes to stderr. A panic is two lines: where, and what.
async fn note_panics(errors: BufReader<ChildStderr>, log: Rc<Log>, worker: u32) {
    let mut lines = errors.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if !line.contains("panicked at") {
            continue;
        }
        let at = clock::now();
        let message = lines.next_line().await.ok().flatten().unwrap_or_default();
        log.panics.borrow_mut().push(Panic { worker, at, text: format!("{line} {message}") });
    }
}

async fn listen(said: BufReader<ChildStdout>, log: Rc<Log>, ends: Rc<Cell<Option<u64>>>) {
    let mut lines = said.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(Said::Happened(event)) => {
                log.events.borrow_mut().push(event.clone());
                // Nobody may be listening.
                let _ = log.news.send(event);
            }
            Ok(Said::Aborts { at }) => ends.set(Some(at)),
            Ok(Said::Finished) => ends.set(Some(clock::now())),
            // The last line of one that was killed may be cut.
            Ok(Said::Ready) | Err(_) => {}
        }
    }
}
