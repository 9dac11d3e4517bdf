//! One lane: a fresh database, a crew of workers, one fault, time to heal, and the oracles' verdict.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use lockkit::Leases;
use sqlx::pool::PoolOptions;
use support::PgBouncer;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::clock::{self, SECOND};
use crate::cluster::{Cluster, Engine};
use crate::crew::{Crew, Recipe};
use crate::event::Kind;
use crate::faults::{Fault, Mark, Stage};
use crate::history::{Balance, Entry, History, sections};
use crate::oracle::{self, Violation};
use crate::proxy::{Proxy, Weather};
use crate::rig::{Rig, catch_up, connect, execute, in_database, make_tables, nodes};
use crate::server::PrivateServer;
use crate::worker::{fill_stock, left_in_stock};

/// How many workers a lane can have had, with all that replaced others.
const WORKERS: u32 = 400;
/// How long the workers compete before the fault begins.
const WARM_UP: Duration = Duration::from_millis(300);
/// How long the workers have to recover at most, in nanoseconds. The lane goes on sooner if they have.
const RECOVERY: u64 = 40 * SECOND;

/// What a lane is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) fault: Fault,
    pub(crate) lasts: Duration,
    pub(crate) heals: Duration,
    pub(crate) processes: u32,
    pub(crate) ttl: Duration,
}

/// Where the database is.
pub(crate) enum Site {
    Private(Box<PrivateServer>),
    Cluster(Box<Cluster>),
    /// A server that is somebody else's, by an administrator's URL.
    Given(String),
    /// `SQLite`, in a folder.
    Folder(TempDir),
}

/// What came of a lane.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) database: &'static str,
    pub(crate) fault: Fault,
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) history: History,
    pub(crate) marks: Vec<Mark>,
    pub(crate) violations: Vec<Violation>,
    /// Violations of the two controls.
    pub(crate) controls: (usize, usize),
}

impl Site {
    pub(crate) fn is_private(&self) -> bool {
        !matches!(self, Self::Given(_))
    }

    fn engine(&self) -> Option<Engine> {
        match self {
            Self::Cluster(cluster) => Some(cluster.engine),
            _ => None,
        }
    }

    /// Makes an empty database, and returns the administrator's and the workers' URLs of it.
    pub(crate) async fn database<S: Rig>(&self, name: &str) -> Result<(String, String)> {
        let server = match self {
            Self::Private(server) => &server.url,
            Self::Given(url) => url,
            Self::Cluster(cluster) => {
                let maintenance = if S::CODE == support::Postgres::CODE { "postgres" } else { "" };
                execute::<S>(&cluster.url(maintenance).await?, &format!("CREATE DATABASE {name}")).await?;
                let url = cluster.url(name).await?;
                return Ok((url.clone(), url));
            }
            Self::Folder(folder) => {
                let url = format!("sqlite://{}?mode=rwc", folder.path().join(name).display());
                execute::<S>(&url, "PRAGMA journal_mode = WAL").await?;
                return Ok((url.clone(), url));
            }
        };
        execute::<S>(server, &format!("CREATE DATABASE {name}")).await?;
        let url = in_database(server, name)?;
        let mut workers = url.clone();
        if S::CODE != support::Postgres::CODE && self.is_private() {
            // Somebody whom `read_only` and `max_connections` hold up, unlike the administrator.
            execute::<S>(server, "CREATE USER IF NOT EXISTS worker@'127.0.0.1'").await?;
            execute::<S>(server, &format!("GRANT ALL ON {name}.* TO worker@'127.0.0.1'")).await?;
            let mut url = url::Url::parse(&url)?;
            url.set_username("worker").ok().context("a URL with a user")?;
            workers = url.into();
        }
        Ok((url, workers))
    }

    /// Deletes a database of a server that is somebody else's. The others go with their servers.
    pub(crate) async fn forget<S: Rig>(&self, name: &str) -> Result<()> {
        if let Self::Given(server) = self {
            execute::<S>(server, &format!("DROP DATABASE IF EXISTS {name}")).await?;
        }
        Ok(())
    }
}

