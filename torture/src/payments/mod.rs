//! A service that takes payments over HTTP, and clients that repeat a request until it is answered. Processes of the
//! service are killed, and connections to the database are cut in the COMMIT. Each key must be charged once, and all of
//! its clients must get the same bytes.

mod clients;
mod fleet;
mod oracle;
mod service;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use lockkit_store_servers::folder_for_data;
use sqlx::pool::PoolOptions;
use support::{MariaDb, MySql, PlainSql, Postgres, Sqlite};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

pub(crate) use self::service::{ServiceArgs, run as serve};

use self::clients::Clients;
use self::fleet::Fleet;
use self::oracle::Record;
use self::service::Handler;
use crate::lane::Site;
use crate::oracle::Violation;
use crate::proxy::{Proxy, Weather};
use crate::rig::{Rig, answers, connect};
use crate::server::{PrivateServer, Settings};

#[derive(Args, Clone, Debug)]
pub(crate) struct PaymentsArgs {
    /// The databases: postgres, mariadb, mysql, sqlite.
    #[arg(long, value_delimiter = ',', default_values = ["postgres", "mariadb", "mysql", "sqlite"])]
    databases: Vec<String>,
    /// How many clients pay.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// How many clients share a key, at the same time; a run for each number.
    #[arg(long, value_delimiter = ',', default_values = ["1", "3"], value_parser = clap::value_parser!(u32).range(1..))]
    sharing: Vec<u32>,
    /// How often a process of the service is killed in each run.
    #[arg(long, default_value_t = 10)]
    kills: u32,
    /// How many processes the service has.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    processes: u32,
    /// How often each run is repeated.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    handler: Handler,
    clients: u32,
    sharing: u32,
    kills: u32,
    processes: u32,
}

/// What came of it.
#[derive(Debug)]
struct Outcome {
    keys: u32,
    requests: u64,
    cut: u32,
    charges: usize,
    violations: Vec<Violation>,
}

/// One in so many COMMITs is cut before the server gets it, and as many before the client hears of it.
const CUT: u32 = 8;
/// How long a connection stays silent whose COMMIT was answered to nobody: longer than a client waits.
const SILENCE: Duration = Duration::from_secs(2);

/// Runs both handlers on one database after the other. The exit code is 1 if lockkit's charged a key twice or broke
/// another promise, and 2 if the one by hand did not.
pub(crate) async fn run(args: PaymentsArgs) -> Result<ExitCode> {
    println!("| handler | database | clients | keys | requests | kills | COMMITs cut | charges | violations |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    for database in &args.databases {
        let verdict = match database.as_str() {
            Postgres::CODE => on::<Postgres>(&args).await?,
            MariaDb::CODE => on::<MariaDb>(&args).await?,
            MySql::CODE => on::<MySql>(&args).await?,
            Sqlite::CODE => on::<Sqlite>(&args).await?,
            other => bail!("{other} is none of postgres, mariadb, mysql, sqlite"),
        };
        if verdict != ExitCode::SUCCESS {
            code = verdict;
        }
    }
    Ok(code)
}

async fn on<S: Rig>(args: &PaymentsArgs) -> Result<ExitCode> {
    if let Some(reason) = S::left_out() {
        println!("\nLeft out on {}: {reason}\n", S::NAME);
        return Ok(ExitCode::SUCCESS);
    }
    let site = if S::HAS_SERVER {
        let server = PrivateServer::start(S::CODE, &Settings::default()).await?;
        answers::<S>(&server.url).await?;
        Site::Private(Box::new(server))
    } else {
        Site::Folder(tempfile::tempdir_in(folder_for_data())?)
    };
    let mut code = ExitCode::SUCCESS;
    let mut number = 0;
    for _ in 0..args.rounds {
        for &sharing in &args.sharing {
            for handler in [Handler::Key, Handler::ByHand] {
                number += 1;
                let PaymentsArgs { clients, kills, processes, .. } = *args;
                let plan = Plan { handler, clients, sharing, kills, processes };
                let outcome = pay::<S>(&site, plan, &format!("lockkit_payments_{number}")).await?;
                println!("{}", line(S::NAME, plan, &outcome));
                let doubles = outcome.violations.iter().filter(|it| it.oracle == oracle::DOUBLE).count();
                match handler {
                    Handler::Key => {
                        for violation in outcome.violations.iter().take(5) {
                            println!("  {}: {}", violation.oracle, violation.text);
                            code = ExitCode::FAILURE;
                        }
                    }
                    Handler::ByHand if doubles == 0 => {
                        println!("VOID: the control charged no key twice, so the run proves nothing.");
                        code = ExitCode::from(2);
                    }
                    Handler::ByHand => {}
                }
            }
        }
    }
    Ok(code)
}

