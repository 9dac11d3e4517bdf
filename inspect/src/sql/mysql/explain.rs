//! Who waits for whom on MySQL and MariaDB. MySQL lists the waits for row locks and for `GET_LOCK`. MariaDB lists those
//! for row locks, and which sessions wait in `GET_LOCK`, but not for which name.

use std::collections::HashMap;

use lockkit::Key;
use sqlx::{AssertSqlSafe, MySqlConnection, Result, Row, mysql::MySqlRow};

use super::{is_denied, is_maria, user};
use crate::{Session, Wait, Waits, sql::columns::Columns, waits::sessions_of};

/// The name of a session lock on the server.
const NAME: &str = "SHA2(CONCAT('lockkit:session:', IF(@@lower_case_table_names = 0, DATABASE(), LOWER(DATABASE())), \
                    CHAR(0), ?), 256)";

pub(super) async fn waits(conn: &mut MySqlConnection, keys: &[Key]) -> Result<Waits> {
    let is_maria = is_maria(conn).await?;
    let mut unseen = Vec::new();
    let mut waits = match rows(conn, is_maria).await {
        Err(err) if is_denied(&err) => {
            let user = user(conn).await?;
            let more =
                if is_maria { String::new() } else { format!(" GRANT SELECT ON performance_schema.* TO {user};") };
            unseen.push(format!("{user} may not see who waits for rows: GRANT PROCESS ON *.* TO {user};{more}"));
            Vec::new()
        }
        waits => waits?,
    };
    if is_maria {
        waits.extend(maria_sessions(conn, keys, &mut unseen).await?);
    } else {
        match mysql_sessions(conn, keys).await {
            Err(err) if is_denied(&err) => {}
            sessions => waits.extend(sessions?),
        }
    }
    let ids = sessions_of(&waits);
    let mut sessions = sessions(conn, is_maria, &ids).await?;
    if ids.contains(&PREPARED) {
        match prepared(conn).await {
            Err(sqlx::Error::Database(_)) => {
                let user = user(conn).await?;
                let grant = "GRANT XA_RECOVER_ADMIN ON *.* TO";
                unseen.push(format!("{user} may not see prepared transactions: {grant} {user};"));
            }
            prepared => sessions.extend(prepared?),
        }
    }
    Ok(Waits { sessions, waits, unseen })
}

/// Waits for rows, and with them for named locks.
async fn rows(conn: &mut MySqlConnection, is_maria: bool) -> Result<Vec<Wait>> {
    let (table, from) = if is_maria {
        (
            "REPLACE(SUBSTRING_INDEX(l.lock_table, '.', -1), '`', '')",
            "information_schema.INNODB_LOCK_WAITS AS x
             JOIN information_schema.INNODB_LOCKS AS l ON l.lock_id = x.requested_lock_id
             JOIN information_schema.INNODB_TRX AS w ON w.trx_id = x.requesting_trx_id
             JOIN information_schema.INNODB_TRX AS b ON b.trx_id = x.blocking_trx_id
             WHERE l.lock_table LIKE CONCAT('`', DATABASE(), '`.%')",
        )
    } else {
        (
            "l.OBJECT_NAME",
            "performance_schema.data_lock_waits AS x
             JOIN performance_schema.data_locks AS l ON l.ENGINE_LOCK_ID = x.REQUESTING_ENGINE_LOCK_ID
             JOIN information_schema.INNODB_TRX AS w ON w.trx_id = x.REQUESTING_ENGINE_TRANSACTION_ID
             JOIN information_schema.INNODB_TRX AS b ON b.trx_id = x.BLOCKING_ENGINE_TRANSACTION_ID
             WHERE l.OBJECT_SCHEMA = DATABASE()",
        )
    };
    let index = if is_maria { "l.lock_index" } else { "l.INDEX_NAME" };
    let waits = format!(
        "SELECT
             CAST(w.trx_mysql_thread_id AS SIGNED) AS waiter,
             CAST(TIMESTAMPDIFF(SECOND, w.trx_wait_started, NOW()) * 1000 AS SIGNED) AS waits_ms,
             CAST({table} AS CHAR) AS table_name,
             CAST({index} AS CHAR) AS index_name,
             CAST(l.lock_data AS CHAR) AS place,
             CAST(b.trx_mysql_thread_id AS SIGNED) AS holder
         FROM {from}
         ORDER BY waits_ms DESC, waiter, holder"
    );
    let found = sqlx::query(AssertSqlSafe(waits)).fetch_all(&mut *conn).await?;
    let mut waits: Vec<Wait> = Vec::new();
    for row in found {
        let (waiter, holder): (i64, i64) = (row.try_get("waiter")?, row.try_get("holder")?);
        if let Some(wait) = waits.iter_mut().find(|it| it.waiter == waiter) {
            if !wait.holders.contains(&holder) {
                wait.holders.push(holder);
            }
            continue;
        }
        let lock = lock(conn, &row).await?;
        waits.push(Columns(&row).wait(lock, vec![holder])?);
    }
    Ok(waits)
}

