//! Session locks on PostgreSQL.

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row};

use super::advisory_number;
use crate::{
    dialect::{Dialect, ServerSession, SessionAnswer, SessionOps},
    error::Fault,
    key::Key,
};

/// Whether this session holds the lock with the number `$2`, whose halves are two columns of the view:
/// <https://www.postgresql.org/docs/current/view-pg-locks.html>.
macro_rules! holds {
    () => {
        "EXISTS (
             SELECT FROM pg_locks
             WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = pg_backend_pid()
               AND (classid::bigint << 32 | objid::bigint) = $2
         )"
    };
}

impl SessionOps for Postgres {
    const POOLERS_SHARE_SESSIONS: bool = true;

    async fn session_look(conn: &mut PgConnection) -> sqlx::Result<ServerSession> {
        // A standby has advisory locks of its own.
        let row = sqlx::raw_sql("SELECT pg_backend_pid(), pg_is_in_recovery()").fetch_one(conn).await?;
        Ok(ServerSession { id: row.try_get::<i32, _>(0)?.into(), is_replica: row.try_get(1)? })
    }

    async fn session_lock(conn: &mut PgConnection, id: i64, key: &Key, slice: Duration) -> sqlx::Result<SessionAnswer> {
        // A setting that is local to the transaction ends with this statement, which is one; the lock does not. A
        // bound of zero would be none, but who tries does not wait.
        let answer: sqlx::Result<Option<bool>> = sqlx::query_scalar(concat!(
            "WITH session AS MATERIALIZED (
                 SELECT pg_backend_pid() = $1 AS is_same, ",
            holds!(),
            " AS holds
             ), bound AS MATERIALIZED (
                 SELECT is_same, holds, set_config('lock_timeout', $3 || 'ms', true) FROM session
             )
             SELECT CASE
                 WHEN NOT is_same THEN NULL
                 WHEN holds THEN false
                 WHEN $3 = '0' THEN pg_try_advisory_lock($2)
                 ELSE pg_advisory_lock($2) IS NOT NULL
             END FROM bound"
        ))
        .bind(id)
        .bind(advisory_number("session", key))
        .bind(slice.as_micros().div_ceil(1000).to_string())
        .fetch_one(&mut *conn)
        .await;
        match answer {
            Ok(None) => Ok(SessionAnswer::Elsewhere),
            Ok(Some(true)) => Ok(SessionAnswer::Granted),
            Ok(Some(false)) => Ok(SessionAnswer::Held),
            // The lock may have been granted in the same instant, and a session keeps it whatever became of the statement.
            Err(err) if Self::fault(&err) == Fault::Contended => {
                let holds = Self::session_holds(conn, id, key).await?;
                Ok(if holds { SessionAnswer::Granted } else { SessionAnswer::Held })
            }
            Err(err) => Err(err),
        }
    }

    async fn session_holds(conn: &mut PgConnection, id: i64, key: &Key) -> sqlx::Result<bool> {
        sqlx::query_scalar(concat!("SELECT pg_backend_pid() = $1 AND ", holds!()))
            .bind(id)
            .bind(advisory_number("session", key))
            .fetch_one(conn)
            .await
    }

    async fn session_unlock(conn: &mut PgConnection, id: i64, key: &Key) -> sqlx::Result<bool> {
        sqlx::query_scalar("SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock($2) ELSE false END")
            .bind(id)
            .bind(advisory_number("session", key))
            .fetch_one(conn)
            .await
    }
}
