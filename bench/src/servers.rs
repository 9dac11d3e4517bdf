//! The databases that are measured: throwaway servers, or those whose URLs were given. Each run has a database of its
//! own.

use std::fs::{File, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use store_servers::folder_for_data;
use support::throwaway::{self, Launch};
use tempfile::TempDir;
use url::Url;

/// A kind of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Postgres,
    #[value(name = "mariadb")]
    MariaDb,
    #[value(name = "mysql")]
    MySql,
    Sqlite,
}

impl Kind {
    /// As its makers write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Postgres => "PostgreSQL",
            Self::MariaDb => "MariaDB",
            Self::MySql => "MySQL",
            Self::Sqlite => "SQLite",
        }
    }

    /// SQL for the version.
    pub(crate) fn version(self) -> &'static str {
        match self {
            Self::Postgres => "SHOW server_version",
            Self::MariaDb | Self::MySql => "SELECT VERSION()",
            Self::Sqlite => "SELECT sqlite_version()",
        }
    }

    /// As `throwaway` knows it.
    fn program(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::MariaDb => "mariadb",
            Self::MySql => "mysql",
            Self::Sqlite => "sqlite",
        }
    }

    /// Connections of one process out of so many, for so many tasks. SQLite has one writer at a time.
    pub(crate) fn connections(self, tasks: u32, processes: u32) -> u32 {
        let most = if self == Self::Sqlite { 8 } else { 64 };
        tasks.clamp(2, (most / processes).max(2))
    }
}

/// How long a server may take to start.
const START: Duration = Duration::from_secs(60);

/// A server, or a folder for files of SQLite. A throwaway server ends with this.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) kind: Kind,
    /// The administrator's URL.
    url: String,
    process: Option<(Child, &'static str)>,
    folder: Option<TempDir>,
}

impl Server {
    /// A server, or a path, that is there.
    pub(crate) fn given(kind: Kind, url: &str) -> Result<Self> {
        let url = if kind == Kind::Sqlite {
            url.to_owned()
        } else {
            let mut url = Url::parse(url)?;
            if kind == Kind::Postgres && url.path().trim_matches('/').is_empty() {
                url.set_path("postgres");
            }
            url.into()
        };
        Ok(Self { kind, url, process: None, folder: None })
    }

    /// Starts a throwaway server.
    ///
    /// The thread that calls this must live as long as the server, which dies with it.
    pub(crate) fn start(kind: Kind, durable: bool) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("lockkit-bench-")
            .permissions(Permissions::from_mode(0o755)) // As root, PostgreSQL runs as another user.
            .tempdir_in(if durable { env::temp_dir() } else { folder_for_data() })?;
        if kind == Kind::Sqlite {
            let url = folder.path().display().to_string();
            return Ok(Self { kind, url, process: None, folder: Some(folder) });
        }
        let port = throwaway::free_ports(1)?;
        let Launch { commands, url, stop } = throwaway::prepare(kind.program(), folder.path(), port)?;
        let mut command = commands.into_iter().next().context("a server has a program")?;
        if durable {
            // A setting that comes later wins.
            let settings: &[&str] = match kind {
                Kind::Postgres => &["-c", "fsync=on", "-c", "synchronous_commit=on", "-c", "full_page_writes=on"],
                _ => &["--innodb-flush-log-at-trx-commit=1"],
            };
            command.args(settings);
        }
        if kind == Kind::MariaDb {
            command.arg("--performance-schema=OFF"); // As it is by default.
        }
        let log = folder.path().join("log");
        let file = File::create_new(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn()?;
        let mut server = Self { kind, url, process: Some((child, stop)), folder: Some(folder) };
        server.wait_until_it_listens(port).with_context(|| end_of(&log))?;
        Ok(server)
    }

    /// The URL of a database on it.
    pub(crate) fn database(&self, name: &str) -> Result<String> {
        if self.kind == Kind::Sqlite {
            return Ok(format!("sqlite://{}/{name}.db?mode=rwc", self.url));
        }
        let mut url = Url::parse(&self.url)?;
        url.set_path(name);
        Ok(url.into())
    }

    pub(crate) fn administrator(&self) -> &str {
        &self.url
    }

    fn wait_until_it_listens(&mut self, port: u16) -> Result<()> {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if let Some((child, _)) = &mut self.process {
                let ended = child.try_wait()?;
                ensure!(ended.is_none(), "{} ended: {ended:?}", self.kind.name());
            }
            ensure!(Instant::now() < deadline, "{} does not listen after {START:?}", self.kind.name());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some((mut child, stop)) = self.process.take() else { return };
        // The standard library only knows SIGKILL, after which PostgreSQL would leave a shared memory segment behind.
        let asked = Command::new("sh").args(["-c", "kill -s $0 $1", stop, &child.id().to_string()]).status();
        if !asked.is_ok_and(|it| it.success()) {
            let _ = child.kill();
        }
        let _ = child.wait();
        drop(self.folder.take());
    }
}

fn end_of(log: &std::path::Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}
