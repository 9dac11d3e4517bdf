//! Probes behind pgpool-II, which has a standby answer reads. The standby lags behind, and nothing that it says may
//! grant or confirm a lock.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lockkit::{Error, Fault, Fence, Leases, NamedLock, RowLock, SessionLock, Stock, Wait};
use lockkit_store_servers::folder_for_data;
use rustix::process::{Signal, kill_process};
use sqlx::{PgPool, pool::PoolOptions};
use support::{Postgres, Server as _, throwaway};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::event::Kind;
use crate::lane::prepare;
use crate::probes::{Found, Verdict, probe, told};
use crate::rig::{Rig, answers, execute};
use crate::server::{PrivateServer, Settings, pid};

/// What the locks of these probes are taken on.
const KEY: &str = "probe/pgpool";

/// Why there is no pgpool-II here.
pub(crate) fn left_out() -> Option<&'static str> {
    pgpool().is_none().then_some("not installed: apt-get install --no-install-recommends pgpool2")
}

fn pgpool() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|it| it.join("pgpool")).find(|it| it.is_file())
}

/// A primary, a standby that applies nothing any more, and pgpool-II.
struct Stand {
    /// By way of pgpool-II.
    behind: PgPool,
    /// On the primary.
    direct: PgPool,
    pgpool: Child,
    /// The standby and the primary.
    servers: [PrivateServer; 2],
    _folder: TempDir,
}

/// All probes behind pgpool-II.
pub(crate) async fn of_pgpool() -> Vec<Found> {
    let began = Instant::now();
    let stand = match Stand::start().await {
        Ok(stand) => stand,
        Err(err) => {
            let broken = Some(format!("it does not start: {err:#}"));
            return vec![Found { probe: "pgpool-II", seconds: began.elapsed().as_secs_f64(), broken }];
        }
    };
    vec![
        probe("a lease that the standby shows as free", leases(&stand)).await,
        probe("a lease that the standby shows as held", stolen(&stand)).await,
        probe("a named lock", named(&stand)).await,
        probe("a named lock of the standby", named_on_standby(&stand)).await,
        probe("a session lock", session(&stand)).await,
        probe("a row lock", row(&stand)).await,
        probe("a version that the standby shows as current", version(&stand)).await,
        probe("a fence that the standby has not", guard(&stand)).await,
        probe("stock that the standby shows as left", stock(&stand)).await,
    ]
}

/// `Err` if it was granted to two.
fn refused(what: &str, is_granted: bool) -> Verdict {
    if is_granted { Err(format!("{what} was granted beside its holder")) } else { Ok(()) }
}

async fn leases(stand: &Stand) -> Result<Verdict> {
    let (here, there) = (Leases::new(stand.direct.clone()), Leases::new(stand.behind.clone()));
    let held = here.lease(KEY).acquire().await?;
    let granted = there.lease(KEY).try_acquire().await?;
    let waited = there.lease(KEY).wait(Duration::from_millis(300)).acquire().await;
    let verdict = refused("the lease", granted.is_some() || waited.is_ok());
    held.release().await?;
    Ok(verdict)
}

/// The holder's own looks go to the standby, which has not heard of the theft.
async fn stolen(stand: &Stand) -> Result<Verdict> {
    let (here, there) = (Leases::new(stand.direct.clone()), Leases::new(stand.behind.clone()));
    let key = format!("{KEY}/stolen");
    for verifies in [true, false] {
        let old = there.lease(key.clone()).acquire().await?;
        here.steal(key.clone()).await?;
        let new = here.lease(key.clone()).acquire().await?;
        let mut tx = lockkit::begin(&stand.behind).await?;
        let told = if verifies {
            let verified = old.verify(&mut tx).await;
            tx.rollback().await?;
            verified
        } else {
            old.commit(tx).await
        };
        if told.is_ok() {
            return Ok(Err(format!("a stolen lease was confirmed; by `verify`: {verifies}")));
        }
        new.release().await?;
    }
    Ok(Ok(()))
}

async fn named(stand: &Stand) -> Result<Verdict> {
    let mut holder = lockkit::begin(&stand.direct).await?;
    NamedLock::new(KEY).lock(&mut *holder).await?;
    let mut tx = lockkit::begin(&stand.behind).await?;
    let locked = NamedLock::new(KEY).wait(Duration::from_millis(200)).lock(&mut *tx).await;
    Ok(refused("the named lock", locked.is_ok()))
}

async fn named_on_standby(stand: &Stand) -> Result<Verdict> {
    let pool = PgPool::connect(&stand.servers[0].url).await?;
    let mut tx = lockkit::begin(&pool).await?;
    for wait in [Wait::Never, Wait::Unbounded, Duration::from_secs(1).into()] {
        let locked = NamedLock::new(KEY).wait(wait).lock(&mut *tx).await;
        if !matches!(locked, Err(Error::Database { fault: Fault::ReadOnly, .. })) {
            return Ok(Err(format!("{wait:?}: {}", told(&locked))));
        }
    }
    Ok(Ok(()))
}

async fn session(stand: &Stand) -> Result<Verdict> {
    let _held = SessionLock::new(KEY).acquire(&stand.direct).await?;
    let granted = SessionLock::new(KEY).try_acquire(&stand.behind).await;
    Ok(refused("the session lock", matches!(granted, Ok(Some(_)))))
}

async fn row(stand: &Stand) -> Result<Verdict> {
    let row = || RowLock::table("account").by("id", Kind::Row.account(0)).wait(Duration::from_millis(200));
    let mut holder = lockkit::begin(&stand.direct).await?;
    row().lock(&mut *holder).await?;
    let mut tx = lockkit::begin(&stand.behind).await?;
    Ok(refused("the row", row().lock(&mut *tx).await.is_ok()))
}

