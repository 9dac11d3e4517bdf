//! How Oracle's `MySQL` is set up and started, from a folder that `tests/run` unpacked Debian packages into.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::throwaway::launch::mariadb::server_arguments;
use crate::throwaway::launch::{Launch, cache, is_root, option, run, supervised};

pub(super) const STOP: &str = "KILL";

pub(super) fn prepare(folder: &Path, port: u16) -> io::Result<Launch> {
    let root = unpacked_root()?;
    let template = root.join("template");
    if !template.exists() {
        make_template(&root, &template)?;
    }
    run(Command::new("cp").args(["-a", "--reflink=auto"]).arg(&template).arg(folder.join("data")))?;

    let mut command = mysqld(&root)?;
    server_arguments(&mut command, folder, port);
    // Without TLS, as the other servers: else the features of a build decide whether its connections are encrypted.
    command.args(["--disable-log-bin", "--mysqlx=OFF", "--tls-version="]);
    Ok(Launch { commands: vec![command], url: format!("mysql://root@127.0.0.1:{port}"), stop: STOP })
}

fn unpacked_root() -> io::Result<PathBuf> {
    let root = env::var_os("LOCKKIT_MYSQL_ROOT").map_or_else(|| cache().join("lockkit/mysql"), PathBuf::from);
    if root.join("usr/sbin/mysqld").exists() {
        return Ok(root);
    }
    Err(io::Error::other(format!(
        "there is no usr/sbin/mysqld in {}. Run tests/run once, which unpacks it there, or set LOCKKIT_MYSQL_URL to \
         a server of your own, or LOCKKIT_WITHOUT_MYSQL to the reason why MySQL is not tested",
        root.display()
    )))
}

/// Sets up a data folder to copy for each server: this takes some ten seconds, copying it a fraction of one.
fn make_template(root: &Path, template: &Path) -> io::Result<()> {
    let new = tempfile::tempdir_in(root)?;
    let (data, init_file) = (new.path().join("data"), new.path().join("init.sql"));
    // Without name resolution, root@localhost is not let in.
    fs::write(&init_file, "CREATE USER root@127.0.0.1; GRANT ALL ON *.* TO root@127.0.0.1 WITH GRANT OPTION;\n")?;
    run(mysqld(root)?
        .arg("--initialize-insecure")
        .args(is_root().then_some("--user=root"))
        .arg(option("init-file", &init_file))
        .arg(option("datadir", &data)))?;
    match fs::rename(&data, template) {
        Err(_) if template.exists() => Ok(()), // Another supervisor was faster.
        result => result,
    }
}

/// The server, run by the loader and with the libraries that were unpacked with it.
fn mysqld(root: &Path) -> io::Result<Command> {
    let lib = root.join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH));
    let mut files = fs::read_dir(&lib)?.flatten();
    let loader = files
        .find(|file| file.file_name().to_string_lossy().starts_with("ld-linux"))
        .ok_or_else(|| io::Error::other(format!("there is no ld-linux in {}", lib.display())))?;
    let mut command = supervised(&loader.path(), STOP);
    command.arg("--library-path").arg(&lib).arg(root.join("usr/sbin/mysqld"));
    command
        .args(["--no-defaults", "--secure-file-priv=NULL"])
        .arg(option("basedir", &root.join("usr")))
        .arg(option("plugin-dir", &root.join("usr/lib/mysql/plugin")))
        .arg(option("lc-messages-dir", &root.join("usr/share/mysql")));
    Ok(command)
}
