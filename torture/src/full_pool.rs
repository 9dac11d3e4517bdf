//! A service with a small pool whose connections all wait for a row lock, and that holds leases meanwhile.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use lockkit::Leases;
use sqlx::pool::PoolOptions;
use support::{MariaDb, MySql, Postgres};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::event::Kind;
use crate::lane::{Site, prepare};
use crate::rig::{Rig, answers};
use crate::server::{PrivateServer, Settings};

#[derive(Args, Clone, Debug)]
pub(crate) struct FullPoolArgs {
    /// The databases: postgres, mariadb, mysql.
    #[arg(long, value_delimiter = ',', default_values = ["postgres", "mariadb", "mysql"])]
    databases: Vec<String>,
    /// How long the pool is full.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// How many connections the pool has.
    #[arg(long, default_value_t = 5)]
    connections: u32,
    /// How many tasks wait for the row.
    #[arg(long, default_value_t = 30)]
    tasks: u32,
    /// How long a lease lives without a renewal, in milliseconds.
    #[arg(long, default_value_t = 3_000)]
    ttl_ms: u64,
    /// Leaves the leases no connections but the pool's.
    #[arg(long)]
    without_own_connections: bool,
}

/// What became of the leases.
#[derive(Debug, Default)]
struct Outcome {
    /// Losses of leases that were held.
    lost: u32,
    /// Claims of a free lease that does not wait, and how many of them were not granted.
    claims: u32,
    refused: u32,
}

/// How many leases the service holds.
const HELD: u32 = 3;

/// Runs the service on one database after the other. The exit code is 1 if a lease was lost or a claim refused.
pub(crate) async fn run(args: FullPoolArgs) -> Result<ExitCode> {
    println!("| database | leases lost | claims of a free lease | refused |");
    println!("|---|---|---|---|");
    let mut failed = false;
    for database in &args.databases {
        let Outcome { lost, claims, refused } = match database.as_str() {
            Postgres::CODE => on::<Postgres>(&args).await?,
            MariaDb::CODE => on::<MariaDb>(&args).await?,
            MySql::CODE => on::<MySql>(&args).await?,
            other => bail!("{other} is none of postgres, mariadb, mysql"),
        };
        println!("| {database} | {lost} | {claims} | {refused} |");
        failed |= lost + refused > 0;
    }
    Ok(ExitCode::from(u8::from(failed)))
}

async fn on<S: Rig>(args: &FullPoolArgs) -> Result<Outcome> {
    let server = PrivateServer::start(S::CODE, &Settings::default()).await?;
    answers::<S>(&server.url).await?;
    let site = Site::Private(Box::new(server));
    let (url, _) = site.database::<S>("lockkit_torture_full_pool").await?;
    prepare::<S>(&url).await?;
    starve::<S>(&url, args).await
}

async fn starve<S: Rig>(url: &str, args: &FullPoolArgs) -> Result<Outcome> {
    let pool = PoolOptions::<S::DB>::new().max_connections(args.connections).connect(url).await?;
    let leases = Leases::builder(pool.clone()).ttl(Duration::from_millis(args.ttl_ms));
    let leases = if args.without_own_connections { leases.own_connections(0) } else { leases };
    let leases = leases.build()?;
    let mut held = Vec::new();
    for number in 0..HELD {
        held.push(leases.lease(format!("held/{number}")).acquire().await?);
    }

    let row = Kind::ALL[0].account(0);
    let outside = PoolOptions::<S::DB>::new().max_connections(1).connect(url).await?;
    let mut locked = lockkit::begin(&outside).await?;
    S::lock_row(&mut locked, row, Duration::from_secs(5)).await?;
    let began = Instant::now();
    let end = began + Duration::from_secs(args.seconds);
    let mut working = JoinSet::new();
    for _ in 0..args.tasks {
        let pool = pool.clone();
        working.spawn(async move {
            while Instant::now() < end {
                // A task that got no connection, or not the row, tries again.
                let Ok(mut tx) = lockkit::begin(&pool).await else { continue };
                drop(S::lock_row(&mut tx, row, Duration::from_secs(60)).await);
            }
        });
    }
    let mut holding = JoinSet::new();
    for mut lease in held {
        let leases = leases.clone();
        holding.spawn(async move {
            let mut lost = 0;
            while let Ok(reason) = timeout_at(end, lease.lost()).await {
                eprintln!("{}: `{}` was lost after {:?}: {reason}", S::NAME, lease.key(), began.elapsed());
                lost += 1;
                let key = lease.key().clone();
                lease = loop {
                    match leases.lease(key.clone()).wait(Duration::from_secs(5)).acquire().await {
                        Ok(lease) => break lease,
                        Err(_) if Instant::now() < end => sleep(Duration::from_millis(100)).await,
                        Err(_) => return lost,
                    }
                };
            }
            lost
        });
    }
    let mut outcome = Outcome::default();
    while Instant::now() < end {
        outcome.claims += 1;
        match leases.lease("job").wait(Duration::ZERO).acquire().await {
            Ok(lease) => drop(lease.release().await),
            Err(err) => {
                eprintln!("{}: refused after {:?}: {err}", S::NAME, began.elapsed());
                outcome.refused += 1;
            }
        }
        sleep(Duration::from_secs(1)).await;
    }
    outcome.lost = holding.join_all().await.into_iter().sum();
    locked.rollback().await?;
    working.abort_all();
    Ok(outcome)
}
