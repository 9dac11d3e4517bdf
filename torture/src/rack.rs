//! The runs: which faults on which databases, in which order, and what is written at the end.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use lockkit_store_servers::folder_for_data;
use support::{Galera, MariaDb, MySql, Postgres, Sqlite};
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use url::Url;

use crate::cluster::{Cluster, Engine};
use crate::faults::Fault;
use crate::lane::{self, Plan, Site};
use crate::probes::{self, Found};
use crate::report::{Report, Row, lacks_controls};
use crate::rig::{Rig, answers, nodes};
use crate::server::{PrivateServer, Settings};

#[derive(Args, Clone, Debug)]
struct Common {
    /// The databases: postgres, mariadb, mysql, sqlite, and galera, which is three nodes of MariaDB; etcd, which gets
    /// its probes alone. Clusters whose leader changes, in the long form: patroni, patroni-sync, group (of MySQL, with
    /// one primary) and group-multi (with three). pgpool gets probes alone: pgpool-II before a standby that lags.
    #[arg(long, value_delimiter = ',', default_values = ["postgres", "mariadb", "mysql", "galera", "sqlite", ETCD])]
    databases: Vec<String>,
    /// How many worker processes compete.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=32))]
    processes: u32,
    /// How long a lease lives without a renewal, in milliseconds.
    #[arg(long, default_value_t = 700, value_parser = clap::value_parser!(u64).range(200..))]
    ttl_ms: u64,
    /// How many databases are tortured at once.
    #[arg(long, default_value_t = 2)]
    at_once: usize,
    /// Where the timelines and the report for machines are written.
    #[arg(long, default_value = "target/torture")]
    out: PathBuf,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct QuickArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct LongArgs {
    #[command(flatten)]
    common: Common,
    /// An administrator's URL of a server of yours, which gets the faults that need no power over it. It gets databases
    /// named `lockkit_torture_…`, which are deleted.
    #[arg(long)]
    url: Option<String>,
    /// Which faults; all of them by default.
    #[arg(long, value_delimiter = ',')]
    faults: Vec<Fault>,
    /// Only the faults.
    #[arg(long)]
    without_probes: bool,
    #[arg(long, default_value_t = 20.0)]
    seconds_per_fault: f64,
    /// How long the workers have to recover from each fault.
    #[arg(long, default_value_t = 9.0)]
    seconds_to_heal: f64,
}

/// A fault, how many seconds it lasts, and how many there are to heal.
type Turn = (Fault, f64, f64);

const QUICK: [Turn; 8] = [
    (Fault::Stop, 6.0, 0.0),
    (Fault::Kill, 5.0, 0.0),
    (Fault::LostCommits, 4.0, 0.0),
    (Fault::HalfOpen, 5.0, 9.0),
    (Fault::Restart, 4.0, 4.0),
    (Fault::Terminate, 4.0, 0.0),
    (Fault::Abort, 4.0, 0.0),
    (Fault::Drop, 4.0, 0.0),
];

/// As the command line names it.
const ETCD: &str = "etcd";
const PGPOOL: &str = "pgpool";

/// How often the controls get another lane if they were not violated.
const AGAIN: u32 = 2;

/// How often the start of a server is tried again.
const RESTARTS: u32 = 2;

/// A run on one database.
struct Rack {
    common: Common,
    turns: Vec<Turn>,
    /// A server of its own for each fault.
    fresh: bool,
    probes: bool,
    url: Option<String>,
    bar: ProgressBar,
}

pub(crate) async fn quick(args: QuickArgs) -> Result<ExitCode> {
    run(args.common, QUICK.to_vec(), false, true, None).await
}

pub(crate) async fn long(args: LongArgs) -> Result<ExitCode> {
    let LongArgs { mut common, url, faults, without_probes, seconds_per_fault, seconds_to_heal } = args;
    if let Some(url) = &url {
        common.databases = vec![code_of(url)?.to_owned()];
    }
    let mut faults = if faults.is_empty() { Fault::value_variants().to_vec() } else { faults };
    // Without it the second control has nothing to be violated by.
    if !faults.contains(&Fault::Stop) {
        faults.insert(0, Fault::Stop);
    }
    let turns = faults.into_iter().map(|fault| (fault, seconds_per_fault, seconds_to_heal)).collect();
    run(common, turns, true, !without_probes, url).await
}

async fn run(common: Common, turns: Vec<Turn>, fresh: bool, probes: bool, url: Option<String>) -> Result<ExitCode> {
    std::fs::create_dir_all(&common.out)?;
    let bar = ProgressBar::new(((turns.len() + usize::from(probes)) * common.databases.len()) as u64);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {msg}")?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let (out, databases) = (common.out.clone(), common.databases.clone());
    let at_once = Rc::new(Semaphore::new(common.at_once.max(1)));
    let rack = Rc::new(Rack { common, turns, fresh, probes, url, bar: bar.clone() });
    let mut running = Vec::new();
    for database in databases {
        let (rack, at_once) = (Rc::clone(&rack), Rc::clone(&at_once));
        running.push(spawn_local(async move {
            let _turn = at_once.acquire().await?;
            match (database.as_str(), Engine::of(&database)) {
                (_, Some(engine)) if engine.is_patroni() => Box::pin(rack.torture::<Postgres>(Some(engine))).await,
                (_, Some(engine)) => Box::pin(rack.torture::<MySql>(Some(engine))).await,
                (Postgres::CODE, _) => Box::pin(rack.torture::<Postgres>(None)).await,
                (MariaDb::CODE, _) => Box::pin(rack.torture::<MariaDb>(None)).await,
                (MySql::CODE, _) => Box::pin(rack.torture::<MySql>(None)).await,
                (Sqlite::CODE, _) => Box::pin(rack.torture::<Sqlite>(None)).await,
                (Galera::CODE, _) => Box::pin(rack.torture::<Galera>(None)).await,
                (ETCD, _) => Ok(rack.probe_alone(ETCD, probes::of_etcd()).await),
                (PGPOOL, _) => Ok(match probes::pgpool_left_out() {
                    Some(reason) => vec![Row::left_out(PGPOOL, "all", reason)],
                    None => rack.probe_alone(PGPOOL, probes::of_pgpool()).await,
                }),
                (other, _) => bail!(
                    "{other} is none of postgres, mariadb, mysql, sqlite, galera, etcd, patroni, patroni-sync, group, \
                     group-multi, pgpool"
                ),
            }
        }));
    }
    let mut report = Report::default();
    for rows in running {
        report.rows.extend(rows.await??);
    }
    bar.finish_and_clear();
    report.finish(&out)
}

impl Rack {
    /// All turns on one database, or on a cluster of it.
    async fn torture<S: Rig>(&self, engine: Option<Engine>) -> Result<Vec<Row>> {
        let database = engine.map_or(S::NAME, Engine::name);
        if let Some(reason) = S::left_out().or_else(|| engine.and_then(Engine::left_out)) {
            self.bar.inc(self.turns.len() as u64);
            return Ok(vec![Row::left_out(database, "all", &reason)]);
        }
        let mut rows = Vec::new();
        let mut site = None;
        // What they look for has nothing to do with a second node.
        if self.probes && S::NODES == 1 && engine.is_none() {
            self.bar.set_message(format!("{}: probes", S::NAME));
            match self.probe::<S>(&mut site).await {
                Ok(found) => rows.extend(found.into_iter().map(|it| Row::probe(S::NAME, it))),
                Err(err) => rows.push(Row::broken(S::NAME, "probes", &format!("{err:#}"))),
            }
            self.bar.inc(1);
        }
        let mut turns: VecDeque<_> = self.turns.iter().copied().collect();
        let (mut again, mut restarts) = (AGAIN, RESTARTS);
        let mut number = 0;
        loop {
            let Some((fault, lasts, heals)) = turns.pop_front() else {
                if again == 0 || !lacks_controls(&rows) {
                    break;
                }
                // Whether a stop meets the control in the right moment is luck.
                again -= 1;
                turns.push_back((Fault::Stop, 6.0, 0.0));
                self.bar.inc_length(1);
                continue;
            };
            number += 1;
            self.bar.set_message(format!("{database}: {}", fault.name()));
            let private = self.url.is_none();
            let row = if let Some(reason) = fault.left_out::<S>(private, engine) {
                Row::left_out(database, &fault.name(), reason)
            } else {
                if self.fresh {
                    site = None;
                }
                let plan = Plan {
                    fault,
                    lasts: Duration::from_secs_f64(lasts),
                    heals: Duration::from_secs_f64(heals),
                    processes: self.common.processes,
                    ttl: Duration::from_millis(self.common.ttl_ms),
                };
                let name = format!("lockkit_torture_{}_{number}", std::process::id());
                match self.one::<S>(&mut site, engine, &plan, &name).await {
                    Ok(lane) => Row::of(&lane),
                    // A server that could not be started says nothing about lockkit.
                    Err(_) if site.is_none() && restarts > 0 => {
                        restarts -= 1;
                        turns.push_front((fault, lasts, heals));
                        continue;
                    }
                    Err(err) => {
                        // The next lane gets another server.
                        site = None;
                        Row::broken(database, &fault.name(), &format!("{err:#}"))
                    }
                }
            };
            rows.push(row);
            self.bar.inc(1);
        }
        Ok(rows)
    }