/// The lock that a session waits for, as people call it.
async fn lock(conn: &mut MySqlConnection, wait: &MySqlRow) -> Result<String> {
    let table: String = wait.try_get("table_name")?;
    let index: Option<String> = wait.try_get("index_name")?;
    let Some(place) = wait.try_get::<Option<String>, _>("place")? else { return Ok(format!("a row of {table}")) };
    if table == "lockkit_named" {
        return Ok(format!("named lock {}", text_of(&place)));
    }
    let columns = sqlx::query_scalar(
        "SELECT CAST(COLUMN_NAME AS CHAR)
         FROM information_schema.STATISTICS
         WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ? AND INDEX_NAME = ?
         ORDER BY SEQ_IN_INDEX",
    );
    let columns: Vec<String> = columns.bind(&table).bind(&index).fetch_all(conn).await?;
    let values: Vec<&str> = place.split(", ").collect();
    // The values of another index than the primary key are followed by those of the primary key.
    let row = if columns.is_empty() || values.len() < columns.len() {
        place.clone()
    } else {
        columns.iter().zip(&values).map(|(column, value)| format!("{column}={value}")).collect::<Vec<_>>().join(", ")
    };
    Ok(format!("{table} ({row})"))
}

/// The text that the server writes in hexadecimal digits.
fn text_of(place: &str) -> String {
    let digits = place.strip_prefix("0x").unwrap_or_default();
    let byte = |at: usize| digits.get(at..at + 2).and_then(|it| u8::from_str_radix(it, 16).ok());
    let bytes: Option<Vec<u8>> = (0..digits.len()).step_by(2).map(byte).collect();
    bytes.filter(|it| !it.is_empty()).and_then(|it| String::from_utf8(it).ok()).unwrap_or_else(|| place.to_owned())
}

/// Waits for session locks, and for tables that another session reads, writes or alters.
async fn mysql_sessions(conn: &mut MySqlConnection, keys: &[Key]) -> Result<Vec<Wait>> {
    let mut names = HashMap::new();
    for key in keys {
        let name = sqlx::query_scalar(AssertSqlSafe(format!("SELECT {NAME}"))).bind(key.as_str());
        let name: String = name.fetch_one(&mut *conn).await?;
        names.insert(name, format!("session lock {key}"));
    }
    let waits = sqlx::query(
        "SELECT
             CAST(w.PROCESSLIST_ID AS SIGNED) AS waiter,
             CAST(w.PROCESSLIST_TIME * 1000 AS SIGNED) AS waits_ms,
             p.OBJECT_TYPE = 'TABLE' AS is_table,
             CAST(p.OBJECT_NAME AS CHAR) AS name,
             CAST(GROUP_CONCAT(DISTINCT h.PROCESSLIST_ID) AS CHAR) AS holders
         FROM performance_schema.metadata_locks AS p
         JOIN performance_schema.metadata_locks AS g
             ON g.OBJECT_TYPE = p.OBJECT_TYPE AND g.OBJECT_SCHEMA <=> p.OBJECT_SCHEMA AND g.OBJECT_NAME = p.OBJECT_NAME
             AND g.LOCK_STATUS = 'GRANTED' AND g.OWNER_THREAD_ID <> p.OWNER_THREAD_ID
         JOIN performance_schema.threads AS w ON w.THREAD_ID = p.OWNER_THREAD_ID
         JOIN performance_schema.threads AS h ON h.THREAD_ID = g.OWNER_THREAD_ID
         WHERE p.OBJECT_TYPE IN ('TABLE', 'USER LEVEL LOCK') AND p.LOCK_STATUS = 'PENDING'
             AND w.PROCESSLIST_DB = DATABASE()
         GROUP BY waiter, waits_ms, is_table, name
         ORDER BY waits_ms DESC",
    );
    let wait = |row: &MySqlRow| {
        let name: String = row.try_get("name")?;
        let lock = match names.get(&name) {
            _ if row.try_get("is_table")? => format!("the table {name}"),
            Some(lock) => lock.clone(),
            None => format!("session lock {name:.8}…"),
        };
        let holders: String = row.try_get("holders")?;
        Columns(row).wait(lock, holders.split(',').filter_map(|it| it.parse().ok()).collect())
    };
    waits.fetch_all(conn).await?.iter().map(wait).collect()
}

