//! A lottery and flash sale: buyers draw items with limited stock, all at once, from many tasks in many processes.
//!
//! Each draw looks (is something left? does this buyer hold one already?) and then writes. Without a lock the shop
//! gives out more than it has; under each kind of lock of lockkit it gives out exactly its stock, and nobody wins
//! twice.
//!
//! ```text
//! cargo run --release -p flash_sale                              # on a temporary SQLite file
//! cargo run --release -p flash_sale -- --processes 8 --strategy naive --strategy row
//! cargo run --release -p flash_sale -- --csv examples/flash_sale/items.csv
//! cargo run --release -p flash_sale --features plot -- --plot sale.svg
//! cargo run --release -p flash_sale --features postgres -- --database postgres://user:password@localhost/shop
//! cargo run --release -p flash_sale --features mysql -- --database mysql://user:password@localhost/shop
//! cargo run --release -p flash_sale --features redis -- --store redis://localhost --stop 2.5
//! ```
//!
//! Each run recreates the tables `t_items` and `t_wins` in the database, and creates lockkit's own if they are missing.
//! The exit code is 1 if a lock failed.

mod draws;
#[cfg(feature = "plot")]
mod plot;
mod progress;
mod sale;
mod shop;
#[cfg(feature = "stores")]
mod stores;
mod verdict;
mod worker;

use std::{io::Write, io::stdout, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use sqlx::{Encode, Pool, Sqlite, Type};

use crate::{
    draws::Plan,
    progress::Progress,
    sale::{Strategy, stock_of},
    shop::{Offer, Shop},
    verdict::{HEADER, verdict},
    worker::{Job, read_job, run_processes, work},
};

/// Sells limited stock to many buyers at once, under each kind of lock and without any.
#[derive(Debug, Parser)]
#[command(name = "flash_sale")]
struct Args {
    /// Pieces of each item
    #[arg(long, default_value_t = 20)]
    stock: u32,

    /// Different items; the last one is drawn most often
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    items: u32,

    /// Different buyers, each of whom may win each item once
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    buyers: u32,

    /// Draws in all, shared among the tasks
    #[arg(long, default_value_t = 4000)]
    draws: u32,

    /// Tasks in each process, all drawing at the same time
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    tasks: u32,

    /// Processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    processes: u32,

    /// How to keep draws apart; may be repeated [default: all]
    #[arg(long, value_enum)]
    strategy: Vec<Choice>,

    /// sqlite://, or postgres:// or mysql:// if built with that feature [default: a temporary SQLite file]
    #[arg(long, value_name = "URL")]
    database: Option<String>,

    /// redis://, zk:// or etcd://, if built with that feature: leases there, without and with the fence guard
    #[cfg(feature = "stores")]
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Stop one process after the other for so many seconds, past the ttl of its leases, which is 1 s
    #[cfg(feature = "stores")]
    #[arg(long, value_name = "SECONDS", requires = "store")]
    stop: Option<f64>,

    /// Decides who draws what
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Items to sell, with the columns `item_id`, `name`, `stock` and `weight`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["stock", "items"])]
    csv: Option<PathBuf>,

    /// Draw the results as a chart
    #[cfg(feature = "plot")]
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Be one of the processes
    #[arg(long, hide = true)]
    worker: bool,
}

/// A strategy, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    All,
    Naive,
    Row,
    Named,
    Lease,
    Version,
    Stock,
}

impl Choice {
    fn strategies(self) -> &'static [Strategy] {
        match self {
            Self::All => &Strategy::ALL,
            Self::Naive => &[Strategy::Naive],
            Self::Row => &[Strategy::Row],
            Self::Named => &[Strategy::Named],
            Self::Lease => &[Strategy::Lease],
            Self::Version => &[Strategy::Version],
            Self::Stock => &[Strategy::Stock],
        }
    }
}

/// Calls a function that is generic over the database with the one that a URL names.
macro_rules! on_database_of {
    ($url:expr, $function:ident($($argument:expr),*)) => {
        match $url.split(':').next() {
            Some("sqlite") => $function::<Sqlite>($($argument),*).await,
            #[cfg(feature = "mysql")]
            Some("mysql" | "mariadb") => $function::<sqlx::MySql>($($argument),*).await,
            #[cfg(feature = "postgres")]
            Some("postgres" | "postgresql") => $function::<sqlx::Postgres>($($argument),*).await,
            #[cfg(not(feature = "mysql"))]
            Some("mysql" | "mariadb") => {
                bail!("built without MySQL and MariaDB; add `--features mysql` after `-p flash_sale`")
            }
            #[cfg(not(feature = "postgres"))]
            Some("postgres" | "postgresql") => {
                bail!("built without PostgreSQL; add `--features postgres` after `-p flash_sale`")
            }
            _ => bail!("the database must be a URL with postgres://, mysql:// or sqlite://"),
        }
    };
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if args.worker {
        let job = read_job()?;
        let url = job.url.clone();
        on_database_of!(url, work(job))?;
        return Ok(ExitCode::SUCCESS);
    }
    let folder = tempfile::tempdir()?;
    let url = match &args.database {
        Some(url) => url.clone(),
        None => format!("sqlite://{}", folder.path().join("shop.db").display()),
    };
    on_database_of!(url, compare(&args, &url))
}

