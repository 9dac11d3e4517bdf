//! `PgBouncer` in front of the test server: a pooler that lends the server's sessions to its clients.

use std::fs::Permissions;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use url::Url;

use crate::throwaway::{free_port, prepare_pgbouncer};

/// How long it may take to start.
const START: Duration = Duration::from_secs(20);

/// A pooler of a test's own, killed when this is dropped.
///
/// It ends with the thread that started it, so it has a thread of its own: one of Tokio's blocking threads, for
/// example, ends after 10 s without work.
#[derive(Debug)]
pub struct PgBouncer {
    url: String,
    /// Dropped to end the pooler and its thread.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

impl PgBouncer {
    /// Starts a pooler in front of the server in this URL, such as [`TestDb::url`](crate::TestDb::url), in the pool
    /// mode `session` or `transaction`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(url: &str, pool_mode: &str) -> Self {
        Self::with_sessions(url, pool_mode, 20)
    }

    /// As [`PgBouncer::start`], with at most this many sessions of the server for all clients together.
    ///
    /// # Panics
    /// If it does not start.
    pub fn with_sessions(url: &str, pool_mode: &str, sessions: u32) -> Self {
        // Two of one process would choose the same port.
        static STARTING: Mutex<()> = Mutex::new(());

        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut url = Url::parse(url).expect("a URL");
        // Readable by the user that it runs as.
        let permissions = Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().prefix("lockkit-pgbouncer-").permissions(permissions).tempdir();
        let folder = folder.expect("make a folder");
        let port = free_port().expect("a free port");
        let mut command = prepare_pgbouncer(folder.path(), port, &url, pool_mode, sessions).expect("set PgBouncer up");
        let ((started, is_started), (running, is_running)) = (channel(), channel::<()>());
        let thread = thread::spawn(move || {
            let mut child = command.spawn().expect("start PgBouncer");
            let deadline = Instant::now() + START;
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                let ended = child.try_wait().expect("look for its end");
                assert!(ended.is_none() && Instant::now() < deadline, "PgBouncer did not start: {ended:?}");
                thread::sleep(Duration::from_millis(10));
            }
            started.send(()).expect("BUG: its caller waits");
            // Fails when the pooler is dropped.
            _ = is_running.recv();
            child.kill().and_then(|()| child.wait()).expect("stop PgBouncer");
        });
        is_started.recv().expect("PgBouncer started");
        url.set_host(Some("127.0.0.1")).expect("a URL with a host");
        url.set_port(Some(port)).expect("a URL with a port");
        Self { url: url.into(), running: Some(running), thread: Some(thread), _folder: folder }
    }

    /// The URL of the same database, by way of the pooler.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        drop(self.running.take());
        // A panic has been printed.
        drop(self.thread.take().map(JoinHandle::join));
    }
}
