//! How `PostgreSQL` is set up and started. It refuses to run as root, and then runs as the user postgres.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::throwaway::launch::{Launch, find, is_root, run, supervised};

/// After SIGKILL it would leave a shared memory segment behind.
const STOP: &str = "QUIT";

pub(super) fn prepare(folder: &Path, port: u16) -> io::Result<Launch> {
    let initdb = find("initdb", &debian_folders())?;
    let data = folder.join("data");
    fs::create_dir(&data)?;
    if is_root() {
        run(Command::new("chown").arg("postgres").arg(&data))?;
    }
    run(as_postgres(&initdb)
        .args(["--username=root", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "-D"])
        .arg(&data))?;

    let mut command = as_postgres(&initdb.with_file_name("postgres"));
    command.arg("-D").arg(&data).arg("-p").arg(port.to_string());
    for setting in [
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "max_connections=400",
        "max_prepared_transactions=20",
        "fsync=off",
        "synchronous_commit=off",
        "full_page_writes=off",
        "max_wal_size=128MB",
        "dynamic_shared_memory_type=mmap", // In the data folder, to be deleted with it.
    ] {
        command.arg("-c").arg(setting);
    }
    let url = format!("postgres://root@127.0.0.1:{port}/postgres");
    Ok(Launch { commands: vec![command], url, stop: STOP })
}

/// Where Debian has the programs of each version, the newest first.
fn debian_folders() -> Vec<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    folders.sort();
    folders.reverse();
    folders
}

pub(super) fn as_postgres(program: &Path) -> Command {
    let mut command = supervised(if is_root() { Path::new("setpriv") } else { program }, STOP);
    if is_root() {
        // Changing the user forgets the signal, so it is asked for again.
        command
            .args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--pdeathsig", STOP, "--"])
            .arg(program);
    }
    command
}
