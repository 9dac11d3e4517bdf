//! Row locks and named locks on MySQL and MariaDB.

use sqlx::{
    AssertSqlSafe, MySql, MySqlConnection, Row,
    mysql::{MySqlArguments, MySqlRow},
};

use super::placeholder;
use crate::{
    dialect::{Columns, NamedOps, RowOps, RowQuery, Strength, matching, order_and_limit},
    key::Key,
    policy::Wait,
};

impl RowOps for MySql {
    async fn row_lock(
        conn: &mut MySqlConnection,
        query: &RowQuery,
        arguments: MySqlArguments,
    ) -> sqlx::Result<Vec<MySqlRow>> {
        let (before, hint) = bounded(query.wait);
        let strength = match query.strength {
            Strength::Share => "/*M! LOCK IN SHARE MODE */ /*!80000 FOR SHARE */",
            Strength::Update | Strength::KeyChange => "FOR UPDATE",
        };
        let waiting = match query.wait {
            _ if query.skip_locked => "SKIP LOCKED",
            Wait::Never => "NOWAIT",
            Wait::AtMost(_) | Wait::Forever => "",
        };
        let sql = format!("{before}{} {strength} {waiting}", selection(query, &hint));
        sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(conn).await
    }

    async fn row_scan(
        conn: &mut MySqlConnection,
        query: &RowQuery,
        arguments: &MySqlArguments,
    ) -> sqlx::Result<Option<String>> {
        // Without the locking clause: MariaDB's EXPLAIN of a locking read by key waits for the row itself.
        let sql = format!("EXPLAIN FORMAT=TRADITIONAL {}", selection(query, ""));
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments.clone()).fetch_all(conn).await?;
        for row in &rows {
            let text = |column| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
            let (access, keys) = (text("type")?, text("possible_keys")?);
            // The optimizer prefers a scan on a small table even where an index could serve.
            if matches!(&*access, "ALL" | "index") && keys.is_empty() {
                return Ok(Some(format!("type={access}, possible_keys=NULL, extra={}", text("Extra")?)));
            }
        }
        Ok(None)
    }
}

fn selection(query: &RowQuery, hint: &str) -> String {
    let columns = match query.columns {
        Columns::All => "r.*",
        Columns::None => "1 AS locked",
    };
    format!(
        "SELECT {hint}{columns} FROM `{}` AS r WHERE {} {}",
        query.table,
        matching(&query.by, 1, '`', placeholder),
        order_and_limit(query, '`'),
    )
}

/// How each server is told to give up waiting: MariaDB before the statement, MySQL by a hint inside it.
/// Neither takes a bound value, so the text is rounded up to two digits to keep the number of statements small.
fn bounded(wait: Wait) -> (String, String) {
    let Wait::AtMost(_) = wait else {
        return (String::new(), String::new());
    };
    let exact = wait.millis().unwrap_or(1);
    let step = 10_u64.pow(exact.ilog10().saturating_sub(1));
    let millis = exact.div_ceil(step) * step;
    (
        format!("/*M! SET STATEMENT max_statement_time = {}.{:03} FOR */ ", millis / 1000, millis % 1000),
        format!("/*+ MAX_EXECUTION_TIME({}) */ ", millis.min(u64::from(u32::MAX))),
    )
}

impl NamedOps for MySql {
    async fn named_lock(conn: &mut MySqlConnection, key: &Key, wait: Wait) -> sqlx::Result<bool> {
        let (before, hint) = bounded(wait);
        if wait != Wait::Forever {
            let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
            let sql = format!("{before}SELECT {hint}1 FROM lockkit_named WHERE name = ? FOR UPDATE {waiting}");
            let row = sqlx::query(AssertSqlSafe(sql)).bind(key.as_bytes()).fetch_optional(&mut *conn).await?;
            if row.is_some() {
                return Ok(true);
            }
        }
        // One statement locks the row whether or not it is there: no look before it that would lock the gap, and an
        // exclusive lock on the duplicate where a plain INSERT takes a shared one.
        let sql = format!("{before}INSERT INTO lockkit_named (name) VALUES (?) ON DUPLICATE KEY UPDATE name = name");
        sqlx::query(AssertSqlSafe(sql)).bind(key.as_bytes()).execute(conn).await?;
        Ok(true)
    }
}
