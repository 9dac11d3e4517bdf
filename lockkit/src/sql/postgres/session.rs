//! Session locks on PostgreSQL.

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row};

use super::{advisory_number, holder, holder_since};
use crate::{
    error::Fault,
    holder::LockHolder,
    key::Key,
    sql::{Driver, ServerSession, SessionAnswer, SessionStatements, Sharing, statement::statement},
};

/// Whether this session holds the lock with the number `$2`. The view stores the halves of the number in two columns:
/// <https://www.postgresql.org/docs/current/view-pg-locks.html>.
const HOLDS: &str = "EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = pg_backend_pid()
      AND (classid::bigint << 32 | objid::bigint) = $2
)";

/// Locks in the session `$1`, with a bound of `$3` ms. The statement is its own transaction, so a setting that is local
/// to the transaction ends with it; the lock does not.
fn lock_by(wait: &str, at_once: &str) -> String {
    format!(
        "WITH session AS MATERIALIZED (
             SELECT pg_backend_pid() = $1 AS is_same, {HOLDS} AS holds
         ), bound AS MATERIALIZED (
             SELECT is_same, holds, set_config('lock_timeout', $3 || 'ms', true) FROM session
         )
         SELECT CASE
             WHEN NOT is_same THEN NULL
             WHEN holds THEN false
             WHEN $3 = '0' THEN {at_once}($2)
             ELSE {wait}($2) IS NOT NULL
         END FROM bound"
    )
}

impl SessionStatements for Postgres {
    const POOLERS_SHARE_SESSIONS: bool = true;
    const HAS_SHARED_LOCKS: bool = true;

    async fn session_look(conn: &mut PgConnection) -> sqlx::Result<ServerSession> {
        // A standby has its own advisory locks.
        let row = sqlx::raw_sql("SELECT pg_backend_pid(), pg_is_in_recovery()").fetch_one(conn).await?;
        Ok(ServerSession { id: row.try_get::<i32, _>(0)?.into(), is_replica: row.try_get(1)? })
    }

    async fn session_lock(
        conn: &mut PgConnection,
        id: i64,
        key: &Key,
        sharing: Sharing,
        slice: Duration,
    ) -> sqlx::Result<SessionAnswer> {
        // `lock_timeout = 0` means no bound, so a slice of zero calls the function that does not wait.
        let sql = match sharing {
            Sharing::Alone => statement!("{lock}", lock = lock_by("pg_advisory_lock", "pg_try_advisory_lock")),
            Sharing::Shared => {
                statement!("{lock}", lock = lock_by("pg_advisory_lock_shared", "pg_try_advisory_lock_shared"))
            }
        };
        let answer: sqlx::Result<Option<bool>> = sqlx::query_scalar(sql)
            .bind(id)
            .bind(advisory_number("session", key))
            .bind(slice.as_micros().div_ceil(1000).to_string())
            .fetch_one(&mut *conn)
            .await;
        match answer {
            Ok(None) => Ok(SessionAnswer::Elsewhere),
            Ok(Some(true)) => Ok(SessionAnswer::Granted),
            Ok(Some(false)) => Ok(SessionAnswer::Held),
            // The lock may have been granted in the same instant. A session keeps it even if the statement failed.
            Err(err) if Self::fault(&err) == Fault::Contended => {
                let holds = Self::session_holds(conn, id, key).await?;
                Ok(if holds { SessionAnswer::Granted } else { SessionAnswer::Held })
            }
            Err(err) => Err(err),
        }
    }

    async fn session_holds(conn: &mut PgConnection, id: i64, key: &Key) -> sqlx::Result<bool> {
        sqlx::query_scalar(statement!("SELECT pg_backend_pid() = $1 AND {HOLDS}"))
            .bind(id)
            .bind(advisory_number("session", key))
            .fetch_one(conn)
            .await
    }

    async fn session_unlock(conn: &mut PgConnection, id: i64, key: &Key, sharing: Sharing) -> sqlx::Result<bool> {
        let sql = match sharing {
            Sharing::Alone => "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock($2) ELSE false END",
            Sharing::Shared => {
                "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock_shared($2) ELSE false END"
            }
        };
        sqlx::query_scalar(sql).bind(id).bind(advisory_number("session", key)).fetch_one(conn).await
    }

    async fn session_holder(conn: &mut PgConnection, key: &Key) -> sqlx::Result<Option<LockHolder>> {
        let look = sqlx::query(statement!("{holder}", holder = holder_since("backend_start")))
            .bind(advisory_number("session", key))
            .persistent(false);
        look.fetch_optional(conn).await?.as_ref().map(holder).transpose()
    }
}
