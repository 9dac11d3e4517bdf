//! How a replication group of `MySQL` is set up.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::{ConnectOptions as _, MySqlConnection};
use support::{MySql, Server as _, throwaway};

use crate::cluster::net::{Net, address};

/// The port for clients, on each member.
pub(super) const PORT: u16 = 3306;
/// The port for the other members.
const BETWEEN_MEMBERS: u16 = 33_061;

/// One member, made of a server alone.
pub(super) fn member(net: &Net, node: u8, members: u8, one_primary: bool, server: &Command) -> Command {
    let members: Vec<_> = (0..members).map(|it| SocketAddr::new(address(it), BETWEEN_MEMBERS)).collect();
    let mut command = net.command(node);
    command.arg("--").args(program_of(server));
    command.args([&format!("--port={PORT}"), "--bind-address=0.0.0.0", "--innodb-flush-log-at-trx-commit=1"]);
    throwaway::make_member(&mut command, node.into(), &members, one_primary);
    // A member that says nothing is expelled after 5 s, and not only after 10 s.
    command.arg("--loose-group-replication-member-expel-timeout=0");
    command
}

/// The server's program and arguments, without what makes it die with the rack.
fn program_of(server: &Command) -> impl Iterator<Item = &OsStr> {
    server.get_args().skip_while(|it| *it != "--").skip(1)
}

/// What a member is started with after it was prepared. Otherwise it takes writes before it is back in the group, which
/// then refuses it for them.
pub(super) const READ_ONLY: &str = "--super-read-only=ON";

/// A connection that needs no network.
async fn administer(folder: &Path) -> Result<MySqlConnection> {
    let options = MySqlConnectOptions::new().socket(folder.join("socket")).username("root");
    Ok(options.disable_statement_logging().connect().await?)
}

/// Lets the administrator in from elsewhere, and says as whom to catch up.
pub(super) async fn prepare(folder: &Path) -> Result<()> {
    let mut conn = administer(folder).await?;
    for sql in [
        throwaway::REPLICATOR,
        "SET sql_log_bin = 0;
         CREATE USER root@'198.18.%';
         GRANT ALL ON *.* TO root@'198.18.%' WITH GRANT OPTION;
         SET sql_log_bin = 1",
    ] {
        MySql::execute(&mut conn, sql).await?;
    }
    Ok(())
}

/// The first member makes the group.
pub(super) async fn found(folder: &Path) -> Result<()> {
    let sql = "SET GLOBAL group_replication_bootstrap_group = ON; START GROUP_REPLICATION; \
               SET GLOBAL group_replication_bootstrap_group = OFF; \
               CREATE DATABASE rack; CREATE TABLE rack.alive (member INT PRIMARY KEY, at DATETIME(6))";
    MySql::execute(&mut administer(folder).await?, sql).await?;
    Ok(())
}

/// Lets a member take part that does not, as an operator does. Returns how many members it sees that do, if it commits
/// what it must be able to.
pub(super) async fn join(folder: &Path, is_primary: bool) -> Result<i64> {
    let mut conn = administer(folder).await?;
    let sql = "SELECT member_state FROM performance_schema.replication_group_members
               WHERE member_id IN (@@server_uuid, '')";
    match MySql::fetch_text(&mut conn, sql).await?.as_deref() {
        Some("ONLINE") => {
            // A member that was expelled has sent its clients away.
            MySql::execute(&mut conn, "SET GLOBAL offline_mode = OFF").await?;
            if is_primary {
                MySql::execute(&mut conn, "REPLACE INTO rack.alive VALUES (@@server_id, NOW(6))").await?;
            }
        }
        Some("RECOVERING") => {}
        _ => {
            MySql::execute(&mut conn, "STOP GROUP_REPLICATION; START GROUP_REPLICATION").await?;
        }
    }
    let sql = "SELECT COUNT(*) FROM performance_schema.replication_group_members WHERE member_state = 'ONLINE'";
    Ok(MySql::fetch_i64(&mut conn, sql).await?.unwrap_or(0))
}
