//! A process that was stopped for too long cannot commit what it began: another took its lease over meanwhile.
//!
//! ```text
//! cargo run --example lost_lease                                                 # on a temporary SQLite file
//! cargo run --example lost_lease -- --url postgres://user:password@localhost/shop
//! cargo run --example lost_lease -- --url mysql://user:password@localhost/shop
//! ```
//!
//! The first process takes a lease and works; SIGSTOP stops it in the middle, as a long pause of a virtual machine
//! would. Its lease expires, the second process takes it over, is told from whom, and commits. Then the first goes on.
//! It still has what it worked out, and believes what it believed; but its body is dropped at the next await, and a
//! commit with the old lease is refused. The standard error has lockkit's log of both. The table `t_reports` is made
//! anew.

use std::{
    env,
    io::{self, Write},
    process::Stdio,
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use lockkit::{Error, Lease, Leases, dialect::LeaseOps};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{MySql, Pool, Postgres, Sqlite};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::{Instant, sleep, sleep_until},
};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt::{self, time::uptime},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

const KEY: &str = "report:january";
const TTL: Duration = Duration::from_secs(1);
const WORK: Duration = Duration::from_millis(800);

#[derive(Parser)]
#[command(about = "A process that was stopped for too long cannot commit: another took its lease over.")]
struct Args {
    /// The database: `postgres://…`, `mysql://…` or `sqlite://…`. A temporary SQLite file without it.
    #[arg(long)]
    url: Option<String>,
    /// Be the first process.
    #[arg(long, hide = true)]
    first: bool,
}

/// What the first process does: it is stopped in its work.
async fn first<DB: Reports>(url: &str) -> Result<()> {
    let pool = Pool::<DB>::connect(url).await?;
    let leases = Leases::builder(pool.clone()).holder("the first process").build()?;
    let remembered = OnceLock::new();
    let body = async |lease: Lease<Pool<DB>>| {
        println!("has the lease with fence {}, begins its transaction and works", lease.fence());
        let fence = lease.fence();
        // Only to show below that a lease that outlives its body is of no use.
        let _ = remembered.set(lease.share());
        let mut tx = pool.begin().await?;
        ensure!(DB::all(&mut tx).await?.is_empty(), "the report is there already");
        sleep(WORK).await;
        DB::add(&mut tx, "first", fence.get()).await?;
        lease.commit(tx).await?;
        anyhow::Ok(())
    };
    match leases.lease(KEY).ttl(TTL).run(body).await {
        Err(err) if is_lost(&err) => println!("its body was stopped: {err}"),
        Err(err) => return Err(err),
        Ok(()) => bail!("the first process committed with a lease that another had taken over"),
    }

    let lease = remembered.into_inner().context("the body has run")?;
    let mut tx = lockkit::begin(&pool).await?;
    DB::add(&mut tx, "first", lease.fence().get()).await?;
    match lease.commit(tx).await {
        Err(err @ Error::Lost { .. }) => println!("its commit was refused: {err}"),
        Err(err) => return Err(err.into()),
        Ok(()) => bail!("the first process committed with a lease that another had taken over"),
    }
    Ok(())
}

fn is_lost(err: &anyhow::Error) -> bool {
    matches!(err.downcast_ref(), Some(Error::Lost { .. }))
}

