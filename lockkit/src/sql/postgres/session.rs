//! Session locks on PostgreSQL.

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row};

use super::{advisory_number, holder, holder_since};
use crate::{
    sql::{
        AdvisoryNumber, Driver, ServerSession, SessionAnswer, SessionName, SessionStatements, Sharing,
        statement::statement,
    },
    value::{error::Fault, holder::LockHolder},
};

/// The arguments of the functions that lock: one number, or the halves of it as two. Also the `objsubid` that tells the
/// two kinds of locks apart in `pg_locks`.
const ONE: (&str, &str) = ("$2", "1");
const TWO: (&str, &str) = ("($2 >> 32)::int, ($2 << 32 >> 32)::int", "2");

/// The bits of the lock's number, in the order of `pg_locks`.
fn number(name: &SessionName) -> i64 {
    match name.number {
        None => advisory_number("session", &name.key),
        Some(AdvisoryNumber::One(number)) => number,
        Some(AdvisoryNumber::Two(first, second)) => i64::from(first) << 32 | i64::from(second.cast_unsigned()),
    }
}

fn is_two(name: &SessionName) -> bool {
    matches!(name.number, Some(AdvisoryNumber::Two(..)))
}

/// Whether this session holds the lock with the number `$2`. The view stores the halves of the number in two columns:
/// <https://www.postgresql.org/docs/current/view-pg-locks.html>.
fn holds((_, subid): (&str, &str)) -> String {
    format!(
        "EXISTS (
             SELECT FROM pg_locks
             WHERE locktype = 'advisory' AND objsubid = {subid} AND granted AND pid = pg_backend_pid()
               AND (classid::bigint << 32 | objid::bigint) = $2
         )"
    )
}

/// Locks in the session `$1`, with a bound of `$3` ms. The statement is its own transaction, so a setting that is local
/// to the transaction ends with it; the lock does not.
fn lock_by(kind: (&str, &str), sharing: &str) -> String {
    format!(
        "WITH session AS MATERIALIZED (
             SELECT pg_backend_pid() = $1 AS is_same, {holds} AS holds
         ), bound AS MATERIALIZED (
             SELECT is_same, holds, set_config('lock_timeout', $3 || 'ms', true) FROM session
         )
         SELECT CASE
             WHEN NOT is_same THEN NULL
             WHEN holds THEN false
             WHEN $3 = '0' THEN pg_try_advisory_lock{sharing}({arguments})
             ELSE pg_advisory_lock{sharing}({arguments}) IS NOT NULL
         END FROM bound",
        holds = holds(kind),
        arguments = kind.0,
    )
}

fn unlock_by((arguments, _): (&str, &str), sharing: &str) -> String {
    format!("SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock{sharing}({arguments}) ELSE false END")
}

impl SessionStatements for Postgres {
    const POOLERS_SHARE_SESSIONS: bool = true;
    const HAS_SHARED_LOCKS: bool = true;
    const HAS_NUMBERS: bool = true;

    async fn session_look(conn: &mut PgConnection) -> sqlx::Result<ServerSession> {
        // A standby has its own advisory locks.
        let row = sqlx::raw_sql("SELECT pg_backend_pid(), pg_is_in_recovery()").fetch_one(conn).await?;
        Ok(ServerSession { id: row.try_get::<i32, _>(0)?.into(), is_replica: row.try_get(1)? })
    }

    async fn session_lock(
        conn: &mut PgConnection,
        id: i64,
        name: &SessionName,
        sharing: Sharing,
        slice: Duration,
    ) -> sqlx::Result<SessionAnswer> {
        // `lock_timeout = 0` means no bound, so a slice of zero calls the function that does not wait.
        let sql = match (sharing, is_two(name)) {
            (Sharing::Alone, false) => statement!("{lock}", lock = lock_by(ONE, "")),
            (Sharing::Shared, false) => statement!("{lock}", lock = lock_by(ONE, "_shared")),
            (Sharing::Alone, true) => statement!("{lock}", lock = lock_by(TWO, "")),
            (Sharing::Shared, true) => statement!("{lock}", lock = lock_by(TWO, "_shared")),
        };
        let answer: sqlx::Result<Option<bool>> = sqlx::query_scalar(sql)
            .bind(id)
            .bind(number(name))
            .bind(slice.as_micros().div_ceil(1000).to_string())
            .fetch_one(&mut *conn)
            .await;
        match answer {
            Ok(None) => Ok(SessionAnswer::Elsewhere),
            Ok(Some(true)) => Ok(SessionAnswer::Granted),
            Ok(Some(false)) => Ok(SessionAnswer::Held),
            // The lock may have been granted in the same instant. A session keeps it even if the statement failed.
            Err(err) if Self::fault(&err) == Fault::Contended => {
                let holds = Self::session_holds(conn, id, name).await?;
                Ok(if holds { SessionAnswer::Granted } else { SessionAnswer::Held })
            }
            Err(err) => Err(err),
        }
    }

    async fn session_holds(conn: &mut PgConnection, id: i64, name: &SessionName) -> sqlx::Result<bool> {
        let sql = if is_two(name) {
            statement!("SELECT pg_backend_pid() = $1 AND {holds}", holds = holds(TWO))
        } else {
            statement!("SELECT pg_backend_pid() = $1 AND {holds}", holds = holds(ONE))
        };
        sqlx::query_scalar(sql).bind(id).bind(number(name)).fetch_one(conn).await
    }

    async fn session_server(conn: &mut PgConnection) -> sqlx::Result<String> {
        sqlx::query_scalar("SELECT version()").fetch_one(conn).await
    }

    async fn session_unlock(
        conn: &mut PgConnection,
        id: i64,
        name: &SessionName,
        sharing: Sharing,
    ) -> sqlx::Result<bool> {
        let sql = match (sharing, is_two(name)) {
            (Sharing::Alone, false) => statement!("{unlock}", unlock = unlock_by(ONE, "")),
            (Sharing::Shared, false) => statement!("{unlock}", unlock = unlock_by(ONE, "_shared")),
            (Sharing::Alone, true) => statement!("{unlock}", unlock = unlock_by(TWO, "")),
            (Sharing::Shared, true) => statement!("{unlock}", unlock = unlock_by(TWO, "_shared")),
        };
        sqlx::query_scalar(sql).bind(id).bind(number(name)).fetch_one(conn).await
    }

    async fn session_holder(conn: &mut PgConnection, name: &SessionName) -> sqlx::Result<Option<LockHolder>> {
        let sql = if is_two(name) {
            statement!("{holder}", holder = holder_since("backend_start", TWO.1))
        } else {
            statement!("{holder}", holder = holder_since("backend_start", ONE.1))
        };
        let look = sqlx::query(sql).bind(number(name)).persistent(false);
        look.fetch_optional(conn).await?.as_ref().map(holder).transpose()
    }
}
