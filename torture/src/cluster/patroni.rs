//! How `PostgreSQL` under Patroni is set up, with etcd as its memory.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::cluster::net::{Net, address};

/// The port for clients, on each member.
pub(super) const PORT: u16 = 5432;
/// The port on which each member's Patroni says what the member is.
pub(super) const REST: u16 = 8008;
const ETCD: u16 = 2379;

/// For how many seconds a leader that says nothing keeps the others waiting. The shortest that Patroni's rule allows:
/// `loop_wait` and twice `retry_timeout`.
const TTL: u32 = 5;

/// etcd on a node of its own.
pub(super) fn etcd(net: &Net, node: u8, folder: &Path) -> Command {
    let url = |port| format!("http://{}:{port}", address(node));
    let mut command = net.command(node);
    command.args(["--", "etcd", "--name", "etcd", "--data-dir"]).arg(folder.join("data"));
    command.args(["--listen-client-urls", &url(ETCD), "--advertise-client-urls", &url(ETCD)]);
    command.args(["--listen-peer-urls", &url(2380), "--initial-advertise-peer-urls", &url(2380)]);
    command.args(["--initial-cluster", &format!("etcd={}", url(2380)), "--logger", "zap", "--log-level", "warn"]);
    command
}

/// One member: Patroni, which starts its server.
pub(super) fn member(net: &Net, node: u8, etcd: u8, synchronous: bool, bin: &Path, folder: &Path) -> Result<Command> {
    let (here, etcd, bin) = (address(node), address(etcd), bin.display());
    let (data, name) = (folder.display(), format!("member{node}"));
    let settings = format!(
        r#"
scope: lockkit
name: {name}
restapi: {{listen: "0.0.0.0:{REST}", connect_address: "{here}:{REST}"}}
etcd3: {{host: "{etcd}:{ETCD}"}}
bootstrap:
  dcs:
    ttl: {TTL}
    loop_wait: 1
    retry_timeout: 2
    synchronous_mode: {synchronous}
    postgresql:
      use_pg_rewind: true
      parameters: {{max_connections: 300, wal_log_hints: "on", dynamic_shared_memory_type: mmap}}
  initdb: [{{encoding: UTF8}}, no-locale]
  pg_hba:
    - host all all 0.0.0.0/0 trust
    - host replication all 0.0.0.0/0 trust
    - local all all trust
postgresql:
  listen: "0.0.0.0:{PORT}"
  connect_address: "{here}:{PORT}"
  data_dir: {data}/data
  bin_dir: {bin}
  pgpass: {data}/pgpass
  remove_data_directory_on_rewind_failure: true
  remove_data_directory_on_diverged_timelines: true
  authentication:
    superuser: {{username: root, password: root}}
    replication: {{username: replicator, password: replicator}}
  parameters: {{unix_socket_directories: "{data}"}}
"#
    );
    let file = folder.join("patroni.yml");
    fs::write(&file, settings)?;
    let mut command = net.command(node);
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--", "patroni"]).arg(file);
    Ok(command)
}

/// After a power cut, another process may have the number that the old server left.
pub(super) fn forget_the_old_server(folder: &Path) {
    let _ = fs::remove_file(folder.join("data/postmaster.pid"));
}
