//! One process of a server.

use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

/// Longer than any of the servers takes to start.
const START: Duration = Duration::from_mins(1);

/// A server process. Killed when this is dropped.
#[derive(Debug)]
pub struct Program {
    command: Vec<String>,
    log: PathBuf,
    /// The port that it listens on when it is ready.
    pub port: u16,
    child: Child,
}

impl Program {
    /// Starts the program and waits until it listens on the port. Appends its output to a file in the folder.
    ///
    /// # Panics
    /// If it is not installed, ends by itself, or does not listen within a minute.
    pub fn start(program: &str, arguments: &[&str], folder: &Path, port: u16) -> Self {
        let mut started = Self::launch(program, arguments, folder, port);
        started.wait_until_it_listens();
        started
    }

    /// Starts the program and does not wait. So several can start at the same time; see
    /// [`wait_until_it_listens`](Self::wait_until_it_listens).
    ///
    /// # Panics
    /// If it is not installed.
    pub fn launch(program: &str, arguments: &[&str], folder: &Path, port: u16) -> Self {
        let program = find(program);
        let command: Vec<_> = [program.as_str()].iter().chain(arguments).map(ToString::to_string).collect();
        let log = folder.join("log");
        let child = spawn(&command, &log);
        Self { command, log, port, child }
    }

    /// Ends the process with SIGKILL. Its data stay as they are.
    pub fn kill(&mut self) {
        // Also ends a stopped process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts a process that was killed again, with the same arguments.
    ///
    /// # Panics
    /// As [`Program::start`].
    pub fn start_again(&mut self) {
        self.kill();
        self.child = spawn(&self.command, &self.log);
        self.wait_until_it_listens();
    }

    /// Stops the process with SIGSTOP: its connections stay, and nobody answers.
    ///
    /// # Panics
    /// If it has ended.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        // Its threads stop one after the other.
        while !self.is_stopped() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_stopped(&self) -> bool {
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else { return true };
        threads.filter_map(Result::ok).all(|thread| {
            let state = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // After the name of the program, which is in parentheses.
            state.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
        })
    }

    /// Lets a stopped process go on.
    ///
    /// # Panics
    /// If it has ended.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(id, signal).expect("send a signal");
    }

    /// Waits until the program listens on its port.
    ///
    /// # Panics
    /// If it ends by itself, or does not listen within a minute.
    pub fn wait_until_it_listens(&mut self) {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = self.child.try_wait().expect("ask for the process");
            let log = || fs::read_to_string(&self.log).unwrap_or_default();
            assert!(ended.is_none(), "{:?} ended: {ended:?}\n{}", self.command, log());
            assert!(Instant::now() < deadline, "{:?} does not listen after {START:?}\n{}", self.command, log());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody listens on, below those that the kernel gives to outgoing connections. No two calls of a process
/// get the same.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 90 * 100).expect("BUG: less than 9,000");
    let mut ports = (0..9_000).map(|_| 10_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 9_000);
    ports.find(|port| is_free(*port)).expect("a free port")
}

/// Whether a port can be bound. It is not listened on: a process that another thread starts meanwhile has a copy of the
/// socket until it executes its program, and the kernel would answer whoever waits for a server there.
pub fn is_free(port: u16) -> bool {
    let bound = || {
        let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
    };
    bound().is_ok()
}

fn spawn(command: &[String], log: &Path) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(log).expect("open the log");
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .args(command)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("open the log"))
        .stderr(log)
        .spawn()
        .unwrap_or_else(|err| panic!("start {command:?}: {err}"))
}

/// The path of a program, which Debian may put where only root looks.
fn find(program: &str) -> String {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = folders.map(|it| it.join(program)).find(|it| it.is_file());
    let found = found.unwrap_or_else(|| panic!("{program} is not installed: tests/run installs it"));
    found.to_str().expect("a path in UTF-8").to_owned()
}
