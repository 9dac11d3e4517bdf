//! What harms locks in a SQLite file. Settings of other connections, such as their busy timeout, cannot be seen.

use sqlx::{AssertSqlSafe, Result, Row, SqliteConnection};

use crate::{Finding, Level, Plan};

pub(super) async fn findings(conn: &mut SqliteConnection) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await?;
    if mode != "wal" {
        let what = format!("journal_mode is {mode}: readers and writers wait for each other, and renewals with them");
        findings.push(Finding::new(Level::Warn, "journal", what).mend("PRAGMA journal_mode = WAL;"));
    }
    let file: String =
        sqlx::query_scalar("SELECT file FROM pragma_database_list WHERE name = 'main'").fetch_one(&mut *conn).await?;
    if is_on_a_network(&file) {
        let what = "the file is on a network file system, whose file locks may not exclude";
        findings.push(Finding::new(Level::Fail, "file", what).mend("-- move the file to a local disk"));
    }
    let version: String = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(conn).await?;
    findings.push(Finding::new(Level::Ok, "version", format!("SQLite {version}, of this program")));
    Ok(findings)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn is_on_a_network(file: &str) -> bool {
    use nix::sys::statfs::{FUSE_SUPER_MAGIC, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs};

    let kind = statfs(file).map(|it| it.filesystem_type());
    kind.is_ok_and(|it| [FUSE_SUPER_MAGIC, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC].contains(&it))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn is_on_a_network(_file: &str) -> bool {
    false
}

pub(super) async fn plan(conn: &mut SqliteConnection, statement: &str) -> Result<Plan> {
    for row in sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"))).fetch_all(conn).await? {
        let step: String = row.try_get("detail")?;
        if step.starts_with("SCAN ") {
            return Ok(Plan::Scan(step));
        }
    }
    Ok(Plan::Index)
}