fn line(database: &str, plan: Plan, outcome: &Outcome) -> String {
    let Plan { handler, clients, sharing: _, kills, processes: _ } = plan;
    let Outcome { keys, requests, cut, charges, violations } = outcome;
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for violation in violations {
        *found.entry(violation.oracle).or_default() += 1;
    }
    let found: Vec<_> = found.into_iter().map(|(oracle, times)| format!("{times} × {oracle}")).collect();
    let found = if found.is_empty() { "0".to_owned() } else { found.join(", ") };
    format!(
        "| {} | {database} | {clients} | {keys} | {requests} | {kills} | {cut} | {charges} | {found} |",
        handler.name()
    )
}

/// One run, from an empty database to the verdict.
async fn pay<S: Rig>(site: &Site, plan: Plan, name: &str) -> Result<Outcome> {
    let Plan { handler, clients, sharing, kills, processes } = plan;
    let keys = clients.div_ceil(sharing);
    let (url, workers) = site.database::<S>(name).await?;
    prepare::<S>(&url).await?;
    let proxy = if S::HAS_SERVER { Some(Proxy::start(&workers, SILENCE).await?) } else { None };
    if let Some(proxy) = &proxy {
        proxy.set(Weather { commits_cut: Some(CUT), commits_lost: Some(CUT), ..Weather::default() });
    }
    let through = proxy.as_ref().map_or(&*workers, Proxy::url);
    let mut fleet = Fleet::start(S::CODE, through, handler, processes).await?;

    // The clients come in waves, one before each kill and one after the last, and a kill comes when half of its wave
    // was answered: it always meets requests, and the next wave meets what it has left.
    let asking = Rc::new(Clients::new(fleet.addresses())?);
    let (killed, waves) = watch::channel(0);
    let (done, mut are_done) = watch::channel(0);
    let mut paying = Vec::new();
    for client in 0..clients {
        let (asking, mut waves, done) = (Rc::clone(&asking), waves.clone(), done.clone());
        paying.push(spawn_local(async move {
            let wave = client * (kills + 1) / clients;
            waves.wait_for(|killed| *killed >= wave).await?;
            let key = client / sharing;
            let reply = asking.pay(key).await;
            done.send_modify(|done| *done += 1);
            anyhow::Ok((key, reply))
        }));
    }
    for kill in 0..kills {
        let half = clients * (2 * kill + 1) / (2 * (kills + 1));
        are_done.wait_for(|done| *done >= half).await?;
        fleet.kill(kill % processes).await?;
        killed.send_replace(kill + 1);
        fleet.restart(kill % processes).await?;
    }
    let mut record = Record { keys, ..Record::default() };
    for reply in paying {
        record.answers.push(reply.await??);
    }

    // All is well now, and each key is asked for once more, by another client.
    if let Some(proxy) = &proxy {
        proxy.set(Weather::default());
    }
    let others = Clients::new(fleet.addresses())?;
    for key in 0..keys {
        record.again.push((key, others.pay(key).await));
    }
    record.ended = fleet.finish().await;
    let requests = asking.requests() + others.requests();
    let cut = proxy.as_ref().map_or(0, |it| it.commits_cut() + it.commits_lost());
    drop(proxy);
    read_database::<S>(&url, handler, &mut record).await?;
    Ok(Outcome { keys, requests, cut, charges: record.charges.len(), violations: oracle::judge(&record) })
}

/// lockkit's tables and the service's own.
async fn prepare<S: Rig>(url: &str) -> Result<()> {
    let pool = PoolOptions::<S::DB>::new().max_connections(1).connect(&S::unlimited(url)?).await?;
    lockkit::migrate(&pool).await?;
    let mut conn = pool.acquire().await?;
    for table in service::TABLES {
        S::execute(&mut conn, table).await?;
    }
    drop(conn);
    pool.close().await;
    Ok(())
}

/// Adds what the database says to the record.
async fn read_database<S: Rig>(url: &str, handler: Handler, record: &mut Record) -> Result<()> {
    let mut conn = connect::<S>(url).await?;
    // A server may need a moment to see that its client is gone.
    let deadline = Instant::now() + Duration::from_secs(5);
    record.left = loop {
        let left = S::leftovers(&mut conn).await.unwrap_or_else(|err| vec![err.to_string()]);
        if left.is_empty() || Instant::now() > deadline {
            break left;
        }
        sleep(Duration::from_millis(100)).await;
    };
    for row in S::DB::fetch_texts(&mut conn, "SELECT CONCAT_WS(' ', name, id) FROM payment").await? {
        let row = row.unwrap_or_default();
        let (key, payment) = row.split_once(' ').unwrap_or_default();
        record.charges.push((key.to_owned(), payment.parse()?));
    }
    if handler == Handler::Key {
        let count = async |conn: &mut _, is: &str| {
            let rows = format!("SELECT COUNT(*) FROM lockkit_answer WHERE answer {is}");
            anyhow::Ok(S::fetch_i64(conn, &rows).await?.unwrap_or(0))
        };
        record.stored = Some((count(&mut conn, "IS NOT NULL").await?, count(&mut conn, "IS NULL").await?));
    }
    Ok(())
}