async fn maria_sessions(conn: &mut MySqlConnection, keys: &[Key], unseen: &mut Vec<String>) -> Result<Vec<Wait>> {
    let all = sqlx::query(
        "SELECT
             CAST(ID AS SIGNED) AS waiter,
             CAST(TIME_MS AS SIGNED) AS waits_ms,
             STATE = 'Waiting for table metadata lock' AS is_table
         FROM information_schema.PROCESSLIST
         WHERE STATE IN ('User lock', 'Waiting for table metadata lock') AND DB = DATABASE()
         ORDER BY TIME_MS DESC",
    );
    let (mut waiting, mut tables) = (Vec::new(), Vec::new());
    for row in all.fetch_all(&mut *conn).await? {
        if row.try_get("is_table")? { tables.push(row) } else { waiting.push(row) }
    }
    let (mut holders, mut held) = (Vec::new(), Vec::new());
    for key in keys {
        let holder = sqlx::query_scalar(AssertSqlSafe(format!("SELECT CAST(IS_USED_LOCK({NAME}) AS SIGNED)")));
        if let Some(holder) = holder.bind(key.as_str()).fetch_one(&mut *conn).await? {
            holders.push(holder);
            held.push(key.as_str());
        }
    }
    if !waiting.is_empty() && (holders.len() != 1 || keys.len() != 1) {
        let told = "MariaDB does not say which session lock a session waits for: name one key by --key";
        unseen.push(told.to_owned());
        (holders, held) = (Vec::new(), Vec::new());
    }
    let lock = if held.is_empty() { "a session lock".to_owned() } else { format!("session lock {}", held.join(", ")) };
    let wait = |row: &MySqlRow| Columns(row).wait(lock.clone(), holders.clone());
    if !tables.is_empty() {
        let told = "MariaDB does not say who uses the table that a session waits for: INSTALL SONAME \
                    'metadata_lock_info'; and look into information_schema.METADATA_LOCK_INFO";
        unseen.push(told.to_owned());
    }
    let table = |row: &MySqlRow| Columns(row).wait("a table that others use".to_owned(), Vec::new());
    waiting.iter().map(wait).chain(tables.iter().map(table)).collect()
}

async fn sessions(conn: &mut MySqlConnection, is_maria: bool, ids: &[i64]) -> Result<Vec<Session>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let list = if is_maria { "information_schema.PROCESSLIST" } else { "performance_schema.processlist" };
    let ids = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let select = |transaction: &str, join: &str| {
        format!(
            "SELECT
                 CAST(p.ID AS SIGNED) AS id,
                 CAST(CONCAT(p.USER, '@', p.HOST) AS CHAR) AS name,
                 CAST({transaction} AS SIGNED) AS transaction_ms,
                 CAST(LOWER(p.COMMAND) AS CHAR) AS state,
                 CAST(COALESCE(p.INFO, '') AS CHAR) AS statement,
                 CAST(CONCAT('KILL ', p.ID, ';') AS CHAR) AS end_by
             FROM {list} AS p {join}
             WHERE FIND_IN_SET(p.ID, ?)"
        )
    };
    let join = "LEFT JOIN information_schema.INNODB_TRX AS t ON t.trx_mysql_thread_id = p.ID";
    let all = select("TIMESTAMPDIFF(SECOND, t.trx_started, NOW()) * 1000", join);
    let rows = match sqlx::query(AssertSqlSafe(all)).bind(&ids).fetch_all(&mut *conn).await {
        Err(err) if is_denied(&err) => {
            sqlx::query(AssertSqlSafe(select("NULL", ""))).bind(&ids).fetch_all(conn).await?
        }
        rows => rows?,
    };
    rows.iter().map(|row| Columns(row).session()).collect()
}

/// What the server calls the session of a prepared transaction whose own has ended.
const PREPARED: i64 = 0;

/// The prepared transactions of the server as one session, because it does not tell which of them holds a lock.
async fn prepared(conn: &mut MySqlConnection) -> Result<Option<Session>> {
    let rows = sqlx::raw_sql("XA RECOVER").fetch_all(conn).await?;
    let (mut names, mut ends) = (Vec::new(), Vec::new());
    for row in &rows {
        let [format, global, branch] = ["formatID", "gtrid_length", "bqual_length"].map(|it| row.try_get::<i64, _>(it));
        let (format, global, branch) = (format?, global?, branch?);
        let id: &[u8] = row.try_get("data")?;
        let (id, rest) = id.split_at_checked(global.try_into().unwrap_or(0)).unwrap_or((id, &[]));
        let branch = rest.get(..branch.try_into().unwrap_or(0)).unwrap_or(rest);
        names.push(String::from_utf8_lossy(id).into_owned());
        ends.push(format!("XA ROLLBACK X'{}', X'{}', {format};", hex(id), hex(branch)));
    }
    Ok((!rows.is_empty()).then(|| Session {
        id: PREPARED,
        name: format!("prepared: {}", names.join(", ")),
        transaction_ms: None,
        state: "prepared".to_owned(),
        statement: String::new(),
        end_by: ends.join(" "),
    }))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02X}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_from_its_digits() {
        assert_eq!(text_of("0x6F726465723A37"), "order:7");
        assert_eq!(text_of("supremum pseudo-record"), "supremum pseudo-record");
        assert_eq!(text_of("0x"), "0x");
        assert_eq!(text_of("0xFF"), "0xFF");
    }
}
