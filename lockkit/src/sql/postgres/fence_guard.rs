//! The fence guard on PostgreSQL.

use sqlx::{PgConnection, Postgres, Row};

use super::pooler;
use crate::{
    fence::Fence,
    key::Key,
    sql::{FenceGuardStatements, GUARD_SECONDS, units::fence},
};

impl FenceGuardStatements for Postgres {
    async fn guard(conn: &mut PgConnection, domain: &Key, key: &Key, own: Fence) -> sqlx::Result<Fence> {
        // A row that this lease has raised before is only shared, so transactions of one lease run concurrently. Everybody
        // else raises it, and so waits for all of them. The last expression depends on the locked rows, so it is evaluated
        // after the wait.
        let lock = "WITH was AS MATERIALIZED (
                 SELECT current_setting('lock_timeout') AS v
             ), bound AS MATERIALIZED (
                 SELECT set_config('lock_timeout', $4, true) FROM was
             ), seen AS MATERIALIZED (
                 SELECT f.fence FROM bound, lockkit_fence AS f
                 WHERE f.domain = $1 AND f.name = $2 AND f.fence >= $3
                 FOR SHARE OF f
             ), raised AS (
                 INSERT INTO lockkit_fence AS f (domain, name, fence)
                 SELECT $1, $2, $3 FROM bound WHERE NOT EXISTS (SELECT FROM seen)
                 ON CONFLICT (domain, name) DO UPDATE SET fence = excluded.fence WHERE f.fence <= excluded.fence
                 RETURNING f.fence
             ), found AS (
                 SELECT max(fence) AS fence FROM (SELECT fence FROM seen UNION ALL SELECT fence FROM raised) AS locked
             )
             SELECT fence, set_config('lock_timeout', CASE WHEN fence IS NULL THEN v ELSE v END, true)
             FROM found, was";
        loop {
            let locked = pooler::query(lock)
                .bind(domain.as_str())
                .bind(key.as_str())
                .bind(own.as_i64())
                .bind(format!("{GUARD_SECONDS}s"))
                .fetch_one(&mut *conn)
                .await?;
            if let Some(seen) = locked.try_get(0)? {
                return Ok(fence(seen));
            }
            // A greater fence was committed while the statement waited, after its snapshot.
            let seen = pooler::query("SELECT fence FROM lockkit_fence WHERE domain = $1 AND name = $2 AND fence > $3")
                .bind(domain.as_str())
                .bind(key.as_str())
                .bind(own.as_i64())
                .fetch_optional(&mut *conn)
                .await?;
            if let Some(seen) = seen {
                return Ok(fence(seen.try_get(0)?));
            }
            // An operator has deleted the row since.
        }
    }

    fn guard_text(domain: &Key, key: &Key, own: Fence) -> String {
        let (domain, name, own) = (literal(domain), literal(key), own.get());
        // The cast fails on the text, which the error quotes.
        format!(
            "WITH seen AS MATERIALIZED (
    SELECT fence FROM lockkit_fence WHERE domain = {domain} AND name = {name} AND fence >= {own} FOR SHARE
), raised AS (
    INSERT INTO lockkit_fence AS f (domain, name, fence)
    SELECT {domain}, {name}, {own} WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (domain, name) DO UPDATE SET fence = excluded.fence WHERE f.fence <= excluded.fence
    RETURNING f.fence
)
SELECT CAST(CASE WHEN max(fence) = {own} THEN '{own}' ELSE 'stale fence {own}' END AS bigint) AS fence
FROM (SELECT fence FROM seen UNION ALL SELECT fence FROM raised) AS found"
        )
    }

    async fn fences_forget(conn: &mut PgConnection, domain: &Key) -> sqlx::Result<u64> {
        let forgotten =
            pooler::query("DELETE FROM lockkit_fence WHERE domain = $1").bind(domain.as_str()).execute(conn);
        Ok(forgotten.await?.rows_affected())
    }
}

/// Text as a literal that means the same whatever `standard_conforming_strings` is.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}
