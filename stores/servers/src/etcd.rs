//! etcd, alone and as a cluster.

use std::{
    io::{Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{Program, free_port};

/// Longer than a cluster takes to elect its first leader.
const READY: Duration = Duration::from_secs(30);

/// A cluster of etcd, or one member alone.
#[derive(Debug)]
pub struct Etcd {
    /// The members.
    pub members: Vec<Program>,
    folder: TempDir,
}

impl Etcd {
    /// Starts one member and waits until it answers.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn alone() -> Self {
        Self::cluster(1)
    }

    /// Starts this many members at once and waits until each of them answers.
    ///
    /// They store nothing safely (`--unsafe-no-fsync`, where etcd knows it): the tests kill processes, not machines.
    ///
    /// # Panics
    /// If they cannot be started.
    pub fn cluster(members: u16) -> Self {
        Self::start(members, &[])
    }

    /// Starts one member that refuses to write when its data take this many bytes.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn with_space(bytes: u64) -> Self {
        Self::start(1, &["--quota-backend-bytes", &bytes.to_string()])
    }

    fn start(members: u16, further: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("lockkit-etcd-").tempdir().expect("make a folder");
        let ports: Vec<_> = (0..members).map(|_| (free_port(), free_port())).collect();
        let names: Vec<_> = ports.iter().enumerate().map(|(at, (_, peer))| format!("m{at}={}", url(*peer))).collect();
        let cluster = names.join(",");
        // A `Program` dies with the thread that starts it, so the members are started by this one. Each start waits
        // only until the port is open, which does not need the others.
        let start = |(at, (client, peer)): (usize, &(u16, u16))| {
            let (name, data) = (format!("m{at}"), folder.path().join(format!("m{at}")));
            std::fs::create_dir_all(&data).expect("make a folder");
            let (client_url, peer_url) = (url(*client), url(*peer));
            let path = data.join("data");
            let arguments = [
                ("--name", &*name),
                ("--data-dir", path.to_str().expect("a path in UTF-8")),
                ("--listen-client-urls", &client_url),
                ("--advertise-client-urls", &client_url),
                ("--listen-peer-urls", &peer_url),
                ("--initial-advertise-peer-urls", &peer_url),
                ("--initial-cluster", &cluster),
                ("--initial-cluster-state", "new"),
                ("--logger", "zap"),
                ("--log-level", "warn"),
            ];
            let arguments: Vec<_> =
                arguments.iter().flat_map(|(name, value)| [*name, *value]).chain(further.iter().copied()).collect();
            Program::launch("etcd", &arguments, &data, *client)
        };
        let mut members: Vec<_> = ports.iter().enumerate().map(start).collect();
        members.iter_mut().for_each(Program::wait_until_it_listens);
        let started = Self { members, folder };
        started.wait_until_ready();
        started
    }

    /// The addresses of the members.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|it| url(it.port)).collect()
    }

    /// The folder of the members, for what a test needs beside them.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// Which member is the leader. `None` if no member that answers knows one.
    pub fn leader(&self) -> Option<usize> {
        (0..self.members.len()).find(|at| self.metric(*at, "etcd_server_is_leader") == Some(1.0))
    }

    /// A number that the member counts. Labels belong to the name, as in `name{label="value"}`. `None` if it does not
    /// answer or has no such number.
    pub fn metric(&self, member: usize, name: &str) -> Option<f64> {
        let text = get(self.members[member].port, "/metrics")?;
        let line = text.lines().find(|it| it.strip_prefix(name).is_some_and(|it| it.starts_with(' ')))?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    /// The sum of all numbers of a member whose names start so.
    pub fn metrics(&self, member: usize, names: &str) -> f64 {
        let text = get(self.members[member].port, "/metrics").unwrap_or_default();
        let lines = text.lines().filter(|it| it.starts_with(names));
        lines.filter_map(|it| it.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    fn wait_until_ready(&self) {
        let deadline = Instant::now() + READY;
        for member in &self.members {
            while !get(member.port, "/health").is_some_and(|it| it.contains("\"true\"")) {
                assert!(Instant::now() < deadline, "a member of etcd is not ready after {READY:?}");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// The body of a page of a member.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}