/// Runs a lane from an empty database to the verdict.
pub(crate) async fn run<S: Rig>(site: &mut Site, plan: &Plan, name: &str) -> Result<Lane> {
    let Plan { fault, lasts, heals, processes, ttl } = *plan;
    let (url, workers) = site.database::<S>(name).await?;
    prepare::<S>(&url).await.context("making the tables")?;
    catch_up::<S>(&url).await?;
    let led = match site {
        Site::Cluster(cluster) => {
            cluster.catch_up().await?;
            cluster.open(name, ttl).await?
        }
        _ => Vec::new(),
    };
    let engine = site.engine();
    let pooler = if fault == Fault::PgBouncer {
        let url = workers.clone();
        Some(tokio::task::spawn_blocking(move || PgBouncer::start(&url, "transaction")).await?)
    } else {
        None
    };
    // The workers of a cluster use all of its nodes.
    let proxy = if S::HAS_SERVER && S::NODES == 1 && engine.is_none() {
        let url = pooler.as_ref().map_or(&*workers, |it| it.url());
        Some(Proxy::start(url, ttl * 3).await?)
    } else {
        None
    };
    let mut recipe = Recipe {
        server: S::CODE,
        urls: match &proxy {
            Some(proxy) => vec![proxy.url().to_owned()],
            None if !led.is_empty() => led,
            None if S::NODES > 1 => nodes::<S>(&workers)?,
            None => vec![workers],
        },
        ttl,
        pool: 6,
        own: 2,
        kinds: Kind::ALL.to_vec(),
        drops: false,
    };
    if S::HAS_SERVER {
        fault.adapt(&mut recipe);
    } else {
        recipe.kinds.retain(|it| *it != Kind::Session);
        fault.adapt(&mut recipe);
    }

    let began = clock::now();
    let mut crew = Crew::new(recipe);
    for _ in 0..processes {
        crew.add().await?;
    }
    sleep(WARM_UP).await;
    let (server, cluster) = match site {
        Site::Private(server) => (Some(&mut **server), None),
        Site::Cluster(cluster) => (None, Some(&mut **cluster)),
        _ => (None, None),
    };
    let mut stage = Stage { server, cluster, proxy: proxy.as_ref(), crew: &mut crew, url, ttl, marks: Vec::new() };
    stage.inject::<S>(fault, lasts).await?;
    let (mut url, mut marks) = (stage.url, stage.marks);
    if let Some(proxy) = &proxy {
        proxy.set(Weather::default());
    }
    let healed = clock::now();
    sleep(heals).await;
    let is_healing = !heals.is_zero() && fault.heals();
    // A busy machine needs longer. How long is reported; that it ends is judged.
    while is_healing && clock::now() < healed + RECOVERY && !have_recovered(&crew, healed) {
        sleep(Duration::from_millis(250)).await;
    }
    let ended = clock::now();
    crew.finish().await;
    if !heals.is_zero() {
        marks.push(Mark { from: healed, to: healed, text: "healed".into() });
    }

    // What a worker had goes with its connections and its leases' ttl.
    drop(proxy);
    drop(pooler);
    if let Site::Cluster(cluster) = site {
        cluster.close();
        cluster.catch_up().await?;
        url = cluster.url(name).await?;
    }
    // An expiry that a clock step left far ahead ends a ttl after the first look that follows the step.
    drop(held::<S>(&url).await);
    sleep(ttl + Duration::from_millis(300)).await;
    let events = crew.events();
    let mut history = History {
        sections: sections(&events, &crew.lives),
        lives: std::mem::take(&mut crew.lives),
        panics: crew.panics(),
        began,
        healing: is_healing.then_some((healed, ended)),
        ttl: u64::try_from(ttl.as_nanos())?,
        ended,
        ..History::default()
    };
    read_database::<S>(&url, &mut history).await.context("reading what the workers left")?;
    let violations = oracle::judge(&history, fault.excuses::<S>(engine));
    let controls = oracle::controls(&history);
    site.forget::<S>(name).await?;
    let database = engine.map_or(S::NAME, Engine::name);
    Ok(Lane { database, fault, began, ended, history, marks, violations, controls })
}

/// Whether all workers have committed again since the heal.
fn have_recovered(crew: &Crew, healed: u64) -> bool {
    let history = History {
        sections: sections(&crew.events(), &crew.lives),
        lives: crew.lives.clone(),
        healing: Some((healed, clock::now())),
        ..History::default()
    };
    oracle::never_recovered(&history).is_empty()
}

