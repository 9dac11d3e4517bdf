//! How `PgBouncer` is set up and started. Like `PostgreSQL` it refuses to run as root.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use url::Url;

use crate::throwaway::launch::postgres::as_postgres;
use crate::throwaway::launch::{find, is_root, run};

/// Sets it up in an empty folder, in front of the server in this URL.
pub(crate) fn prepare(folder: &Path, port: u16, server: &Url, pool_mode: &str, sessions: u32) -> io::Result<Command> {
    let password = server.password().map(|it| format!(" password={it}")).unwrap_or_default();
    // sqlx asks for a setting at the start of a session that PgBouncer does not know.
    let settings = format!(
        "[databases]\n\
         * = host={} port={} user={}{password} pool_size={sessions}\n\
         [pgbouncer]\n\
         listen_addr = 127.0.0.1\n\
         listen_port = {port}\n\
         unix_socket_dir =\n\
         auth_type = any\n\
         pool_mode = {pool_mode}\n\
         ignore_startup_parameters = extra_float_digits\n",
        server.host_str().unwrap_or("127.0.0.1"),
        server.port().unwrap_or(5432),
        server.username(),
    );
    let file = folder.join("pgbouncer.ini");
    fs::write(&file, settings)?;
    if is_root() {
        run(Command::new("chown").arg("postgres").arg(&file))?;
    }
    let mut command = as_postgres(&find("pgbouncer", &[PathBuf::from("/usr/sbin")])?);
    command.arg("--quiet").arg(file);
    Ok(command)
}
