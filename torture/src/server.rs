//! A server of the rack's own, which can be killed, stopped, started again and given another clock. Durable: what it
//! acknowledged must survive its death.

use std::fs::{File, Permissions};
use std::io::{Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{env, fs, thread};

use anyhow::{Context, Result, bail};
use lockkit_store_servers::folder_for_data;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection as _, PgConnection};
use support::Postgres;
use support::Server as _;
use support::throwaway::{self, Launch};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// How long a server may take to start, with its recovery.
const START: Duration = Duration::from_secs(60);

pub(crate) struct PrivateServer {
    pub(crate) name: &'static str,
    /// The administrator's URL.
    pub(crate) url: String,
    pub(crate) port: u16,
    folder: TempDir,
    command: Command,
    stop: Signal,
    child: Child,
    log: File,
    /// The other nodes of a cluster.
    others: Vec<Child>,
}

/// What differs from a server that is only fast.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Further arguments for the server.
    pub(crate) arguments: Vec<String>,
    /// Its clock can be set, if libfaketime is there.
    pub(crate) clock: bool,
    /// A file system of this many megabytes for its data.
    pub(crate) disk: Option<u32>,
}

impl PrivateServer {
    /// Sets a server up and starts it.
    ///
    /// The thread that calls this must live as long as the server, which dies with it.
    pub(crate) async fn start(name: &'static str, settings: &Settings) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(&format!("lockkit-torture-{name}-"))
            .permissions(Permissions::from_mode(0o755)) // As root, PostgreSQL runs as another user.
            .tempdir_in(folder_for_data())?;
        if let Some(megabytes) = settings.disk {
            mount(folder.path(), megabytes)?;
        }
        let port = free_ports(throwaway::ports(name))?;
        let path = folder.path().to_owned();
        // A thread of its own, because a proxy runs on this one.
        let Launch { commands, url, .. } =
            tokio::task::spawn_blocking(move || throwaway::prepare(name, &path, port)).await??;
        let mut commands = commands.into_iter();
        let mut command = commands.next().context("a server has a program")?;
        // A setting that comes later wins.
        let durable: &[&str] = match name {
            "postgres" => &["-c", "fsync=on", "-c", "synchronous_commit=on", "-c", "full_page_writes=on"],
            _ => &["--innodb-flush-log-at-trx-commit=1"],
        };
        command.args(durable).args(&settings.arguments);
        if settings.clock {
            let library = faketime().context("libfaketime is not installed")?;
            let clock = folder.path().join("clock");
            fs::write(&clock, "+0")?;
            command = with_environment(
                &command,
                &[
                    format!("LD_PRELOAD={}", library.display()),
                    format!("FAKETIME_TIMESTAMP_FILE={}", clock.display()),
                    "FAKETIME_NO_CACHE=1".to_owned(),
                    "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
                ],
            );
        }
        let log = File::create_new(folder.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        let child = command.spawn()?;
        let stop = if name == "postgres" { Signal::QUIT } else { Signal::KILL };
        let log = File::open(folder.path().join("log"))?;
        let mut server = Self { name, url, port, folder, command, stop, child, log, others: Vec::new() };
        server.wait_until_it_listens().await?;
        for (mut command, port) in commands.zip(port + 1..) {
            let log = File::create_new(server.folder.path().join(format!("log{port}")))?;
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            server.others.push(command.spawn()?);
            let deadline = Instant::now() + START;
            while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                anyhow::ensure!(Instant::now() < deadline, "a node of {name} does not listen after {START:?}");
                sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(server)
    }

    /// The folder that its data is in.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Kills all of its processes at once, as a power cut does.
    pub(crate) fn kill(&mut self) -> Result<()> {
        let children = self.children();
        self.child.kill()?;
        for child in children {
            // Gone by itself.
            let _ = kill_process(child, Signal::KILL);
        }
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again after a kill, and waits until it answers.
    pub(crate) async fn restart(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        loop {
            self.child = self.command.spawn()?;
            match self.wait_until_it_listens().await {
                Ok(()) => return Ok(()),
                // PostgreSQL refuses while processes of the one before are still attached to its memory.
                Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)).await,
                Err(err) => return Err(err),
            }
        }
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|it| it.is_some())
    }

    pub(crate) fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    pub(crate) fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Moves its clock by so many seconds from the machine's.
    pub(crate) fn set_clock(&self, offset: i64) -> Result<()> {
        // In one step: half a line would be another time.
        let (new, clock) = (self.folder().join("clock.new"), self.folder().join("clock"));
        fs::write(&new, format!("{offset:+}"))?;
        Ok(fs::rename(new, clock)?)
    }

