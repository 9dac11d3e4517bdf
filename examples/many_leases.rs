//! One process holds a thousand leases: what that costs, and what one long transaction under one of them does to the
//! rest.
//!
//! ```text
//! cargo run --example many_leases                                   # on a temporary SQLite file
//! cargo run --example many_leases -- --url postgres://user:password@localhost/shop
//! cargo run --example many_leases -- --leases 5000 --ttl 30 --seconds 60 --url mysql://user:password@localhost/shop
//! ```
//!
//! Renewals are counted where anybody can count them: in the event `renewed` that lockkit gives to `tracing`, one for
//! each statement. Fails if a lease is lost.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use lockkit::{Lease, Leases, dialect::LeaseOps, store::LeaseInfo};
use sqlx::{MySql, Pool, Postgres, Sqlite, pool::PoolOptions};
use tokio::{task::JoinSet, time::sleep};
use tracing::{Event, Subscriber, field::Field};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::{Context, Layer, SubscriberExt},
    util::SubscriberInitExt,
};

/// How many tasks acquire and release the leases.
const TASKS: usize = 4;

#[derive(Parser)]
#[command(about = "What it costs to hold many leases.")]
struct Args {
    /// The database: `postgres://…`, `mysql://…` or `sqlite://…`. A temporary SQLite file without it.
    #[arg(long)]
    url: Option<String>,
    /// How many leases the process holds.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    leases: u32,
    /// The seconds that a lease lives without a renewal.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    ttl: u64,
    /// How many seconds to measure.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

/// What lockkit has told.
#[derive(Default)]
struct Told {
    statements: AtomicU64,
    renewals: AtomicU64,
    lost: AtomicU64,
}

struct Count(Arc<Told>);

impl<S: Subscriber> Layer<S> for Count {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (mut message, mut leases) = (String::new(), 0);
        event.record(&mut |field: &Field, value: &dyn std::fmt::Debug| match field.name() {
            "message" => message = format!("{value:?}"),
            "leases" => leases = format!("{value:?}").parse().unwrap_or_default(),
            _ => {}
        });
        match message.as_str() {
            "renewed" => {
                self.0.statements.fetch_add(1, Ordering::Relaxed);
                self.0.renewals.fetch_add(leases, Ordering::Relaxed);
            }
            "lost" => drop(self.0.lost.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        }
    }
}

async fn run<DB: Many>(url: &str, args: &Args, told: &Told) -> Result<()> {
    let pool = PoolOptions::<DB>::new().max_connections(8).connect(url).await?;
    DB::prepare(&pool).await?;
    lockkit::migrate(&pool).await?;
    let before = DB::updates(&pool).await?;
    let ttl = Duration::from_secs(args.ttl);
    let leases = Leases::builder(pool.clone()).ttl(ttl).build()?;

    let started = Instant::now();
    let mut held = acquire(&leases, args.leases as usize).await?;
    println!("{} leases with a ttl of {ttl:?} on {}, acquired in {:.1?}", held.len(), DB::NAME, started.elapsed());
    sleep(ttl / 3).await;

    let (started, statements, renewals) = (Instant::now(), load(&told.statements), load(&told.renewals));
    let cpu = cpu_seconds()?;
    sleep(Duration::from_secs(args.seconds)).await;
    let (elapsed, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let (statements, renewals) = (load(&told.statements) - statements, load(&told.renewals) - renewals);
    println!(
        "in {elapsed:.1} s: {:.2} renewal statements a second, with {} leases each",
        f64::from(u32::try_from(statements)?) / elapsed,
        renewals / statements.max(1)
    );
    println!("CPU of this process: {:.1} ms a second", 1000.0 * cpu / elapsed);

    if DB::RENEWS_BESIDE_A_TRANSACTION {
        let pinned = held.pop().context("there are leases")?;
        pin(&pool, &leases, pinned, 3 * ttl).await?;
    } else {
        println!("no long transaction here: it has the only write lock of {}, and no lease could be renewed", DB::NAME);
    }

    let lost = held.iter().filter(|it| !it.is_trusted()).count() as u64;
    let lost = lost.max(load(&told.lost));
    println!("lost: {lost} leases");
    release(held).await?;
    // The database has counted all that a connection did when that is closed.
    drop(leases);
    pool.close().await;
    let pool = PoolOptions::<DB>::new().max_connections(1).connect(url).await?;
    if let (Some(before), Some(after)) = (before, DB::updates(&pool).await?) {
        let (all, hot) = (after.0 - before.0, after.1 - before.1);
        println!("updates of lockkit_lease: {all}, of them {} % HOT", 100 * hot / all.max(1));
    }
    ensure!(lost == 0, "{lost} leases were lost");
    Ok(())
}

async fn acquire<DB: Many>(leases: &Leases<Pool<DB>>, count: usize) -> Result<Vec<Lease<Pool<DB>>>> {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let leases = leases.clone();
        tasks.spawn(async move {
            let mut held = Vec::new();
            for number in (task..count).step_by(TASKS) {
                held.push(leases.lease(format!("many/{number:05}")).acquire().await?);
            }
            anyhow::Ok(held)
        });
    }
    Ok(tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

async fn release<DB: Many>(mut held: Vec<Lease<Pool<DB>>>) -> Result<()> {
    let mut tasks = JoinSet::new();
    while !held.is_empty() {
        let part = held.split_off(held.len() - held.len().div_ceil(TASKS));
        tasks.spawn(async move {
            for lease in part {
                lease.release().await?;
            }
            anyhow::Ok(())
        });
    }
    tasks.join_all().await.into_iter().collect()
}

/// Keeps a transaction open that pins its lease, and sees what becomes of it and of the others.
async fn pin<DB: Many>(
    pool: &Pool<DB>,
    leases: &Leases<Pool<DB>>,
    pinned: Lease<Pool<DB>>,
    open: Duration,
) -> Result<()> {
    let others = |list: Vec<LeaseInfo>| list.into_iter().filter(|it| it.key != *pinned.key());
    let before: Vec<_> = others(leases.list("many/").await?).collect();
    let mut tx = lockkit::begin(pool).await?;
    pinned.verify(&mut tx).await?;
    sleep(open).await;
    let trusted = if pinned.is_trusted() { "still trusted" } else { "not trusted any more" };

    let after: Vec<_> = others(leases.list("many/").await?).collect();
    ensure!(after.len() == before.len(), "{} other leases became {}", before.len(), after.len());
    let renewed = before.iter().zip(&after).map(|(before, after)| after.renewals - before.renewals);
    let (least, most) = (renewed.clone().min().unwrap_or_default(), renewed.max().unwrap_or_default());
    let committed = pinned.commit(tx).await;
    let ended = if committed.is_ok() { "committed" } else { "refused to commit" };
    println!("a transaction that pinned its lease for {open:?}: its lease was {trusted}, and it {ended}");
    println!("the other {} leases were renewed {least} to {most} times meanwhile", after.len());
    committed.context("the long transaction")?;
    ensure!(least > 0, "a lease was not renewed");
    Ok(())
}

/// What differs between the databases.
trait Many: LeaseOps {
    const RENEWS_BESIDE_A_TRANSACTION: bool = true;

    fn prepare(_pool: &Pool<Self>) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }

    /// Updates of the leases' table so far, and how many of them touched no index, where the database counts them.
    fn updates(_pool: &Pool<Self>) -> impl Future<Output = Result<Option<(i64, i64)>>> + Send {
        async { Ok(None) }
    }
}

impl Many for Postgres {
    async fn updates(pool: &Pool<Self>) -> Result<Option<(i64, i64)>> {
        let counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'lockkit_lease'";
        Ok(sqlx::query_as(counted).fetch_optional(pool).await?)
    }
}

impl Many for MySql {}

impl Many for Sqlite {
    const RENEWS_BESIDE_A_TRANSACTION: bool = false;

    async fn prepare(pool: &Pool<Self>) -> Result<()> {
        sqlx::query("PRAGMA journal_mode = WAL").execute(pool).await?;
        Ok(())
    }
}

/// The CPU time of this process: the 14th and 15th field of its `stat`, in hundredths of a second.
fn cpu_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat").context("the CPU time is read from /proc")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).map(str::parse::<u32>);
    Ok(f64::from(ticks.sum::<Result<u32, _>>()?) / 100.0)
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let told = Arc::new(Told::default());
    let only_lockkit = Targets::new().with_target("lockkit", LevelFilter::DEBUG);
    tracing_subscriber::registry().with(only_lockkit).with(Count(told.clone())).init();

    let folder = tempfile::tempdir()?;
    let url = args.url.clone();
    let url = url.unwrap_or_else(|| format!("sqlite://{}?mode=rwc", folder.path().join("leases.db").display()));
    match url.split(':').next().unwrap_or_default() {
        "sqlite" => run::<Sqlite>(&url, &args, &told).await,
        "mysql" | "mariadb" => run::<MySql>(&url, &args, &told).await,
        "postgres" | "postgresql" => run::<Postgres>(&url, &args, &told).await,
        other => bail!("cannot use {other}; give a URL with postgres://, mysql:// or sqlite://"),
    }
}
