//! Named locks on MySQL and MariaDB.
//!
//! `INSERT … ON DUPLICATE KEY UPDATE` takes no gap lock on a new name, which a look before it would. No bound for a
//! single INSERT exists on both servers: MySQL's `MAX_EXECUTION_TIME` is for SELECT only, and its hints do not accept
//! `innodb_lock_wait_timeout`. So a wait of 1 s or more sets that variable around the INSERT, in one message; MariaDB
//! bounds the INSERT alone. A shared lock is bounded in its SELECT.
//!
//! The lock of an answer is inserted first, by a statement that never waits: nearly each has a new name.
//!
//! A wait of less than 1 s looks first, with a bound in the SELECT, and then inserts with a statement that never waits;
//! if another transaction created the row in between, it looks again. If two inserts still meet, MySQL lets the second
//! wait whatever the statement says: lockkit gives up 2 s after the bound and closes the connection.

use sqlx::{AssertSqlSafe, Executor, MySql, MySqlConnection, mysql::MySqlQueryResult};

use super::{
    RESTORE_WAIT, bounded, holder, shared,
    text::{Statement, for_each, literal, named, settings_on_maria},
};
use crate::{
    policy::Wait,
    sql::{Driver, Granted, NamedStatements, Names, Sharing},
    value::{error::Fault, holder::LockHolder, key::Key},
};

/// The table whose rows are the locks.
fn table(of: Names) -> &'static str {
    match of {
        Names::Locks => "lockkit_named",
        Names::Answers { .. } => "lockkit_answer",
    }
}

/// Locks the row, and inserts it if it does not exist. Never waits for another session's lock.
///
/// It takes no separate read first, which would lock the gap. On a duplicate it locks the row exclusively, where a
/// plain INSERT takes a shared lock, and `LAST_INSERT_ID` is 1. Each server has its own way not to wait, as in the
/// statement that acquires a lease.
fn named_at_once(of: Names) -> &'static Statement {
    match of {
        Names::Locks => named!("{}", insert_at_once("lockkit_named", ":name")),
        Names::Answers { .. } => named!("{}", insert_at_once("lockkit_answer", ":name")),
    }
}

fn insert_at_once(table: &str, name: &str) -> String {
    format!(
        "{at_once}
         INSERT INTO {table} (name)
         SELECT {name}
         FROM DUAL
         WHERE {is_free}
         ON DUPLICATE KEY UPDATE name = IF(LAST_INSERT_ID(1), VALUES(name), VALUES(name))",
        at_once = settings_on_maria("innodb_lock_wait_timeout = 0"),
        is_free = for_each(
            &format!("NOT EXISTS (SELECT 1 FROM {table} WHERE name = {name} FOR UPDATE NOWAIT)"),
            &format!("{name} IS NOT NULL")
        ),
    )
}

/// What `insert_at_once` has answered. A row that is there is either not inserted, or updated.
fn granted(made: &MySqlQueryResult) -> Granted {
    if made.rows_affected() == 1 && made.last_insert_id() == 0 { Granted::New } else { Granted::Known }
}

/// Locks the row, and inserts it if it does not exist. Waits for as long as the session lets a statement wait.
fn insert(of: Names, name: &str) -> String {
    format!("INSERT INTO {table} (name) VALUES ({name}) ON DUPLICATE KEY UPDATE name = name", table = table(of))
}

/// Locks the row, and inserts it if it does not exist, like an insert without a bound. The servers count the bound in
/// seconds. On MariaDB it applies to the statement; on MySQL it is set for the session during this one message. A
/// message of several statements takes no bound values, so the name is a literal in it. A timeout that an interrupted
/// message has not restored yet is kept for a later restore.
fn insert_within(of: Names, key: &Key, seconds: u64) -> String {
    // The largest value that the servers accept.
    let seconds = seconds.min(1_073_741_824);
    format!(
        "SET @lockkit_wait = {kept};
         {within}
             {insert};
         {RESTORE_WAIT}",
        kept = for_each(
            &format!("IFNULL(@lockkit_wait, @@innodb_lock_wait_timeout), innodb_lock_wait_timeout = {seconds}"),
            "NULL"
        ),
        within = settings_on_maria(&format!("innodb_lock_wait_timeout = {seconds}")),
        insert = insert(of, &literal(key)),
    )
}

async fn named_lock_within(conn: &mut MySqlConnection, of: Names, key: &Key, seconds: u64) -> sqlx::Result<()> {
    let locked = conn.execute(AssertSqlSafe(insert_within(of, key, seconds))).await;
    if locked.is_err() {
        // If a statement fails, the rest of the message is not run. If the connection broke, there is no session to
        // restore.
        drop(conn.execute(RESTORE_WAIT).await);
    }
    locked.map(drop)
}

/// Whether a wait is that of one INSERT.
///
/// An INSERT that waits for the transaction that inserted the name keeps a gap lock if that is rolled back, and so
/// would wait for new names of others, and they for it. A named lock meets that once for each name. Nearly each answer
/// has a new name, so its waiters wait in a SELECT.
fn waits_in_insert(of: Names, sharing: Sharing) -> bool {
    (of, sharing) == (Names::Locks, Sharing::Alone)
}

