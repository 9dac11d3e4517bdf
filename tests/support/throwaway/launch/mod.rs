//! The command lines: how each server is set up in a folder and started, tuned for tests that lose nothing by a crash.

mod galera;
mod group;
mod mariadb;
mod mysql;
mod pgbouncer;
mod postgres;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, io};

use lockkit_store_servers::is_free;

pub use self::group::{REPLICATOR, forget_its_number, make_member};
pub(crate) use self::pgbouncer::prepare as prepare_pgbouncer;

/// A server that is ready to be started.
#[derive(Debug)]
pub struct Launch {
    /// One for each node of a cluster: the first listens on the port that was given, the others on those that follow
    /// it. Each is started when the one before it listens. A setting that is appended replaces the same one before it.
    pub commands: Vec<Command>,
    /// The administrator's URL; the first node's.
    pub url: String,
    /// The signal that ends the server at once, whatever becomes of the data.
    pub stop: &'static str,
}

/// How many ports the server needs, which follow each other.
pub fn ports(name: &str) -> u16 {
    match name {
        "galera" => galera::PORTS,
        "group" => group::PORTS,
        _ => 1,
    }
}

/// How many nodes a throwaway Galera cluster has.
pub const GALERA_NODES: u16 = galera::NODES;

/// How many members a throwaway replication group has.
pub const GROUP_MEMBERS: u16 = group::MEMBERS;

/// Sets a server up in an empty folder: `postgres`, `mariadb`, `mysql`, `galera` or `group`.
///
/// # Errors
/// If the server's programs are missing or fail.
pub fn prepare(name: &str, folder: &Path, port: u16) -> io::Result<Launch> {
    match name {
        "postgres" => postgres::prepare(folder, port),
        "mariadb" => mariadb::prepare(folder, port),
        "mysql" => mysql::prepare(folder, port),
        "galera" => galera::prepare(folder, port),
        "group" => group::prepare(folder, port),
        _ => Err(io::Error::other(format!("unknown server {name}"))),
    }
}

/// A port below those that the kernel gives to outgoing connections, which could take it before the server does.
pub(crate) fn free_port() -> io::Result<u16> {
    free_ports(1)
}

/// How many ports a server has for itself.
const BLOCK: u32 = 20;

/// The first of so many free ports that follow each other.
///
/// # Errors
/// If there is none.
pub fn free_ports(count: u16) -> io::Result<u16> {
    // Neighbours start at the same time, and none of them has its ports yet: each looks among ports of its own.
    let first = 20_000 + u16::try_from(std::process::id() % 500 * BLOCK).expect("BUG: less than 10,000");
    (first..first + 1_000)
        .step_by(BLOCK as usize)
        .find(|port| (*port..port + count).all(is_free))
        .ok_or_else(|| io::Error::other("no free port"))
}

/// A command that gets the signal `stop` when the supervisor dies, and logs into the supervisor's log.
///
/// The signal is sent when the thread that started the command ends, so that must be the supervisor's main thread.
fn supervised(program: &Path, stop: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", stop, "--"]).arg(program);
    command.stdin(Stdio::null()).stdout(io::stderr());
    command
}

fn run(command: &mut Command) -> io::Result<()> {
    // Only its failure is worth reading.
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(io::Error::other(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&text))))
}

/// Finds a program in one of the folders or the `PATH`.
fn find(program: &str, folders: &[PathBuf]) -> io::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut candidates = folders.iter().cloned().chain(env::split_paths(&path)).map(|folder| folder.join(program));
    candidates.find(|candidate| candidate.is_file()).ok_or_else(|| {
        io::Error::other(format!(
            "{program} is not installed. Run tests/run, or: \
             apt-get install --no-install-recommends postgresql pgbouncer mariadb-server-core mariadb-client-core \
             galera-4 rsync lsof (wsrep_sst_rsync and wsrep_sst_common are in mariadb-server, which need not be \
             installed)"
        ))
    })
}

/// `--name=path`, as the servers of the `MySQL` family want it.
fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

/// Where `tests/run` unpacks what it does not install.
fn cache() -> PathBuf {
    match env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => env::home_dir().unwrap_or_default().join(".cache"),
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}
