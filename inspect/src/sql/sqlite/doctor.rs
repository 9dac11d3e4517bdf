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
    // The driver would run the others.
    if !is_one(statement) {
        return Err(sqlx::Error::Protocol("it is several statements, or has placeholders".to_owned()));
    }
    for row in sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"))).fetch_all(conn).await? {
        let step: String = row.try_get("detail")?;
        if step.starts_with("SCAN ") {
            return Ok(Plan::Scan(step));
        }
    }
    Ok(Plan::Index)
}

/// Whether only comments follow the first `;` outside of quotes and comments. A placeholder is refused: its name can
/// have quotes in it (<https://www.sqlite.org/lang_expr.html#varparam>).
fn is_one(text: &str) -> bool {
    let (mut rest, mut is_ended) = (text, false);
    while let Some(first) = rest.chars().next() {
        rest = &rest[first.len_utf8()..];
        let comment_end = match first {
            '-' if rest.starts_with('-') => Some("\n"),
            '/' if rest.starts_with('*') => Some("*/"),
            _ => None,
        };
        if let Some(end) = comment_end {
            rest = &rest[1..];
            rest = rest.split_once(end).map_or("", |it| it.1);
            continue;
        }
        match first {
            ';' => is_ended = true,
            _ if first.is_ascii_whitespace() => {}
            _ if is_ended => return false,
            '?' | '$' | '@' | ':' | '#' => return false,
            // Two quotes within a text are one quote. To this loop they end the text, and begin another.
            '\'' | '"' | '`' => rest = rest.split_once(first).map_or("", |it| it.1),
            '[' => rest = rest.split_once(']').map_or("", |it| it.1),
            _ => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_semicolon_in_quotes_and_comments_ends_no_statement() {
        for one in [
            "SELECT 1",
            r#"SELECT ';', ''';', "a;", `b;`, [c;]; -- ;"#,
            "SELECT 1 -- ;\n /* ; */ ;",
            "SELECT 1 - 2 / 3 -- ; SELECT 2",
            "SELECT 1 /* ; SELECT 2",
            "SELECT 'ä;'",
            "SELECT ';",
        ] {
            assert!(is_one(one), "{one}");
        }
        for several in [
            "SELECT 1; DROP TABLE t",
            "SELECT ';'; DROP TABLE t",
            "SELECT '''; --'; DROP TABLE t",
            "SELECT 1 -- ;\n; DROP TABLE t",
            "SELECT 1 /* */; DROP TABLE t",
            "SELECT 1 /*/ ; */; DROP TABLE t",
            "SELECT 1; 'text'",
            "SELECT $a('); DROP TABLE t; --')",
            "SELECT ?1",
        ] {
            assert!(!is_one(several), "{several}");
        }
    }
}
