//! What harms locks on MySQL and MariaDB.

use std::collections::HashMap;

use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Result, Row};

use super::{is_denied, is_maria, user};
use crate::{Finding, Level, Plan};

/// The tables with a column of each.
const TABLES: [(&str, &str); 6] = [
    ("lockkit_lease", "name"),
    ("lockkit_named", "name"),
    ("lockkit_stock", "name"),
    ("lockkit_stock_batch", "id"),
    ("lockkit_fence", "name"),
    ("lockkit_answer", "name"),
];

/// The least heartbeat of a session, in seconds, that a server should let live.
const LEAST_TIMEOUT: i64 = 60;

pub(super) async fn findings(conn: &mut MySqlConnection) -> Result<Vec<Finding>> {
    let mut findings = rights(conn).await?;
    findings.extend(settings(conn).await?);
    Ok(findings)
}

/// What the user may do with lockkit's tables, and whether they are there. The statements change no row.
async fn rights(conn: &mut MySqlConnection) -> Result<Vec<Finding>> {
    let user = user(conn).await?;
    let mut findings = Vec::new();
    for (table, column) in TABLES {
        let mut lacking = Vec::new();
        for (right, statement) in [
            ("SELECT", format!("SELECT {column} FROM {table} LIMIT 0")),
            ("INSERT", format!("INSERT INTO {table} ({column}) SELECT NULL FROM DUAL WHERE FALSE")),
            ("UPDATE", format!("UPDATE {table} SET {column} = '' WHERE FALSE")),
            ("DELETE", format!("DELETE FROM {table} WHERE FALSE")),
        ] {
            // Other errors come after the check of the rights.
            if let Err(err) = sqlx::query(AssertSqlSafe(statement)).execute(&mut *conn).await
                && is_denied(&err)
            {
                lacking.push(right);
            }
        }
        if !lacking.is_empty() {
            let lacking = lacking.join(", ");
            let what = format!("{user} may not {lacking} in {table}");
            findings.push(
                Finding::new(Level::Fail, "privileges", what).mend(format!("GRANT {lacking} ON {table} TO {user};")),
            );
        }
    }
    if let Err(err) = sqlx::query("SELECT 1 FROM information_schema.INNODB_TRX LIMIT 0").execute(conn).await
        && is_denied(&err)
    {
        let what = "`lockkit explain` may not see who waits for rows";
        findings.push(Finding::new(Level::Note, "privileges", what).mend(format!("GRANT PROCESS ON *.* TO {user};")));
    }
    Ok(findings)
}

/// The settings of the server, by their names.
type Settings = HashMap<String, String>;

async fn settings(conn: &mut MySqlConnection) -> Result<Vec<Finding>> {
    let rows = sqlx::raw_sql(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'log_bin', 'binlog_format', 'wsrep_on', 'read_only',
             'innodb_deadlock_detect', 'innodb_flush_log_at_trx_commit', 'wait_timeout')",
    );
    let mut settings = Settings::new();
    for row in rows.fetch_all(&mut *conn).await? {
        settings.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let mut findings = harmful(&settings);
    let version = settings.remove("version").unwrap_or_default();
    let (name, oldest) = if is_maria(conn).await? { ("MariaDB", [10, 6, 0]) } else { ("MySQL", [8, 0, 16]) };
    findings.push(if numbers(&version) < oldest {
        let [major, minor, patch] = oldest;
        let what = format!("{name} {version}: lockkit needs {major}.{minor}.{patch} or later");
        Finding::new(Level::Fail, "version", what)
    } else {
        Finding::new(Level::Ok, "version", format!("{name} {version}"))
    });
    Ok(findings)
}

