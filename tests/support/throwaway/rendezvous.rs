//! How a test process finds the supervisor of a server, or starts one.

use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, io, thread};

/// The URL of a throwaway server, which is started if nobody has, and the lock that keeps it running.
pub(super) fn meet(name: &str) -> io::Result<(String, File)> {
    let state = state_folder(name);
    let users = open(&state.join("users"))?;
    users.lock_shared()?;

    let mut started = false;
    loop {
        let start = open(&state.join("start"))?;
        start.lock()?;
        let alive = open(&state.join("alive"))?;
        if alive.try_lock().is_ok() {
            if started {
                return Err(io::Error::other(fs::read_to_string(state.join("log"))?));
            }
            remove_if_there(&state.join("url"))?;
            start_supervisor(name, &state, alive)?;
            started = true;
        } else if let Ok(url) = fs::read_to_string(state.join("url")) {
            return Ok((url, users));
        }
        drop(start);
        thread::sleep(Duration::from_millis(10));
    }
}

/// Where the processes meet: a folder beside the supervisor's executable, so within the build folder.
pub(crate) fn state_folder(name: &str) -> PathBuf {
    let folder = supervisor_executable().with_file_name("test-servers.state").join(name);
    fs::create_dir_all(&folder).expect("make the folder of the test servers");
    folder
}

/// The program `test-servers`, under its name in the package of the test: cargo tells a test of no other programs.
fn supervisor_executable() -> PathBuf {
    let variables = ["CARGO_BIN_EXE_test-servers", "CARGO_BIN_EXE_test-sqlx-servers"];
    let path = variables.into_iter().find_map(env::var_os);
    path.expect("CARGO_BIN_EXE_test-servers, which cargo sets: run the tests with `cargo test` or `cargo nextest run`")
        .into()
}

/// Starts a supervisor that outlives this process and has the lock on `alive` from the start, as its standard input.
fn start_supervisor(name: &str, state: &Path, alive: File) -> io::Result<()> {
    Command::new(supervisor_executable())
        .arg(name)
        .arg(state)
        .stdin(alive)
        .stdout(Stdio::null())
        .stderr(File::create(state.join("log"))?)
        .process_group(0) // Ctrl-C ends the tests; the supervisor then notices and cleans up.
        .spawn()?;
    Ok(())
}

pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)
}

pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
