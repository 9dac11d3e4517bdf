//! The command lines: how each server is set up in a folder and started, tuned for tests that lose nothing by a crash.

mod mariadb;
mod mysql;
mod pgbouncer;
mod postgres;

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

pub(crate) use self::pgbouncer::prepare as prepare_pgbouncer;

/// A server that is ready to be started.
pub(super) struct Launch {
    pub(super) command: Command,
    /// The administrator's URL.
    pub(super) url: String,
    /// The signal that ends the server at once, whatever becomes of the data.
    pub(super) stop: &'static str,
}

/// Sets a server up in an empty folder.
pub(super) fn prepare(name: &str, folder: &Path, port: u16) -> io::Result<Launch> {
    match name {
        "postgres" => postgres::prepare(folder, port),
        "mariadb" => mariadb::prepare(folder, port),
        "mysql" => mysql::prepare(folder, port),
        _ => Err(io::Error::other(format!("unknown server {name}"))),
    }
}

/// A port below those that the kernel gives to outgoing connections, which could take it before the server does.
pub(crate) fn free_port() -> io::Result<u16> {
    let first = 20_000 + u16::try_from(std::process::id() % 10_000).expect("BUG: less than 10,000");
    (first..first + 1_000)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
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
    let status = command.status()?;
    if status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("{command:?}: {status}")))
}

/// Finds a program in one of the folders or the `PATH`.
fn find(program: &str, folders: &[PathBuf]) -> io::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = folders.iter().cloned().chain(std::env::split_paths(&path)).map(|folder| folder.join(program));
    candidates.find(|candidate| candidate.is_file()).ok_or_else(|| {
        io::Error::other(format!(
            "{program} is not installed. Run tests/run, or: \
             apt-get install --no-install-recommends postgresql pgbouncer mariadb-server-core mariadb-client-core"
        ))
    })
}

/// `--name=path`, as the servers of the `MySQL` family want it.
fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}
