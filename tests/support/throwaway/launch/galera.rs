//! How a cluster of three `MariaDB` nodes is set up and started, which Galera replicates between.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::throwaway::launch::{Launch, cache, find, is_root, option, run, supervised};

const STOP: &str = "KILL";

/// As root, `rsync` would copy the first node as this user, and be refused.
const USER: &str = "nobody";

/// How many nodes a cluster has; their ports follow each other.
pub(super) const NODES: u16 = 3;

/// The ports that a cluster needs: each node has one for its clients and three for the other nodes.
pub(super) const PORTS: u16 = 4 * NODES;

pub(super) fn prepare(folder: &Path, port: u16) -> io::Result<Launch> {
    let provider =
        find("libgalera_smm.so", &["/usr/lib/galera", "/usr/lib", "/usr/lib64/galera-4"].map(PathBuf::from))?;
    let bin = folder.join("bin");
    fs::create_dir(&bin)?;
    let scripts = [env::var_os("LOCKKIT_GALERA_ROOT").map_or_else(|| cache().join("lockkit/galera"), PathBuf::from)];
    for script in ["wsrep_sst_common", "wsrep_sst_rsync"] {
        // Into the folder, because the user may not be able to enter the cache.
        fs::copy(find(script, &scripts.clone().map(|it| it.join("usr/bin")))?, bin.join(script))?;
    }
    find("rsync", &[])?;

    let first = folder.join("node0");
    run(supervised(&find("mariadb-install-db", &[])?, STOP)
        .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"])
        .args(is_root().then_some("--user=root"))
        .arg(option("datadir", &first)))?;
    let mut path = bin.into_os_string();
    path.push(":/usr/sbin:/usr/bin:/sbin:/bin");
    let mut commands = Vec::new();
    for node in 0..NODES {
        let data = folder.join(format!("node{node}"));
        if !data.exists() {
            fs::create_dir(&data)?;
        }
        if is_root() {
            run(Command::new("chown").arg("-R").arg(USER).arg(&data))?;
        }
        let mut command = as_user(&find("mariadbd", &[PathBuf::from("/usr/sbin")])?);
        command.env("PATH", &path);
        let between_nodes = |kind: u16| port + NODES * kind + node;
        command
            .arg("--no-defaults")
            .arg(option("datadir", &data))
            .arg(option("socket", &data.join("socket")))
            .arg(option("pid-file", &data.join("pid")))
            .arg(format!("--port={}", port + node))
            .args(["--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=200"])
            .args(["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M"])
            .args(["--binlog-format=ROW", "--default-storage-engine=InnoDB", "--innodb-autoinc-lock-mode=2"])
            .args(["--wsrep-on=ON", "--wsrep-cluster-name=lockkit", "--wsrep-sst-method=rsync"])
            .arg(option("wsrep-provider", &provider))
            .arg(format!("--wsrep-node-name=node{node}"))
            .arg("--wsrep-node-address=127.0.0.1")
            .arg(format!("--wsrep-node-incoming-address=127.0.0.1:{}", port + node))
            .arg(format!("--wsrep-sst-receive-address=127.0.0.1:{}", between_nodes(1)))
            .arg(format!(
                "--wsrep-provider-options=gmcast.listen_addr=tcp://127.0.0.1:{};ist.recv_addr=127.0.0.1:{};\
                 gcache.size=32M",
                between_nodes(2),
                between_nodes(3),
            ));
        let others: Vec<_> = (0..node).map(|other| format!("127.0.0.1:{}", port + NODES * 2 + other)).collect();
        command.arg(format!("--wsrep-cluster-address=gcomm://{}", others.join(",")));
        command.args(others.is_empty().then_some("--wsrep-new-cluster"));
        commands.push(command);
    }
    Ok(Launch { commands, url: format!("mysql://root@127.0.0.1:{port}"), stop: STOP })
}

fn as_user(program: &Path) -> Command {
    let mut command = supervised(if is_root() { Path::new("setpriv") } else { program }, STOP);
    if is_root() {
        // Changing the user forgets the signal, so it is asked for again.
        command.args([&format!("--reuid={USER}"), "--clear-groups", "--pdeathsig", STOP, "--"]).arg(program);
    }
    command
}