async fn version(stand: &Stand) -> Result<Verdict> {
    let account = Kind::Version.account(0);
    let mut conn = stand.direct.acquire().await?;
    let current = Postgres::read_version(&mut conn, account).await?;
    Postgres::bump_version(&mut conn, account, current).await?;
    let mut conn = stand.behind.acquire().await?;
    let stale = Postgres::read_version(&mut conn, account).await?;
    let saved = Postgres::bump_version(&mut conn, account, stale).await;
    Ok(match saved {
        Err(Error::Conflict { .. }) => Ok(()),
        saved => Err(format!("a save of a stale version: {saved:?}")),
    })
}

async fn guard(stand: &Stand) -> Result<Verdict> {
    let pass = async |pool: &PgPool, fence: u64| {
        let mut tx = lockkit::begin(pool).await?;
        lockkit::guard(&mut *tx, "pgpool", KEY, Fence::from(fence)).await?;
        tx.commit().await
    };
    pass(&stand.direct, 20).await?;
    Ok(refused("the guard", pass(&stand.behind, 10).await.is_ok()))
}

async fn stock(stand: &Stand) -> Result<Verdict> {
    let stock = |pool: &PgPool| Stock::new(pool.clone(), "pgpool");
    let taken = stock(&stand.direct).take(1).await.map(drop);
    taken.context("the one piece")?;
    Ok(refused("a piece", stock(&stand.behind).take(1).await.is_ok()))
}

impl Stand {
    async fn start() -> Result<Self> {
        let primary = PrivateServer::start(Postgres::CODE, &Settings::default()).await?;
        answers::<Postgres>(&primary.url).await?;
        prepare::<Postgres>(&primary.url).await?;
        let direct = PgPool::connect(&primary.url).await?;
        Stock::new(direct.clone(), "pgpool").put(1).await?;
        // What was held once and is free.
        let leases = Leases::new(direct.clone());
        leases.lease(KEY).acquire().await?.release().await?;
        let standby = primary.replica(true).await?;
        let folder = tempfile::Builder::new()
            .prefix("lockkit-torture-pgpool-")
            .permissions(Permissions::from_mode(0o777)) // It runs as another user.
            .tempdir_in(folder_for_data())?;
        let (pgpool, url) = start_pgpool(&folder, [primary.port, standby.port]).await?;
        // Without a wait for the standby that stops now.
        execute::<Postgres>(&primary.url, "ALTER SYSTEM RESET synchronous_standby_names").await?;
        execute::<Postgres>(&primary.url, "SELECT pg_reload_conf()").await?;
        execute::<Postgres>(&standby.url, "SELECT pg_wal_replay_pause()").await?;
        let behind = PoolOptions::new().max_connections(8).connect(&url).await?;
        let stand = Self { behind, direct, pgpool, servers: [standby, primary], _folder: folder };
        stand.check().await?;
        Ok(stand)
    }

    /// Checks that the standby answers what is only read, and lags behind.
    async fn check(&self) -> Result<()> {
        let mut conn = self.direct.acquire().await?;
        Postgres::execute(&mut conn, "INSERT INTO ledger (op, account, seen, fence) VALUES (1, 1, 1, 1)").await?;
        let mut conn = self.behind.acquire().await?;
        let seen = Postgres::fetch_i64(&mut conn, "SELECT count(*) FROM ledger").await?;
        ensure!(seen == Some(0), "the primary has answered a read, so nothing would be tested");
        Ok(())
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // After SIGKILL its children would stay.
        if let Ok(pid) = pid(&self.pgpool) {
            let _ = kill_process(pid, Signal::INT);
        }
        let _ = self.pgpool.wait();
    }
}

/// Starts pgpool-II before a primary and a standby that gets all reads.
async fn start_pgpool(folder: &TempDir, backends: [u16; 2]) -> Result<(Child, String)> {
    let port = throwaway::free_ports(2)?;
    let control = port + 1;
    let here = folder.path().display();
    let backend = |(number, port): (usize, &u16)| {
        format!(
            "backend_hostname{number} = '127.0.0.1'\nbackend_port{number} = {port}\nbackend_weight{number} = {number}\n"
        )
    };
    let settings: String = backends.iter().enumerate().map(backend).collect();
    let settings = format!(
        "backend_clustering_mode = 'streaming_replication'\nload_balance_mode = on\nlisten_addresses = '127.0.0.1'\n\
         port = {port}\npcp_port = {control}\nunix_socket_directories = '{here}'\npcp_socket_dir = '{here}'\n\
         pid_file_name = '{here}/pid'\nlogdir = '{here}'\nsr_check_period = 0\nsr_check_user = 'root'\n\
         sr_check_database = 'postgres'\nhealth_check_period = 0\n\
         write_function_list = 'nextval,setval'\n{settings}" // So that it takes other functions for reads.
    );
    let file = folder.path().join("pgpool.conf");
    fs::write(&file, settings)?;
    let log = File::create_new(folder.path().join("log"))?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(pgpool().context("pgpool2 is not installed")?);
    command.args(["-n", "-f"]).arg(&file).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut child = command.spawn()?;
    let url = format!("postgres://root@127.0.0.1:{port}/postgres");
    let deadline = Instant::now() + Duration::from_secs(20);
    while execute::<Postgres>(&url, "SELECT 1").await.is_err() {
        let log = || fs::read_to_string(folder.path().join("log")).unwrap_or_default();
        ensure!(child.try_wait()?.is_none() && Instant::now() < deadline, "{}", log());
        sleep(Duration::from_millis(50)).await;
    }
    Ok((child, url))
}
