//! Redis: one server, a master with a replica and Sentinels, or several independent servers.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::{Program, free_port};

/// A Redis server. Ends with this, with its data.
#[derive(Debug)]
pub struct Redis {
    /// Its process.
    pub program: Program,
    folder: TempDir,
}

impl Redis {
    /// A server that forgets everything when it ends.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more options, each with its value: `["--appendonly", "yes"]`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn with(options: &[&str]) -> Self {
        let folder = folder();
        let port = free_port();
        let (path, number) = (folder.path().to_str().expect("a path in UTF-8"), port.to_string());
        let mut arguments = vec!["--port", &number, "--bind", "127.0.0.1", "--dir", path, "--save", "", "--appendonly"];
        // A replica need not wait for others. Of several values of an option, the last one counts.
        arguments.extend(["no", "--repl-diskless-sync-delay", "0"]);
        arguments.extend(options);
        let program = Program::start("redis-server", &arguments, folder.path(), port);
        Self { program, folder }
    }

    /// A server that follows this one.
    ///
    /// # Panics
    /// As [`Redis::start`].
    #[must_use]
    pub fn replica(&self) -> Self {
        Self::with(&["--replicaof", &format!("127.0.0.1 {}", self.program.port)])
    }

    /// Where its files are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its address, for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.program.port)
    }
}

/// Three Sentinels that watch one master.
#[derive(Debug)]
pub struct Sentinels {
    /// Their processes.
    pub programs: Vec<Program>,
    _folders: Vec<TempDir>,
}

impl Sentinels {
    /// The name under which they know the master.
    pub const MASTER: &str = "leases";

    /// Starts them. They find the replicas of the master by themselves, and replace it half a second after its end.
    ///
    /// # Panics
    /// If one does not start.
    pub fn start(master: &Redis) -> Self {
        let (mut programs, mut folders) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let (folder, port) = (folder(), free_port());
            let file = folder.path().join("sentinel.conf");
            let (name, path, watched) = (Self::MASTER, folder.path().display(), master.program.port);
            let settings = format!(
                "port {port}\nbind 127.0.0.1\ndir {path}\nsentinel monitor {name} 127.0.0.1 {watched} 2\n\
                 sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 3000\n"
            );
            fs::write(&file, settings).expect("write the settings");
            let file = file.to_str().expect("a path in UTF-8");
            programs.push(Program::start("redis-sentinel", &[file], folder.path(), port));
            folders.push(folder);
        }
        Self { programs, _folders: folders }
    }
}

/// Several servers that know nothing of each other.
///
/// # Panics
/// If one does not start.
pub fn independent(number: usize) -> Vec<Redis> {
    (0..number).map(|_| Redis::start()).collect()
}

fn folder() -> TempDir {
    tempfile::Builder::new().prefix("lockkit-redis-").tempdir().expect("a folder")
}