/// The settings that harm locks.
fn harmful(settings: &Settings) -> Vec<Finding> {
    let is = |name: &str, value: &str| settings.get(name).is_some_and(|it| it.eq_ignore_ascii_case(value));
    let mut findings = Vec::new();
    let mut find = |level, check, what: &str, mend: &str| {
        findings.push(Finding::new(level, check, what).mend(mend));
    };
    if is("log_bin", "ON") && is("binlog_format", "STATEMENT") {
        let what = "binlog_format is STATEMENT: the server refuses to write in READ COMMITTED, which lockkit needs";
        find(Level::Fail, "binlog", what, "SET GLOBAL binlog_format = 'ROW';");
    }
    if is("wsrep_on", "ON") {
        let what = "this is a node of a Galera cluster: row, named and session locks exclude on one node only";
        find(
            Level::Warn,
            "server",
            what,
            "-- send all transactions with such locks to one node; leases exclude on all",
        );
    }
    if is("read_only", "ON") {
        find(Level::Fail, "server", "the server is read-only: locks are refused", "-- connect to the primary");
    }
    if is("innodb_deadlock_detect", "OFF") {
        let what = "innodb_deadlock_detect is OFF: a deadlock lasts until a wait is over, by default for 50 s";
        find(Level::Warn, "deadlocks", what, "SET GLOBAL innodb_deadlock_detect = ON;");
    }
    if !is("innodb_flush_log_at_trx_commit", "1") {
        let what = "innodb_flush_log_at_trx_commit is not 1: a crash forgets who was granted a lease just before it";
        find(Level::Warn, "durability", what, "SET GLOBAL innodb_flush_log_at_trx_commit = 1;");
    }
    let timeout = settings.get("wait_timeout").and_then(|it| it.parse::<i64>().ok());
    if timeout.is_some_and(|it| it < LEAST_TIMEOUT) {
        let what = "wait_timeout is below 60 s: the server ends sessions between two statements of a transaction";
        find(Level::Warn, "timeouts", what, "SET GLOBAL wait_timeout = 600;");
    }
    findings
}

/// The first three numbers of a version.
fn numbers(version: &str) -> [u32; 3] {
    let mut numbers = version.split(|it: char| !it.is_ascii_digit()).map(|it| it.parse().unwrap_or(0));
    [(); 3].map(|()| numbers.next().unwrap_or(0))
}

pub(super) async fn plan(conn: &mut MySqlConnection, statement: &str) -> Result<Plan> {
    let explain = if is_maria(conn).await? { "EXPLAIN" } else { "EXPLAIN FORMAT=TRADITIONAL" };
    // MariaDB runs the functions of a derived table to plan it. What they write is undone.
    let mut tx = conn.begin().await?;
    // Prepared, and the server prepares one statement only.
    let rows = sqlx::query(AssertSqlSafe(format!("{explain} {statement}"))).fetch_all(&mut *tx).await?;
    tx.rollback().await?;
    for row in rows {
        let kind: Option<String> = row.try_get("type")?;
        let extra: Option<String> = row.try_get("Extra")?;
        if let Some(extra) = extra.filter(|it| it.contains("Deleting all rows")) {
            return Ok(Plan::Scan(extra));
        }
        if let Some(kind) = kind.filter(|it| matches!(&**it, "ALL" | "index")) {
            let table: Option<String> = row.try_get("table")?;
            return Ok(Plan::Scan(format!("{} is read with type {kind}", table.unwrap_or_default())));
        }
    }
    Ok(Plan::Index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_that_harms_is_found_and_none_of_a_good_server() {
        let with = |changes: &[(&str, &str)]| {
            let good = [
                ("log_bin", "ON"),
                ("binlog_format", "ROW"),
                ("wsrep_on", "OFF"),
                ("read_only", "OFF"),
                ("innodb_deadlock_detect", "ON"),
                ("innodb_flush_log_at_trx_commit", "1"),
                ("wait_timeout", "28800"),
            ];
            let settings = good.iter().chain(changes).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            let found = harmful(&settings.collect());
            found.iter().map(|it| (it.level, it.check)).collect::<Vec<_>>()
        };
        assert_eq!(with(&[]), []);
        for (name, value, level, check) in [
            ("binlog_format", "STATEMENT", Level::Fail, "binlog"),
            ("wsrep_on", "ON", Level::Warn, "server"),
            ("read_only", "ON", Level::Fail, "server"),
            ("innodb_deadlock_detect", "OFF", Level::Warn, "deadlocks"),
            ("innodb_flush_log_at_trx_commit", "2", Level::Warn, "durability"),
            ("wait_timeout", "59", Level::Warn, "timeouts"),
        ] {
            assert_eq!(with(&[(name, value)]), [(level, check)], "{name}");
        }
        assert_eq!(with(&[("log_bin", "OFF"), ("binlog_format", "STATEMENT")]), [], "there is no log");
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(numbers("10.11.14-MariaDB-0+deb12u2"), [10, 11, 14]);
        assert!(numbers("8.0.4") < [8, 0, 16] && numbers("9.7") > [8, 0, 16]);
    }
}
