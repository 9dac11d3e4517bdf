//! How much faster than one guarded row a segmented stock is, measured on a server of yours.
//!
//! Both sides take one piece at a time from as many tasks, in short slices by turns, so that a change of the machine's
//! load meets both. The server should be as durable as the one in production: what a hot row waits for is the disk.
//!
//! ```text
//! cargo run --release --example stock_bench -- --url postgres://user:password@localhost/bench
//! cargo run --release --example stock_bench -- --url mysql://… --clients 64 --segments 64 --seconds 20
//! ```
//!
//! The database gets the table `t_guarded` and lockkit's own.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use clap::Parser;
use hdrhistogram::Histogram;
use lockkit::{
    Stock,
    dialect::{RowsAffected, StockOps},
};
use sqlx::{MySql, Pool, Postgres, Sqlite, pool::PoolOptions};
use tokio::task::JoinSet;

/// Compares a segmented stock with one guarded row.
#[derive(Debug, Parser)]
#[command(name = "stock_bench")]
struct Args {
    /// postgres://, mysql:// or sqlite://
    #[arg(long, value_name = "URL")]
    url: String,

    /// Tasks that take at the same time, each with a connection
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,

    /// How long each side is measured
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,

    /// Segments of the stock
    #[arg(long, default_value_t = 32)]
    segments: u32,
}

/// How long one side runs before it is the other's turn.
const SLICE: Duration = Duration::from_secs(1);

/// Enough for any run. The guarded row gets as many.
const PIECES: u32 = 1_000_000_000;

/// A database with a guarded row. The statements are the same in all of them.
trait Guarded: StockOps {
    /// Makes the row.
    fn fill(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Takes one piece, if there is one.
    fn take(pool: &Pool<Self>) -> impl Future<Output = sqlx::Result<bool>> + Send;
}

macro_rules! guarded {
    ($($database:ty),*) => {$(
        impl Guarded for $database {
            async fn fill(pool: &Pool<Self>) -> sqlx::Result<()> {
                sqlx::query("DROP TABLE IF EXISTS t_guarded").execute(pool).await?;
                sqlx::query("CREATE TABLE t_guarded (id INTEGER NOT NULL PRIMARY KEY, n BIGINT NOT NULL)")
                    .execute(pool)
                    .await?;
                sqlx::query("INSERT INTO t_guarded VALUES (1, 1000000000)").execute(pool).await?;
                Ok(())
            }

            async fn take(pool: &Pool<Self>) -> sqlx::Result<bool> {
                let done =
                    sqlx::query("UPDATE t_guarded SET n = n - 1 WHERE id = 1 AND n >= 1").execute(pool).await?;
                Ok(done.affected() == 1)
            }
        }
    )*};
}

guarded!(MySql, Postgres, Sqlite);

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    match args.url.split(':').next() {
        Some("sqlite") => compare::<Sqlite>(&args).await,
        Some("mysql" | "mariadb") => compare::<MySql>(&args).await,
        Some("postgres" | "postgresql") => compare::<Postgres>(&args).await,
        _ => bail!("the database must be a URL with postgres://, mysql:// or sqlite://"),
    }
}

async fn compare<DB: Guarded>(args: &Args) -> Result<()> {
    let Args { url, clients, seconds, segments } = args;
    let pool = PoolOptions::<DB>::new().max_connections(*clients).test_before_acquire(false).connect(url).await?;
    lockkit::migrate(&pool).await?;
    DB::fill(&pool).await?;
    let stock = Stock::new(pool.clone(), "stock_bench").segments(*segments);
    stock.put(PIECES.into()).await?;
    let before = stock.left().await?;

    let guarded = |pool: Pool<DB>| async move {
        ensure!(DB::take(&pool).await?, "the guarded row is sold out");
        Ok(())
    };
    let segmented = |stock: Stock<DB>| async move {
        stock.take(1).await?;
        Ok(())
    };
    // The first slice of each opens connections and prepares statements.
    run(*clients, &pool, guarded).await?;
    let mut taken = run(*clients, &stock, segmented).await?.takes;
    let (mut one_row, mut many_rows) = (Side::new()?, Side::new()?);
    for _ in 0..*seconds {
        one_row.add(&run(*clients, &pool, guarded).await?)?;
        let slice = run(*clients, &stock, segmented).await?;
        taken += slice.takes;
        many_rows.add(&slice)?;
    }

    println!("{} with {clients} clients, {segments} segments, {seconds} slices of {SLICE:?} each", DB::NAME);
    println!("one guarded row  {one_row}");
    println!("segmented stock  {many_rows}");
    println!("ratio            {:.2}", many_rows.rate() / one_row.rate());
    ensure!(stock.left().await? + taken == before, "the stock does not add up");
    Ok(())
}

/// What all tasks did in one slice.
struct Slice {
    takes: u64,
    elapsed: Duration,
    latencies: Histogram<u64>,
}

/// Takes from as many tasks until the slice is over.
async fn run<T, F>(clients: u32, from: &T, take: impl Fn(T) -> F + Copy + Send + 'static) -> Result<Slice>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<()>> + Send,
{
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let from = from.clone();
        tasks.spawn(async move {
            let mut latencies = Histogram::<u64>::new(3)?;
            while started.elapsed() < SLICE {
                let began = Instant::now();
                take(from.clone()).await?;
                latencies.record(u64::try_from(began.elapsed().as_micros())?)?;
            }
            Ok::<_, anyhow::Error>(latencies)
        });
    }
    let mut latencies = Histogram::<u64>::new(3)?;
    while let Some(of_one) = tasks.join_next().await {
        latencies.add(of_one??)?;
    }
    Ok(Slice { takes: latencies.len(), elapsed: started.elapsed(), latencies })
}

/// All slices of one side.
struct Side {
    takes: u64,
    elapsed: Duration,
    latencies: Histogram<u64>,
}

impl Side {
    fn new() -> Result<Self> {
        Ok(Self { takes: 0, elapsed: Duration::ZERO, latencies: Histogram::new(3)? })
    }

    fn add(&mut self, slice: &Slice) -> Result<()> {
        let Slice { takes, elapsed, latencies } = slice;
        self.takes += takes;
        self.elapsed += *elapsed;
        Ok(self.latencies.add(latencies)?)
    }

    #[expect(clippy::cast_precision_loss, reason = "a run takes far fewer than 2 to the 53")]
    fn rate(&self) -> f64 {
        self.takes as f64 / self.elapsed.as_secs_f64()
    }
}

impl std::fmt::Display for Side {
    #[expect(clippy::cast_precision_loss, reason = "a latency has far fewer than 53 bits")]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let millis = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1000.0;
        write!(f, "{:>8.0} takes/s, p50 {:.2} ms, p99 {:.2} ms", self.rate(), millis(0.5), millis(0.99))
    }
}
