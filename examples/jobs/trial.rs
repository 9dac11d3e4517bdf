//! The trial of a job example: three processes on one database, of which some are killed and stopped at random.
//!
//! ```text
//! cargo run --example cron_apalis                                                 # on a temporary SQLite file
//! cargo run --example cron_apalis -- --url postgres://user:password@localhost/jobs
//! ```
//!
//! The example creates its tables, named `t_…`, in an empty database.

use std::{
    env,
    future::Future,
    io::{self, Read},
    os::unix::process::ExitStatusExt,
    process::{self, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use lockkit::dialect::{IdempotentOps, LeaseOps, RowOps};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Pool, Postgres, Row, Sqlite};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_mins(2);

const PROCESSES: usize = 3;

/// What one example does on a database.
pub(crate) trait Example<DB: Db> {
    /// The statements that create its tables.
    const TABLES: &[&str];

    /// What each process does, until it is terminated.
    fn work(pool: Pool<DB>) -> impl Future<Output = Result<()>>;

    /// Disturbs the processes, and checks in the end what they have done.
    fn watch(pool: Pool<DB>, processes: &mut Processes) -> impl Future<Output = Result<()>>;
}

/// A database with numbers in it. Both databases number the values of a statement as `$1`.
pub(crate) trait Db: IdempotentOps + LeaseOps + RowOps {
    /// Runs once in a new database.
    const SETUP: &[&str];

    /// Runs the statement and returns how many rows it changed.
    fn execute(
        conn: &mut Self::Connection,
        sql: &'static str,
        values: &[i64],
    ) -> impl Future<Output = Result<u64>> + Send;

    /// The rows, each of `N` numbers.
    fn fetch<const N: usize>(
        conn: &mut Self::Connection,
        sql: &'static str,
        values: &[i64],
    ) -> impl Future<Output = Result<Vec<[i64; N]>>> + Send;
}

macro_rules! db {
    ($database:ty, $setup:expr) => {
        impl Db for $database {
            const SETUP: &[&str] = &$setup;

            async fn execute(conn: &mut Self::Connection, sql: &'static str, values: &[i64]) -> Result<u64> {
                let query = values.iter().fold(sqlx::query(sql), |query, value| query.bind(*value));
                Ok(query.execute(conn).await?.rows_affected())
            }

            async fn fetch<const N: usize>(
                conn: &mut Self::Connection,
                sql: &'static str,
                values: &[i64],
            ) -> Result<Vec<[i64; N]>> {
                let query = values.iter().fold(sqlx::query(sql), |query, value| query.bind(*value));
                let rows = query.fetch_all(conn).await?;
                let numbers = |row: &<$database as sqlx::Database>::Row| {
                    let mut numbers = [0; N];
                    for (at, number) in numbers.iter_mut().enumerate() {
                        *number = row.try_get(at)?;
                    }
                    Ok(numbers)
                };
                rows.iter().map(numbers).collect()
            }
        }
    };
}

// With a log ahead of the writes, a process that was stopped while it reads does not keep the others from writing.
db!(Sqlite, ["PRAGMA journal_mode = WAL"]);
// A process that was stopped in a transaction keeps its locks until the server ends that: see "A holder is stopped, not
// dead" in docs/guide.md.
db!(
    Postgres,
    ["DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET idle_in_transaction_session_timeout = 1500', \
      current_database()); END $$"]
);

/// Runs the example: as its trial, or as one of the processes.
pub(crate) async fn run<E: Example<Postgres> + Example<Sqlite>>() -> Result<()> {
    let mut args = env::args().skip(1);
    let (mut url, mut is_process) = (None, false);
    while let Some(arg) = args.next() {
        match &*arg {
            "--process" => is_process = true,
            "--url" => url = Some(args.next().context("--url needs the URL of a database")?),
            other => bail!("unknown argument {other}; there is only --url"),
        }
    }
    let folder = tempfile::tempdir()?;
    let url = url.unwrap_or_else(|| format!("sqlite://{}?mode=rwc", folder.path().join("jobs.db").display()));
    if url.starts_with("postgres") {
        run_on::<Postgres, E>(&url, is_process).await
    } else {
        run_on::<Sqlite, E>(&url, is_process).await
    }
}

async fn run_on<DB: Db, E: Example<DB>>(url: &str, is_process: bool) -> Result<()> {
    let pool = Pool::<DB>::connect(url).await?;
    if is_process {
        // The trial has the other end: without it, nothing would end this process.
        thread::spawn(|| {
            drop(io::stdin().read_to_end(&mut Vec::new()));
            process::exit(0);
        });
        let mut terminated = signal(SignalKind::terminate())?;
        return tokio::select! {
            ended = E::work(pool) => ended,
            _ = terminated.recv() => Ok(()),
        };
    }
    let mut conn = pool.acquire().await?;
    for sql in DB::SETUP.iter().chain(E::TABLES) {
        DB::execute(&mut conn, sql, &[]).await?;
    }
    drop(conn);
    lockkit::migrate(&pool).await?;
    let mut processes = Processes::start(url)?;
    E::watch(pool, &mut processes).await?;
    processes.end().await
}

/// The processes of an example, killed when this is dropped.
pub(crate) struct Processes {
    url: String,
    children: Vec<Child>,
}

impl Processes {
    fn start(url: &str) -> Result<Self> {
        let mut processes = Self { url: url.to_owned(), children: Vec::new() };
        for _ in 0..PROCESSES {
            let child = processes.spawn()?;
            processes.children.push(child);
        }
        Ok(processes)
    }

    fn spawn(&self) -> Result<Child> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["--process", "--url", &self.url]).stdin(Stdio::piped()).kill_on_drop(true);
        Ok(command.spawn()?)
    }

    /// The ids of those that run.
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.children.iter().filter_map(|it| it.id().map(i64::from)).collect()
    }

    /// Starts new processes for those that were killed.
    pub(crate) fn replace_dead(&mut self) -> Result<()> {
        for at in 0..self.children.len() {
            if let Some(status) = self.children[at].try_wait()? {
                ensure!(status.signal() == Some(Signal::KILL.as_raw()), "a process ended: {status}");
                self.children[at] = self.spawn()?;
            }
        }
        Ok(())
    }

    /// Ends all of them in order.
    async fn end(&mut self) -> Result<()> {
        self.replace_dead()?;
        for id in self.ids() {
            send_signal(id, Signal::TERM)?;
        }
        for child in &mut self.children {
            let status = child.wait().await?;
            // A process that has just started does not listen for the signal yet.
            let is_ended = status.success() || status.signal() == Some(Signal::TERM.as_raw());
            ensure!(is_ended, "a process failed: {status}");
        }
        Ok(())
    }
}

/// Sends a signal to the process with this id.
pub(crate) fn send_signal(id: i64, signal: Signal) -> Result<()> {
    let id = i32::try_from(id).ok().and_then(Pid::from_raw).context("no id of a process")?;
    Ok(kill_process(id, signal)?)
}

/// Asks until the answer is `true`.
pub(crate) async fn until(what: &str, mut ask: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !ask().await? {
        ensure!(started.elapsed() < PATIENCE, "not after {PATIENCE:?}: {what}");
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