/// lockkit's tables, the accounts and the stock.
pub(crate) async fn prepare<S: Rig>(url: &str) -> Result<()> {
    let pool = PoolOptions::<S::DB>::new().max_connections(2).connect(&S::unlimited(url)?).await?;
    lockkit::migrate(&pool).await?;
    let mut accounts: Vec<i64> =
        Kind::ALL.iter().flat_map(|kind| (0..kind.keys()).map(|key| kind.account(key))).collect();
    accounts.extend((1..WORKERS).map(|worker| Kind::Own.account(worker)));
    let mut conn = pool.acquire().await?;
    make_tables::<S>(&mut conn, &accounts).await?;
    drop(conn);
    fill_stock::<S>(&pool).await?;
    pool.close().await;
    Ok(())
}

/// The leases held now, a line each.
async fn held<S: Rig>(url: &str) -> Result<Vec<String>> {
    let options = PoolOptions::<S::DB>::new().max_connections(2).acquire_timeout(Duration::from_secs(10));
    let pool = options.connect(&S::unlimited(url)?).await.context("the server does not answer after the lane")?;
    let leases = Leases::builder(pool.clone()).sweep_every(None).build()?;
    let held = leases.list("").await?.iter().map(|it| format!("{it:?}")).collect();
    drop(leases);
    pool.close().await;
    Ok(held)
}

/// Adds what the database says to the history.
async fn read_database<S: Rig>(url: &str, history: &mut History) -> Result<()> {
    catch_up::<S>(url).await?;
    history.left_locked.extend(held::<S>(url).await?);
    // A server may need a moment to see that its client is gone.
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut conn = connect::<S>(url).await?;
    let left = loop {
        // MySQL cannot show every statement that it finds running.
        let left = S::leftovers(&mut conn).await.unwrap_or_else(|err| vec![err.to_string()]);
        if left.is_empty() || Instant::now() > deadline {
            break left;
        }
        sleep(Duration::from_millis(100)).await;
    };
    history.left_locked.extend(left);

    let sql = "SELECT CONCAT_WS(',', op, account, seen, fence) FROM ledger";
    for line in rows::<S>(&mut conn, sql).await? {
        let [op, account, seen, fence] = line[..] else { continue };
        history.ledger.push(Entry { op, account, seen, fence });
    }
    for line in rows::<S>(&mut conn, "SELECT CONCAT_WS(',', id, value, cents) FROM account").await? {
        let [account, value, cents] = line[..] else { continue };
        history.balances.push(Balance { account, value, cents });
    }
    let pool = PoolOptions::<S::DB>::new().max_connections(1).connect(url).await?;
    history.stock_left = left_in_stock::<S>(&pool).await.ok();
    pool.close().await;
    Ok(())
}

async fn rows<S: Rig>(conn: &mut <S::DB as sqlx::Database>::Connection, sql: &str) -> Result<Vec<Vec<i64>>> {
    let lines = <S::DB as support::PlainSql>::fetch_texts(conn, sql).await?;
    let numbers = |line: String| line.split(',').map(|it| Ok(it.parse()?)).collect();
    lines.into_iter().flatten().map(numbers).collect()
}

impl Lane {
    /// How often a lease was granted.
    pub(crate) fn acquisitions(&self) -> usize {
        let leases = self.history.sections.iter().filter(|it| it.kind.is_lease());
        leases.map(|it| it.granted.len()).sum()
    }

    /// How many sections committed, without those of the controls.
    pub(crate) fn committed(&self) -> usize {
        let accounts: Vec<_> = [Kind::NoLock, Kind::PlainCommit].map(|it| it.account(0)).into();
        let ops = self.history.ledger.iter().filter(|it| !accounts.contains(&it.account)).map(|it| it.op);
        ops.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// How often each answer was given, for the machines.
    pub(crate) fn answers(&self) -> BTreeMap<String, usize> {
        let mut answers = BTreeMap::new();
        for section in &self.history.sections {
            let class = section.answered.as_ref().map(|it| &it.2).or(section.failed.as_ref().map(|it| &it.1));
            let class = class.map_or("no answer", String::as_str);
            *answers.entry(format!("{}: {class}", section.kind.name())).or_default() += 1;
        }
        answers
    }

    pub(crate) fn seconds(&self) -> f64 {
        oracle::seconds(self.ended - self.began)
    }
}