/// What the second process does: it stops the first, takes its lease over, and lets it go on.
async fn second<DB: Reports>(url: &str) -> Result<()> {
    let pool = Pool::<DB>::connect(url).await?;
    lockkit::migrate(&pool).await?;
    DB::new_table(&pool).await?;
    let leases = Leases::builder(pool.clone()).holder("the second process").ttl(TTL).build()?;

    let mut child = Command::new(env::current_exe()?)
        .args(["--first", "--url", url])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let first = child.id().and_then(|it| Pid::from_raw(it.cast_signed())).context("the first process has an id")?;
    let mut said = BufReader::new(child.stdout.take().context("the first process has an output")?).lines();
    println!("first:  {}", said.next_line().await?.context("the first process failed")?);
    sleep(WORK / 4).await;
    kill_process(first, Signal::STOP)?;
    let stopped = Instant::now();
    println!("first:  stopped by SIGSTOP");

    let lease = leases.lease(KEY).acquire().await?;
    let previous = lease.previous().context("the lease was released instead of taken over")?;
    println!("second: took the lease over from {}, {:?} after it had expired", previous.holder, previous.expired_for);
    println!("second: fence {} before, fence {} now", previous.fence, lease.fence());
    ensure!(previous.holder == "the first process" && previous.fence < lease.fence(), "taken over from somebody else");
    let fence = lease.fence().get();
    let mut tx = lockkit::begin(&pool).await?;
    DB::add(&mut tx, "second", fence).await?;
    lease.commit(tx).await?;
    println!("second: committed");

    sleep_until(stopped + 2 * TTL).await;
    println!("first:  goes on by SIGCONT after {:.1?}", stopped.elapsed());
    kill_process(first, Signal::CONT)?;
    while let Some(line) = said.next_line().await? {
        println!("first:  {line}");
    }
    ensure!(child.wait().await?.success(), "the first process failed");

    let reports = DB::all(&mut *pool.acquire().await?).await?;
    for (writer, fence) in &reports {
        println!("in the table: the report of the {writer} process, fence {fence}");
    }
    ensure!(reports == [("second".to_owned(), fence.cast_signed())], "the table must have the second's report only");
    Ok(())
}

/// The table `t_reports`, spelled for each database.
trait Reports: LeaseOps {
    async fn new_table(pool: &Pool<Self>) -> Result<()>;
    async fn add(conn: &mut Self::Connection, writer: &str, fence: u64) -> Result<()>;
    async fn all(conn: &mut Self::Connection) -> Result<Vec<(String, i64)>>;
}

macro_rules! reports {
    ($database:ty, $a:literal, $b:literal $(, $setting:literal)?) => {
        impl Reports for $database {
            async fn new_table(pool: &Pool<Self>) -> Result<()> {
                $(sqlx::query($setting).execute(pool).await?;)?
                sqlx::query("DROP TABLE IF EXISTS t_reports").execute(pool).await?;
                sqlx::query("CREATE TABLE t_reports (writer VARCHAR(10) NOT NULL, fence BIGINT NOT NULL)")
                    .execute(pool)
                    .await?;
                Ok(())
            }

            async fn add(conn: &mut Self::Connection, writer: &str, fence: u64) -> Result<()> {
                sqlx::query(concat!("INSERT INTO t_reports VALUES (", $a, ", ", $b, ")"))
                    .bind(writer)
                    .bind(i64::try_from(fence)?)
                    .execute(conn)
                    .await?;
                Ok(())
            }

            async fn all(conn: &mut Self::Connection) -> Result<Vec<(String, i64)>> {
                Ok(sqlx::query_as("SELECT writer, fence FROM t_reports").fetch_all(conn).await?)
            }
        }
    };
}

// So that the first process, stopped in a transaction that has read, does not keep the second from writing.
reports!(Sqlite, "?", "?", "PRAGMA journal_mode = WAL");
reports!(MySql, "?", "?");
reports!(Postgres, "$1", "$2");

async fn run<DB: Reports>(url: &str, is_first: bool) -> Result<()> {
    if is_first { first::<DB>(url).await } else { second::<DB>(url).await }
}

/// The standard error, with the name of the process before each line.
struct Log(&'static str);

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(&[b"    log of the ", self.0.as_bytes(), b": ", line].concat())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let name = if args.first { "first" } else { "second" };
    let log = fmt::layer().compact().with_ansi(false).with_timer(uptime()).with_writer(move || Log(name));
    let only_lockkit = Targets::new().with_target("lockkit", LevelFilter::DEBUG);
    tracing_subscriber::registry().with(only_lockkit).with(log).init();

    let folder = tempfile::tempdir()?;
    let url = match args.url {
        Some(url) => url,
        None => format!("sqlite://{}?mode=rwc", folder.path().join("reports.db").display()),
    };
    match url.split(':').next().unwrap_or_default() {
        "sqlite" => run::<Sqlite>(&url, args.first).await,
        "mysql" | "mariadb" => run::<MySql>(&url, args.first).await,
        "postgres" | "postgresql" => run::<Postgres>(&url, args.first).await,
        other => bail!("cannot use {other}; give a URL with postgres://, mysql:// or sqlite://"),
    }
}