/// Runs every strategy in turn and prints what it did.
async fn compare<DB: Shop>(args: &Args, url: &str) -> Result<ExitCode>
where
    i64: for<'v> Encode<'v, DB> + Type<DB>,
{
    let plan = plan(args)?;
    let pool = DB::open(url, 4).await.with_context(|| format!("cannot connect to {}", DB::NAME))?;
    lockkit::migrate(&pool).await?;
    let server = DB::server(&pool).await?;

    let Plan { items, buyers, draws, processes, tasks, seed } = &plan;
    println!(
        "{} items, {} pieces; {draws} draws by {buyers} buyers from {processes} processes with {tasks} tasks each; \
         {server}, seed {seed}\n",
        items.len(),
        plan.stock(),
    );
    println!("{HEADER}");

    let mut verdicts = Vec::new();
    #[cfg(feature = "stores")]
    let (store, stop, chosen) = match &args.store {
        Some(url) => (Some(url.clone()), args.stop, strategies_of_store(url)),
        None => (None, None, strategies(&args.strategy)),
    };
    #[cfg(not(feature = "stores"))]
    let (store, stop, chosen) = (None::<String>, None, strategies(&args.strategy));
    let stop = stop.map(Duration::try_from_secs_f64).transpose()?;
    for strategy in chosen {
        DB::fill(&pool, &plan.items).await?;
        fill_stocks(&pool, &plan.items).await?;
        let progress = Progress::new(strategy.name(), plan.draws);
        let job = |process| Job { url: url.to_owned(), store: store.clone(), strategy, process, plan: plan.clone() };
        let report = run_processes(job, &plan, stop, move |draws| progress.show(draws)).await?;
        let verdict = verdict(&pool, strategy, &plan, &report).await?;
        println!("{}", verdict.line());
        stdout().flush()?;
        verdicts.push(verdict);
    }
    #[cfg(feature = "plot")]
    if let Some(path) = &args.plot {
        plot::plot(path, &server, &verdicts)?;
    }
    Ok(sum_up(&verdicts))
}

/// Puts into the segmented stock of every item what is on sale, and nothing of a former run.
async fn fill_stocks<DB: Shop>(pool: &Pool<DB>, items: &[Offer]) -> Result<()> {
    for Offer { item_id, stock: pieces, .. } in items {
        let stock = stock_of(pool, *item_id);
        match stock.left().await? {
            0 => {}
            left => drop(stock.take(left).await?),
        }
        if *pieces > 0 {
            stock.put((*pieces).into()).await?;
        }
    }
    Ok(())
}

/// Says what was wrong. A lock that failed is a failure of the run; the naive snippet is there to fail.
fn sum_up(verdicts: &[verdict::Verdict]) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    println!();
    for verdict in verdicts {
        let name = verdict.strategy.name();
        match (verdict.strategy.may_fail(), verdict.faults.is_empty()) {
            (true, true) => println!("{name}: got away with it this time; give it more tasks or draws"),
            (true, false) => println!(
                "{name}: {}: {} pieces given out that were not there, {} double wins",
                verdict.strategy.weakness(),
                verdict.oversold,
                verdict.double_wins,
            ),
            (_, true) => {}
            (_, false) => {
                code = ExitCode::FAILURE;
                eprintln!("{name}: THE LOCK DID NOT HOLD");
                for fault in &verdict.faults {
                    eprintln!("{name}:   {fault}");
                }
            }
        }
    }
    if code == ExitCode::SUCCESS && verdicts.iter().any(|it| !it.strategy.may_fail()) {
        println!("every lock gave out exactly what was there, and no buyer won an item twice");
    }
    code
}

#[cfg(feature = "stores")]
fn strategies_of_store(url: &str) -> Vec<Strategy> {
    let mut all = Strategy::OF_STORES.to_vec();
    #[cfg(feature = "redis")]
    all.retain(|it| *it != Strategy::SetNx || url.starts_with("redis"));
    let _ = url;
    all
}

fn strategies(chosen: &[Choice]) -> Vec<Strategy> {
    let chosen = if chosen.is_empty() { &[Choice::All] } else { chosen };
    let chosen: Vec<Strategy> = chosen.iter().flat_map(|it| it.strategies()).copied().collect();
    Strategy::ALL.into_iter().filter(|it| chosen.contains(it)).collect()
}

fn plan(args: &Args) -> Result<Plan> {
    let items = match &args.csv {
        Some(path) => csv::Reader::from_path(path)
            .and_then(|mut it| it.deserialize().collect::<csv::Result<Vec<Offer>>>())
            .with_context(|| format!("cannot read the items in {}", path.display()))?,
        None => (1..=args.items)
            .map(|number| Offer {
                item_id: number.into(),
                name: format!("item {number}"),
                stock: args.stock,
                weight: number,
            })
            .collect(),
    };
    ensure!(items.iter().any(|it| it.weight > 0), "there is nothing to draw: no item has a weight");
    let Args { buyers, draws, tasks, processes, seed, .. } = *args;
    Ok(Plan { items, buyers, draws, processes, tasks, seed })
}