impl NamedStatements for MySql {
    async fn named_lock(
        conn: &mut MySqlConnection,
        of: Names,
        key: &Key,
        sharing: Sharing,
        wait: Wait,
    ) -> sqlx::Result<Option<Granted>> {
        let inserts = waits_in_insert(of, sharing);
        if inserts && wait == Wait::Unbounded {
            let lock = named!("{}", insert(Names::Locks, ":name"));
            lock.with(&[("name", &key.as_bytes())]).execute(conn).await?;
            return Ok(Some(Granted::Known));
        }
        if let Wait::AtMost(bound) = wait
            && inserts
            && bound.as_secs() > 0
        {
            return named_lock_within(conn, of, key, bound.as_secs()).await.map(|()| Some(Granted::Known));
        }
        let (before, hint) = bounded(wait);
        let strength = match sharing {
            Sharing::Alone => "FOR UPDATE".to_owned(),
            Sharing::Shared => shared(),
        };
        let waiting = if wait == Wait::Never { "NOWAIT" } else { "" };
        let look =
            format!("{before}SELECT {hint}1 FROM {table} WHERE name = :name {strength} {waiting}", table = table(of));
        let look = Statement::new(&look);
        // Most answers have a new name, most other locks a known one.
        let mut inserts_next = of == Names::Answers { have_begun: false };
        loop {
            if !std::mem::replace(&mut inserts_next, false)
                && look.with(&[("name", &key.as_bytes())]).fetch_optional(&mut *conn).await?.is_some()
            {
                return Ok(Some(Granted::Known));
            }
            match named_at_once(of).with(&[("name", &key.as_bytes())]).execute(&mut *conn).await {
                // Another transaction has inserted or locked the row: wait for that row now.
                Err(err) if wait != Wait::Never && Self::fault(&err) == Fault::Contended => {}
                made => return made.map(|made| Some(granted(&made))),
            }
        }
    }

    fn named_ends(of: Names, sharing: Sharing, wait: Wait) -> bool {
        waits_in_insert(of, sharing) && matches!(wait, Wait::AtMost(bound) if bound.as_secs() > 0)
    }

    fn named_text(of: Names, key: &Key, _sharing: Sharing, wait: Wait) -> String {
        // To share a row that may not exist yet takes several statements, each of which depends on the last answer.
        match wait {
            Wait::Never => insert_at_once(table(of), &literal(key)),
            Wait::AtMost(bound) => insert_within(of, key, bound.as_secs().max(1)),
            Wait::Unbounded => insert(of, &literal(key)),
        }
    }

    async fn named_feigned(_conn: &mut MySqlConnection, _of: Names, _key: &Key) -> sqlx::Result<Option<String>> {
        Ok(None)
    }

    async fn named_holder(conn: &mut MySqlConnection, of: Names, key: &Key) -> sqlx::Result<Option<LockHolder>> {
        // On MySQL the thread of a row lock may belong to a session that waits for the lock; the thread of the table
        // lock is the holder's. MariaDB lists locks only while a session waits for them, from data up to 0.1 s old.
        // https://dev.mysql.com/doc/refman/8.4/en/performance-schema-data-locks-table.html,
        // https://mariadb.com/kb/en/information-schema-innodb_locks-table/
        let look = named!(
            "SELECT CAST(p.ID AS SIGNED) AS id, CAST(p.USER AS CHAR) AS user, CAST(p.HOST AS CHAR) AS host
             FROM {locks}
             ORDER BY p.ID = CONNECTION_ID()
             LIMIT 1",
            locks = for_each(
                "performance_schema.data_locks AS l
                 JOIN performance_schema.data_locks AS o ON o.ENGINE_TRANSACTION_ID = l.ENGINE_TRANSACTION_ID
                     AND o.OBJECT_SCHEMA = l.OBJECT_SCHEMA AND o.OBJECT_NAME = l.OBJECT_NAME AND o.LOCK_TYPE = 'TABLE'
                 JOIN performance_schema.threads AS t ON t.THREAD_ID = o.THREAD_ID
                 JOIN performance_schema.processlist AS p ON p.ID = t.PROCESSLIST_ID
                 WHERE l.LOCK_DATA = CONCAT('0x', HEX(:name)) AND l.LOCK_STATUS = 'GRANTED'
                   AND l.OBJECT_SCHEMA = DATABASE() AND l.OBJECT_NAME = :table",
                "information_schema.INNODB_LOCKS AS l
                 JOIN information_schema.INNODB_TRX AS t ON t.trx_id = l.lock_trx_id
                 JOIN information_schema.PROCESSLIST AS p ON p.ID = t.trx_mysql_thread_id
                 WHERE l.LOCK_DATA = CONCAT('0x', HEX(:name)) AND t.trx_state <> 'LOCK WAIT'
                   AND l.lock_table = CONCAT('`', DATABASE(), '`.`', :table, '`')"
            ),
        );
        let row = look.with(&[("name", &key.as_bytes()), ("table", &table(of))]).fetch_optional(conn).await?;
        row.as_ref().map(holder).transpose()
    }
}
