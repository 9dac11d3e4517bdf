//! How `MariaDB` is set up and started.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::throwaway::launch::{Launch, find, is_root, option, run, supervised};

const STOP: &str = "KILL";

pub(super) fn prepare(folder: &Path, port: u16) -> io::Result<Launch> {
    run(supervised(&find("mariadb-install-db", &[])?, STOP)
        .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"])
        .args(is_root().then_some("--user=root"))
        .arg(option("datadir", &folder.join("data"))))?;

    let mut command = supervised(&find("mariadbd", &[PathBuf::from("/usr/sbin")])?, STOP);
    command.arg("--no-defaults");
    server_arguments(&mut command, folder, port);
    // Who holds named locks, and who is in a transaction, can only be asked of the performance schema.
    command.args([
        "--performance-schema=ON",
        "--performance-schema-instrument=wait/lock/metadata/sql/mdl=ON",
        "--performance-schema-instrument=transaction=ON",
        "--performance-schema-consumer-events-transactions-current=ON",
    ]);
    Ok(Launch { commands: vec![command], url: format!("mysql://root@127.0.0.1:{port}"), stop: STOP })
}

/// What `MariaDB` and `MySQL` have in common.
pub(super) fn server_arguments(command: &mut Command, folder: &Path, port: u16) {
    command
        .args(is_root().then_some("--user=root"))
        .arg(option("datadir", &folder.join("data")))
        .arg(option("socket", &folder.join("socket")))
        .arg(option("pid-file", &folder.join("pid")))
        .arg(format!("--port={port}"))
        .args(["--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=400"])
        .args(["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]);
}
