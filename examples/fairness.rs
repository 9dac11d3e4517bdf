//! Processes compete for one lease: how long each of them waits, in rough and in strict order.
//!
//! ```text
//! cargo run --example fairness                                  # eight processes on a temporary SQLite file
//! cargo run --example fairness -- --url postgres://user:password@localhost/shop
//! cargo run --example fairness -- --processes 20 --seconds 30 --url mysql://user:password@localhost/shop
//! ```
//!
//! A plain request takes a ticket after 50 ms, so no process is kept out, but the order is kept only roughly. With
//! `.fair()` the processes are served in the order in which they came, and nobody's wait is much longer than another's.
//! On PostgreSQL both are measured once more with `.listen()`, where a release wakes those who wait.

use std::{
    env,
    process::Stdio,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use lockkit::{LeaseStore, Leases, dialect::LeaseOps, lease::LeasesBuilder};
use serde::{Deserialize, Serialize};
use sqlx::{MySql, Pool, Postgres, Sqlite, SqlitePool, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, stdin},
    process::Command,
    time::{Instant, sleep, timeout_at},
};

/// How long the lease is held each time.
const HOLD: Duration = Duration::from_millis(2);

#[derive(Parser)]
#[command(about = "How long processes wait that compete for one lease, in rough and in strict order.")]
struct Args {
    /// The database: `postgres://…`, `mysql://…` or `sqlite://…`. A temporary SQLite file without it.
    #[arg(long)]
    url: Option<String>,
    /// How many processes compete.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=64))]
    processes: u32,
    /// How long they compete in each way.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Be one of the competing processes.
    #[arg(long, hide = true)]
    compete: Option<Way>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Plain,
    Fair,
    PlainListen,
    FairListen,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fair => "fair",
            Self::PlainListen => "plain, listen",
            Self::FairListen => "fair, listen",
        }
    }

    fn is_fair(self) -> bool {
        matches!(self, Self::Fair | Self::FairListen)
    }

    fn listens(self) -> bool {
        matches!(self, Self::PlainListen | Self::FairListen)
    }
}

/// The waits of one process. Instants and durations are in microseconds, by the machine's clock.
#[derive(Default, Serialize, Deserialize)]
struct Waits {
    /// When it asked, and when it was served.
    ended: Vec<(u64, u64)>,
    /// For how long it was still waiting when the run ended. Not one of the waits: nobody knows how long it would be.
    cut_short: u64,
}

fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros().try_into()?)
}

/// One competing process: says that it is ready, waits for the start, and prints its waits.
async fn compete<DB: LeaseOps>(leases: LeasesBuilder<Pool<DB>>, way: Way, seconds: u32) -> Result<()>
where
    Pool<DB>: LeaseStore,
{
    let leases = leases.wait(Duration::from_secs(60)).build()?;
    leases.lease(format!("fairness/warm-up/{}", std::process::id())).acquire().await?.release().await?;
    println!("ready");
    let mut start = String::new();
    BufReader::new(stdin()).read_line(&mut start).await?;

    let end = Instant::now() + Duration::from_secs(seconds.into());
    let mut waits = Waits::default();
    loop {
        let request = leases.lease(format!("fairness/{}", way.name()));
        let request = if way.is_fair() { request.fair() } else { request };
        let asked = now()?;
        let Ok(lease) = timeout_at(end, request.acquire()).await else {
            waits.cut_short = now()? - asked;
            break;
        };
        let lease = lease?;
        waits.ended.push((asked, now()?));
        sleep(HOLD).await;
        lease.release().await?;
    }
    println!("{}", serde_json::to_string(&waits)?);
    // What was asked for last is released in the background.
    sleep(Duration::from_millis(200)).await;
    Ok(())
}