    /// The probes of what gets nothing else.
    async fn probe_alone(&self, name: &str, probes: impl Future<Output = Vec<Found>>) -> Vec<Row> {
        self.bar.inc(self.turns.len() as u64);
        if !self.probes {
            return Vec::new();
        }
        self.bar.set_message(format!("{name}: probes"));
        let found = Box::pin(probes).await;
        self.bar.inc(1);
        found.into_iter().map(|it| Row::probe(name, it)).collect()
    }

    async fn probe<S: Rig>(&self, site: &mut Option<Site>) -> Result<Vec<Found>> {
        let site = self.site::<S>(site, None, &Settings::default()).await?;
        let name = format!("lockkit_torture_{}_probes", std::process::id());
        let (url, _) = site.database::<S>(&name).await?;
        let found = probes::all::<S>(&url).await;
        site.forget::<S>(&name).await?;
        found
    }

    async fn one<S: Rig>(
        &self,
        site: &mut Option<Site>,
        engine: Option<Engine>,
        plan: &Plan,
        name: &str,
    ) -> Result<lane::Lane> {
        let settings = if self.fresh { plan.fault.settings::<S>() } else { Settings::default() };
        lane::run::<S>(self.site::<S>(site, engine, &settings).await?, plan, name).await
    }

    /// The site, made if there is none.
    async fn site<'a, S: Rig>(
        &self,
        site: &'a mut Option<Site>,
        engine: Option<Engine>,
        settings: &Settings,
    ) -> Result<&'a mut Site> {
        if site.is_none() {
            *site = Some(match (&self.url, engine) {
                (Some(url), _) => Site::Given(url.clone()),
                (None, Some(engine)) => Site::Cluster(Box::new(Cluster::start(engine).await?)),
                (None, None) if S::HAS_SERVER => {
                    let server = PrivateServer::start(S::CODE, settings).await?;
                    for node in nodes::<S>(&server.url)? {
                        answers::<S>(&node).await?;
                    }
                    Site::Private(Box::new(server))
                }
                (None, None) => Site::Folder(tempfile::tempdir_in(folder_for_data())?),
            });
        }
        site.as_mut().context("a site")
    }
}

/// Which database a URL is of.
fn code_of(url: &str) -> Result<&'static str> {
    match Url::parse(url)?.scheme() {
        "postgres" | "postgresql" => Ok(Postgres::CODE),
        "mariadb" => Ok(MariaDb::CODE),
        "mysql" => Ok(MySql::CODE),
        other => bail!("{other} is none of postgres, mariadb, mysql"),
    }
}
