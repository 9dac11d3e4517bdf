//! Starts one server, says where it is, and stops and deletes it when no test process is left.

use std::fs::{self, File, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use std::{io, thread};

use lockkit_store_servers::folder_for_data;

use crate::throwaway::launch::{self, Launch};
use crate::throwaway::rendezvous::{open, remove_if_there};

/// How long the server waits for another test process. Between those of one run there is less than a second.
const IDLE: Duration = Duration::from_secs(4);
const START: Duration = Duration::from_mins(1);
const POLL: Duration = Duration::from_millis(200);

/// Runs the server until nobody uses it.
///
/// # Errors
/// If the server cannot be started, or ends by itself.
pub fn supervise(name: &str, state: &Path) -> io::Result<()> {
    remove_leftover(state)?;
    let folder = tempfile::Builder::new()
        .prefix(&format!("lockkit-{name}-"))
        .permissions(Permissions::from_mode(0o755)) // As root, PostgreSQL runs as another user.
        .tempdir_in(folder_for_data())?;
    fs::write(state.join("folder"), folder.path().as_os_str().as_encoded_bytes())?;

    let port = launch::free_ports(launch::ports(name))?;
    let Launch { commands, url, stop } = launch::prepare(name, folder.path(), port)?;
    let mut servers = Vec::new();
    for (mut command, port) in commands.into_iter().zip(port..) {
        servers.push(RunningServer { child: command.spawn()?, stop });
        wait_until_it_listens(&mut servers, port)?;
    }
    // In one step, so that nobody reads half of it.
    fs::write(state.join("url.new"), url)?;
    fs::rename(state.join("url.new"), state.join("url"))?;

    let users = wait_until_unused(&mut servers, state)?;
    remove_if_there(&state.join("url"))?;
    drop(servers);
    folder.close()?;
    remove_if_there(&state.join("folder"))?;
    // A test process that comes now waits for `users` until all is gone, and then starts another supervisor.
    drop(users);
    Ok(())
}

/// Deletes what a supervisor that was killed has left. Its server died with it.
fn remove_leftover(state: &Path) -> io::Result<()> {
    if let Ok(folder) = fs::read_to_string(state.join("folder")) {
        match fs::remove_dir_all(folder) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => remove_if_there(&state.join("folder"))?,
        }
    }
    Ok(())
}

fn wait_until_it_listens(servers: &mut [RunningServer], port: u16) -> io::Result<()> {
    let deadline = Instant::now() + START;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        check_alive(servers)?;
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("it does not listen after {START:?}")));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Returns the lock that keeps new test processes waiting.
fn wait_until_unused(servers: &mut [RunningServer], state: &Path) -> io::Result<File> {
    let mut last_used = Instant::now();
    loop {
        check_alive(servers)?;
        let users = open(&state.join("users"))?;
        if users.try_lock().is_err() {
            last_used = Instant::now();
        } else if last_used.elapsed() > IDLE {
            return Ok(users);
        }
        drop(users);
        thread::sleep(POLL);
    }
}

fn check_alive(servers: &mut [RunningServer]) -> io::Result<()> {
    for server in servers {
        if let Some(status) = server.child.try_wait()? {
            return Err(io::Error::other(format!("the server ended: {status}")));
        }
    }
    Ok(())
}

/// A server that is stopped when this is dropped, whether it ran or failed to start.
struct RunningServer {
    child: Child,
    stop: &'static str,
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        // The standard library only knows SIGKILL, after which PostgreSQL would leave a shared memory segment behind.
        let kill = Command::new("sh").args(["-c", "kill -s $0 $1", self.stop, &self.child.id().to_string()]).status();
        if kill.is_ok_and(|status| status.success()) {
            let _ = self.child.wait();
        }
    }
}