/// Lets the processes compete, and returns the waits of each.
async fn measure(url: &str, processes: u32, seconds: u32, way: Way) -> Result<Vec<Waits>> {
    let mut children = Vec::new();
    for _ in 0..processes {
        let way = way.to_possible_value().context("a way has a name")?;
        let mut child = Command::new(env::current_exe()?)
            .args(["--url", url, "--seconds", &seconds.to_string(), "--compete", way.get_name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = child.stdin.take().context("the process has an input")?;
        let output = BufReader::new(child.stdout.take().context("the process has an output")?);
        children.push((child, input, output));
    }
    for (_, _, output) in &mut children {
        let mut ready = String::new();
        output.read_line(&mut ready).await?;
    }
    for (_, input, _) in &mut children {
        input.write_all(b"start\n").await?;
    }
    let mut waits = Vec::new();
    for (mut child, _input, mut output) in children {
        let mut report = String::new();
        output.read_to_string(&mut report).await?;
        child.wait().await?;
        waits.push(serde_json::from_str(&report).context("a process failed")?);
    }
    Ok(waits)
}

fn print(way: Way, seconds: u32, waits: &[Waits]) {
    let all = waits.iter().map(|it| it.ended.len()).sum::<usize>();
    let shares: Vec<_> = waits
        .iter()
        .map(|it| format!("{} ({} %)", it.ended.len(), (100 * it.ended.len() + all / 2) / all.max(1)))
        .collect();
    println!("{}: {all} turns, {} a second", way.name(), all / seconds as usize);
    println!("  turns of each process: {}", shares.join(", "));

    let ended = || waits.iter().flat_map(|it| &it.ended);
    let mut sorted: Vec<u64> = ended().map(|(asked, served)| served - asked).collect();
    sorted.sort_unstable();
    let Some(&longest) = sorted.last() else { return };
    let (median, p99) = (sorted[all / 2].max(1), sorted[all * 99 / 100]);
    println!(
        "  wait: median {} ms, p99 {} ms, longest {} ms; longest / median: {}",
        tenths(median, 1_000),
        tenths(p99, 1_000),
        tenths(longest, 1_000),
        tenths(longest, median)
    );
    let mut served: Vec<u64> = ended().map(|(_, served)| *served).collect();
    served.sort_unstable();
    let before = |instant| served.partition_point(|it| *it < instant);
    let meanwhile = ended().map(|(asked, served)| before(*served) - before(*asked)).max().unwrap_or_default();
    println!("  turns of others while one waited: {meanwhile} at most");
    let cut_short = waits.iter().map(|it| it.cut_short).max().unwrap_or_default();
    println!("  still waiting at the end, not counted: for {} ms at most", tenths(cut_short, 1_000));
}

/// A quotient with one decimal.
fn tenths(dividend: u64, divisor: u64) -> String {
    let tenths = (dividend * 10 + divisor / 2) / divisor;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// A few connections, opened before the start.
async fn connect<DB: LeaseOps>(url: &str) -> Result<Pool<DB>> {
    Ok(PoolOptions::new().min_connections(3).max_connections(3).connect(url).await?)
}

async fn compete_on(url: &str, way: Way, seconds: u32) -> Result<()> {
    match url.split(':').next() {
        Some("sqlite") => compete(Leases::builder(connect::<Sqlite>(url).await?), way, seconds).await,
        Some("mysql" | "mariadb") => compete(Leases::builder(connect::<MySql>(url).await?), way, seconds).await,
        _ => {
            let leases = Leases::builder(connect::<Postgres>(url).await?);
            compete(if way.listens() { leases.listen() } else { leases }, way, seconds).await
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Args { url, processes, seconds, compete } = Args::parse();
    let folder = tempfile::tempdir()?;
    let url = url.unwrap_or_else(|| format!("sqlite://{}?mode=rwc", folder.path().join("fairness.db").display()));
    if let Some(way) = compete {
        compete_on(&url, way, seconds).await?;
        return Ok(());
    }

    let mut ways = vec![Way::Plain, Way::Fair];
    let database = match url.split(':').next() {
        Some("sqlite") => {
            let pool = SqlitePool::connect(&url).await?;
            sqlx::query("PRAGMA journal_mode = WAL").execute(&pool).await?;
            lockkit::migrate(&pool).await?;
            "SQLite"
        }
        Some("mysql" | "mariadb") => {
            lockkit::migrate(&connect::<MySql>(&url).await?).await?;
            "MySQL or MariaDB"
        }
        Some("postgres" | "postgresql") => {
            lockkit::migrate(&connect::<Postgres>(&url).await?).await?;
            ways.extend([Way::PlainListen, Way::FairListen]);
            "PostgreSQL"
        }
        _ => bail!("give a URL with postgres://, mysql:// or sqlite://"),
    };
    println!("{processes} processes compete for one lease on {database}, and hold it for {HOLD:?} each time");
    for way in ways {
        print(way, seconds, &measure(&url, processes, seconds, way).await?);
    }
    Ok(())
}
