//! Row locks and named locks on MySQL and MariaDB.

use sqlx::{
    AssertSqlSafe, MySql, MySqlConnection, Row,
    mysql::{MySqlArguments, MySqlRow},
};

use super::placeholder;
use crate::{
    dialect::{
        Columns, Dialect, NamedOps, RowOps, RowQuery, Strength,
        query::{matching, order_and_limit},
    },
    error::Fault,
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
        let Some(scan) = scan(conn, query, arguments, "").await? else {
            return Ok(None);
        };
        if scan.keys.is_empty() {
            return Ok(Some(scan.plan));
        }
        // The optimizer prefers a scan on a small table even where an index could serve. Told to use one, it shows
        // whether it can.
        let keys: Vec<_> = scan.keys.split(',').map(|it| format!("`{}`", it.replace('`', "``"))).collect();
        let forced = self::scan(conn, query, arguments, &format!("FORCE INDEX ({}) ", keys.join(", "))).await?;
        Ok(forced.map(|it| it.plan))
    }
}

struct Scan {
    /// The indexes that the optimizer considered, separated by commas.
    keys: String,
    plan: String,
}

/// How the server reads the whole table to find the rows, if it does.
async fn scan(
    conn: &mut MySqlConnection,
    query: &RowQuery,
    arguments: &MySqlArguments,
    force: &str,
) -> sqlx::Result<Option<Scan>> {
    // Without the locking clause: MariaDB's EXPLAIN of a locking read by key waits for the row itself.
    let select = selection(query, "").replacen(" AS r ", &format!(" AS r {force}"), 1);
    let explain = AssertSqlSafe(format!("EXPLAIN FORMAT=TRADITIONAL {select}"));
    for row in sqlx::query_with(explain, arguments.clone()).persistent(false).fetch_all(conn).await? {
        let text = |column| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
        let (access, keys) = (text("type")?, text("possible_keys")?);
        if matches!(&*access, "ALL" | "index") {
            let plan = format!("type={access}, possible_keys={keys}, extra={}", text("Extra")?);
            return Ok(Some(Scan { keys, plan }));
        }
    }
    Ok(None)
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
pub(super) fn bounded(wait: Wait) -> (String, String) {
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

/// Locks the row whether or not it is there, and never waits where another session has it.
///
/// No look before it that would lock the gap, and an exclusive lock on the duplicate where a plain INSERT takes a shared
/// one. Each server refuses to wait in its own way, as in the statement that acquires a lease.
const NAMED_AT_ONCE: &str = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
    INSERT INTO lockkit_named (name)
    SELECT ? /*!80000 FROM (SELECT 1 AS one) AS o LEFT JOIN lockkit_named AS l ON l.name = */ /*M! FROM DUAL WHERE */
    ? /*M! IS NOT NULL */ /*!80000 FOR UPDATE OF l NOWAIT */
    ON DUPLICATE KEY UPDATE name = VALUES(name)";

impl NamedOps for MySql {
    async fn named_lock(conn: &mut MySqlConnection, key: &Key, wait: Wait) -> sqlx::Result<bool> {
        if wait == Wait::Forever {
            let sql = "INSERT INTO lockkit_named (name) VALUES (?) ON DUPLICATE KEY UPDATE name = name";
            sqlx::query(sql).bind(key.as_bytes()).execute(conn).await?;
            return Ok(true);
        }
        let (before, hint) = bounded(wait);
        let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
        let look = format!("{before}SELECT {hint}1 FROM lockkit_named WHERE name = ? FOR UPDATE {waiting}");
        loop {
            let look = sqlx::query(AssertSqlSafe(look.clone())).bind(key.as_bytes());
            if look.fetch_optional(&mut *conn).await?.is_some() {
                return Ok(true);
            }
            let made = sqlx::query(NAMED_AT_ONCE).bind(key.as_bytes()).bind(key.as_bytes()).execute(&mut *conn).await;
            match made {
                // Somebody made the row meanwhile: there is one to wait for now.
                Err(err) if wait != Wait::Never && Self::fault(&err) == Fault::Contended => {}
                made => return made.map(|_| true),
            }
        }
    }
}