    /// Starts a replica of this primary, which is PostgreSQL.
    pub(crate) async fn replica(&self, synchronous: bool) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("lockkit-torture-replica-")
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in(folder_for_data())?;
        let data = folder.path().join("data");
        fs::create_dir(&data)?;
        fs::set_permissions(&data, Permissions::from_mode(0o700))?;
        let mut programs = self.command.get_args().filter(|it| it.as_encoded_bytes().ends_with(b"/postgres"));
        let program = Path::new(programs.next().unwrap_or_else(|| self.command.get_program()));
        let as_root = fs::metadata("/proc/self").is_ok_and(|it| std::os::unix::fs::MetadataExt::uid(&it) == 0);
        let mut backup = if as_root {
            Command::new("chown").arg("postgres").arg(&data).status()?;
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]);
            command.arg(program.with_file_name("pg_basebackup"));
            command
        } else {
            Command::new(program.with_file_name("pg_basebackup"))
        };
        backup
            .args(["-R", "-c", "fast", "-h", "127.0.0.1", "-U", "root", "-p", &self.port.to_string(), "-D"])
            .arg(&data);
        let output = tokio::task::spawn_blocking(move || backup.output()).await??;
        if !output.status.success() {
            bail!("pg_basebackup: {}", String::from_utf8_lossy(&output.stderr));
        }
        let port = free_ports(1)?;
        let old = self.folder.path().join("data");
        let mut command = Command::new(self.command.get_program());
        for argument in self.command.get_args() {
            if argument == old.as_os_str() {
                command.arg(&data);
            } else if argument == self.port.to_string().as_str() {
                command.arg(port.to_string());
            } else {
                command.arg(argument);
            }
        }
        let log = File::create_new(folder.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn()?;
        let log = File::open(folder.path().join("log"))?;
        let mut url = url::Url::parse(&self.url)?;
        url.set_port(Some(port)).ok().context("a URL with a port")?;
        let (name, stop) = (self.name, self.stop);
        let mut replica = Self { name, url: url.into(), port, folder, command, stop, child, log, others: Vec::new() };
        replica.wait_until_it_listens().await?;

        let mut primary = PgConnection::connect(&self.url).await?;
        if synchronous {
            Postgres::execute(&mut primary, "ALTER SYSTEM SET synchronous_standby_names = '*'").await?;
            Postgres::execute(&mut primary, "SELECT pg_reload_conf()").await?;
        }
        let wanted = if synchronous { "sync" } else { "async" };
        let sql = format!("SELECT count(*) FROM pg_stat_replication WHERE sync_state = '{wanted}'");
        let deadline = Instant::now() + START;
        while Postgres::fetch_i64(&mut primary, &sql).await? != Some(1) {
            anyhow::ensure!(Instant::now() < deadline, "the replica does not follow");
            sleep(Duration::from_millis(50)).await;
        }
        Ok(replica)
    }

    /// Makes a primary of a replica.
    pub(crate) async fn promote(&self) -> Result<()> {
        let mut conn = PgConnection::connect(&self.url).await?;
        // It would wait for a replica of its own, which it does not have.
        Postgres::execute(&mut conn, "ALTER SYSTEM RESET synchronous_standby_names").await?;
        Postgres::execute(&mut conn, "SELECT pg_promote()").await?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(pid(&self.child)?, signal)?;
        for child in self.children() {
            let _ = kill_process(child, signal);
        }
        Ok(())
    }

    /// The processes that it has started: one for each connection of PostgreSQL.
    fn children(&self) -> Vec<Pid> {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|it| Pid::from_raw(it.parse().ok()?)).collect()
    }

    async fn wait_until_it_listens(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            if let Some(status) = self.child.try_wait()? {
                let log = self.end_of_log();
                bail!("{} ended: {status}\n{log}", self.name);
            }
            if Instant::now() > deadline {
                let log = self.end_of_log();
                bail!("{} does not listen after {START:?}\n{log}", self.name);
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    fn end_of_log(&mut self) -> String {
        let mut text = String::new();
        let read = self.log.rewind().and_then(|()| self.log.read_to_string(&mut text));
        drop(read);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        for node in self.others.iter_mut().rev() {
            let _ = (node.kill(), node.wait());
        }
        // What libfaketime shares with nobody, and leaves behind when it is killed.
        for name in ["faketime_shm_", "sem.faketime_sem_"] {
            let _ = fs::remove_file(format!("/dev/shm/{name}{}", self.child.id()));
        }
        if self.has_ended() {
            unmount(self.folder.path());
            return;
        }
        // One that is stopped hears of no other signal.
        let _ = self.thaw();
        if let Ok(pid) = pid(&self.child) {
            let _ = kill_process(pid, self.stop);
        }
        for _ in 0..100 {
            if self.has_ended() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        unmount(self.folder.path());
    }
}

pub(crate) fn pid(child: &Child) -> Result<Pid> {
    Pid::from_raw(i32::try_from(child.id())?).context("a process has an id")
}

/// The same command, whose server alone gets these variables: what starts it as another user would spoil them.
fn with_environment(command: &Command, variables: &[String]) -> Command {
    let mut new = Command::new(command.get_program());
    let mut is_there = false;
    for argument in command.get_args() {
        let name = argument.as_encoded_bytes();
        if !is_there && (name.ends_with(b"/postgres") || name.ends_with(b"/mariadbd")) {
            new.arg("env").args(variables);
            is_there = true;
        }
        new.arg(argument);
    }
    new
}

/// libfaketime as Debian packages it.
pub(crate) fn faketime() -> Option<PathBuf> {
    let library = PathBuf::from(format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", env::consts::ARCH));
    library.exists().then_some(library)
}

/// The first of so many free ports that follow each other. Two servers that start at once would find the same ones.
fn free_ports(count: u16) -> Result<u16> {
    static NEXT: Mutex<u16> = Mutex::new(0);

    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    if *next == 0 {
        *next = throwaway::free_ports(count)?;
    }
    let is_free = |port| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    let first = (*next..*next + 2_000).find(|first| (*first..first + count).all(is_free)).context("no free port")?;
    *next = first + count;
    Ok(first)
}

fn mount(folder: &Path, megabytes: u32) -> Result<()> {
    let options = format!("size={megabytes}m,mode=755");
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "lockkit-torture"]).arg(folder).status()?;
    if !status.success() {
        bail!("a small file system cannot be mounted: {status}");
    }
    Ok(())
}

fn unmount(folder: &Path) {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    if mounts.contains(&format!(" {} ", folder.display())) {
        let _ = Command::new("umount").arg("-l").arg(folder).status();
    }
}
