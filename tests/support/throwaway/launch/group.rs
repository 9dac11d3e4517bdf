//! How a replication group of `MySQL` is set up and started, in which each member is a primary.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::throwaway::launch::{Launch, mysql, option};

/// How many members a group has; their ports follow each other.
pub(super) const MEMBERS: u16 = 2;

/// The ports that a group needs: each member has one for its clients and one for the other member.
pub(super) const PORTS: u16 = 2 * MEMBERS;

/// Makes the user by which a member catches up, on this member alone. What all members have comes with the replication.
pub const REPLICATOR: &str = "
    SET sql_log_bin = 0;
    CREATE USER replicator@'%' IDENTIFIED BY 'replicator';
    GRANT REPLICATION SLAVE, BACKUP_ADMIN, CONNECTION_ADMIN, GROUP_REPLICATION_STREAM ON *.* TO replicator@'%';
    SET sql_log_bin = 1;
    CHANGE REPLICATION SOURCE TO SOURCE_USER = 'replicator', SOURCE_PASSWORD = 'replicator'
        FOR CHANNEL 'group_replication_recovery';
";

pub(super) fn prepare(folder: &Path, port: u16) -> io::Result<Launch> {
    let members: Vec<_> = (0..MEMBERS).map(|it| SocketAddr::from(([127, 0, 0, 1], port + MEMBERS + it))).collect();
    let mut commands = Vec::new();
    for (member, port) in (0..members.len()).zip(port..) {
        let folder = folder.join(format!("member{member}"));
        fs::create_dir(&folder)?;
        let Launch { commands: alone, .. } = mysql::prepare(&folder, port)?;
        let bootstrap = if member == 0 { "SET GLOBAL group_replication_bootstrap_group = ON;" } else { "" };
        // Each statement of the file is on a line of its own.
        let init = format!("{}{bootstrap}\n", REPLICATOR.replace("\n        ", " "));
        fs::write(folder.join("init.sql"), init)?;
        for mut command in alone {
            make_member(&mut command, member, &members, false);
            command.arg(option("init-file", &folder.join("init.sql")));
            // A test can then hold back all that comes from the other member.
            command.args(["--loose-group-replication-start-on-boot=ON", "--replica-parallel-workers=1"]);
            forget_its_number(&folder)?;
            commands.push(command);
        }
    }
    Ok(Launch { commands, url: format!("mysql://root@127.0.0.1:{port}"), stop: mysql::STOP })
}

/// Adds the arguments with which a server can be a member of a group.
pub fn make_member(command: &mut Command, member: usize, members: &[SocketAddr], one_primary: bool) {
    let seeds: Vec<_> = members.iter().map(SocketAddr::to_string).collect();
    let hosts: Vec<_> = members.iter().map(|it| it.ip().to_string()).collect();
    let (here, on) = (members[member], |it| if it { "ON" } else { "OFF" });
    command
        .args(["--log-bin=binlog", "--gtid-mode=ON", "--enforce-gtid-consistency=ON"])
        .arg(format!("--server-id={}", member + 1))
        .arg(format!("--report-host={}", here.ip()))
        .arg("--plugin-load-add=group_replication.so")
        .arg("--loose-group-replication-group-name=10cc1c17-0000-4000-8000-000000000001")
        .arg("--loose-group-replication-start-on-boot=OFF")
        .arg(format!("--loose-group-replication-local-address={here}"))
        .arg(format!("--loose-group-replication-group-seeds={}", seeds.join(",")))
        .arg(format!("--loose-group-replication-ip-allowlist={}", hosts.join(",")))
        // A group refuses to start without TLS, although it uses none.
        .arg("--tls-version=TLSv1.2,TLSv1.3")
        .arg("--loose-group-replication-recovery-get-public-key=ON")
        .arg(format!("--loose-group-replication-single-primary-mode={}", on(one_primary)))
        .arg(format!("--loose-group-replication-enforce-update-everywhere-checks={}", on(!one_primary)));
}

/// Two servers of one template would have the same number, which a group refuses. Without one, a server makes it.
///
/// # Errors
/// Those of the file system.
pub fn forget_its_number(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join("data/auto.cnf")) {
        Err(err) if err.kind() != io::ErrorKind::NotFound => Err(err),
        _ => Ok(()),
    }
}
