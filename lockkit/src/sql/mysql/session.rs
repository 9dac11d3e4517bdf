//! Session locks on MySQL and MariaDB.
//!
//! `GET_LOCK` is never shared. A shared session lock is an error here, since an exclusive one would be a surprise.

use std::time::Duration;

use sqlx::{MySql, MySqlConnection, Row};

use super::{
    holder,
    text::{for_each, named},
};
use crate::{
    sql::{Driver, ServerSession, SessionAnswer, SessionName, SessionStatements, Sharing},
    value::{error::Fault, holder::LockHolder},
};

/// The name of the lock of the key: 64 hexadecimal digits, which is the longest name that MySQL allows. Its case
/// is ignored (<https://dev.mysql.com/doc/refman/8.4/en/locking-functions.html>).
///
/// Lock names are global to the server, so the database is part of the hash. A key or database name never contains NUL.
const NAME: &str = "SHA2(CONCAT('lockkit:session:',
              COALESCE(IF(@@lower_case_table_names = 0, DATABASE(), LOWER(DATABASE())), ''), CHAR(0), :key), 256)";

impl SessionStatements for MySql {
    /// Proxies for MySQL reserve a session that has called `GET_LOCK` for its client.
    const POOLERS_SHARE_SESSIONS: bool = false;
    const HAS_SHARED_LOCKS: bool = false;
    const HAS_NUMBERS: bool = false;

    async fn session_look(conn: &mut MySqlConnection) -> sqlx::Result<ServerSession> {
        // A replica has its own locks. Only a replica that is declared read-only can be detected.
        let sql = "SELECT CAST(CONNECTION_ID() AS SIGNED),
                       @@global.read_only NOT IN ('0', 'OFF') OR @@global.innodb_read_only <> 0";
        let row = sqlx::raw_sql(sql).fetch_one(conn).await?;
        Ok(ServerSession { id: row.try_get(0)?, is_replica: row.try_get::<i64, _>(1)? != 0 })
    }

    async fn session_lock(
        conn: &mut MySqlConnection,
        id: i64,
        name: &SessionName,
        _sharing: Sharing,
        slice: Duration,
    ) -> sqlx::Result<SessionAnswer> {
        // MySQL waits for whole seconds and would round half a second up or down; MariaDB keeps the fraction.
        let lock = named!(
            "SELECT CAST(CASE
                 WHEN CONNECTION_ID() <> :id THEN -1
                 WHEN IS_USED_LOCK({NAME}) <=> CONNECTION_ID() THEN 0
                 ELSE GET_LOCK({NAME}, {seconds})
             END AS SIGNED)",
            seconds = for_each("FLOOR(:seconds)", ":seconds")
        );
        let lock = lock.scalar(&[("id", &id), ("key", &name.key.as_bytes()), ("seconds", &slice.as_secs_f64())]);
        let answer: sqlx::Result<Option<i64>> = lock.fetch_one(&mut *conn).await;
        match answer {
            Ok(Some(1)) => Ok(SessionAnswer::Granted),
            Ok(Some(0)) => Ok(SessionAnswer::Held),
            Ok(Some(_)) => Ok(SessionAnswer::Elsewhere),
            Err(err) if Self::fault(&err) != Fault::Contended => Err(err),
            // KILL QUERY or a timeout of the session interrupted the wait. MariaDB then answers NULL, and MySQL an
            // error. The lock may have been granted in the same instant.
            Ok(None) | Err(_) => {
                let holds = Self::session_holds(conn, id, name).await?;
                Ok(if holds { SessionAnswer::Granted } else { SessionAnswer::Held })
            }
        }
    }

    async fn session_holds(conn: &mut MySqlConnection, id: i64, name: &SessionName) -> sqlx::Result<bool> {
        let holds = named!("SELECT CONNECTION_ID() = :id AND IS_USED_LOCK({NAME}) <=> CONNECTION_ID()");
        holds.scalar(&[("id", &id), ("key", &name.key.as_bytes())]).fetch_one(conn).await
    }

    async fn session_server(conn: &mut MySqlConnection) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT CONCAT(@@version_comment, ' ', VERSION())").fetch_one(conn).await
    }

    async fn session_unlock(
        conn: &mut MySqlConnection,
        id: i64,
        name: &SessionName,
        _sharing: Sharing,
    ) -> sqlx::Result<bool> {
        let unlock =
            named!("SELECT CAST(CASE WHEN CONNECTION_ID() = :id THEN RELEASE_LOCK({NAME}) ELSE 0 END AS SIGNED)");
        let unlock = unlock.scalar(&[("id", &id), ("key", &name.key.as_bytes())]);
        let released: Option<i64> = unlock.fetch_one(conn).await?;
        Ok(released == Some(1))
    }

    async fn session_holder(conn: &mut MySqlConnection, name: &SessionName) -> sqlx::Result<Option<LockHolder>> {
        let look = named!(
            "SELECT CAST(used.id AS SIGNED) AS id, CAST(p.USER AS CHAR) AS user, CAST(p.HOST AS CHAR) AS host
             FROM (SELECT IS_USED_LOCK({NAME}) AS id) AS used
             LEFT JOIN {sessions} AS p ON p.ID = used.id
             WHERE used.id IS NOT NULL",
            sessions = for_each("performance_schema.processlist", "information_schema.PROCESSLIST")
        );
        let row = look.with(&[("key", &name.key.as_bytes())]).fetch_optional(conn).await?;
        row.as_ref().map(holder).transpose()
    }
}
