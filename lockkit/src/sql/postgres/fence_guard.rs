//! The fence guard on PostgreSQL.

use sqlx::{PgConnection, Postgres, Row};

use super::pooler;
use crate::{
    sql::{FenceGuardStatements, GUARD_SECONDS, units::fence},
    value::{fence::Fence, key::Key},
};

impl FenceGuardStatements for Postgres {
    async fn guard(conn: &mut PgConnection, domain: &Key, key: &Key, own: Fence) -> sqlx::Result<Fence> {
        // The row is written anew for an equal fence, too. If it were only locked, a REPEATABLE READ transaction that
        // waited for it would go on with the snapshot from before its wait, instead of failing. The last expression
        // depends on the row, so it is evaluated after the wait.
        let raised = pooler::query(
            "WITH was AS MATERIALIZED (
                 SELECT current_setting('lock_timeout') AS v
             ), bound AS MATERIALIZED (
                 SELECT set_config('lock_timeout', $4, true) FROM was
             ), raised AS (
                 INSERT INTO lockkit_fence AS f (domain, name, fence) SELECT $1, $2, $3 FROM bound
                 ON CONFLICT (domain, name) DO UPDATE SET fence = greatest(f.fence, excluded.fence)
                 RETURNING f.fence
             )
             SELECT fence, set_config('lock_timeout', CASE WHEN fence IS NULL THEN v ELSE v END, true)
             FROM raised, was",
        )
        .bind(domain.as_str())
        .bind(key.as_str())
        .bind(own.as_i64())
        .bind(format!("{GUARD_SECONDS}s"))
        .fetch_one(conn)
        .await?;
        Ok(fence(raised.try_get(0)?))
    }

    fn guard_text(domain: &Key, key: &Key, own: Fence) -> String {
        let (domain, name, own) = (literal(domain), literal(key), own.get());
        // The cast fails on the text, which the error quotes.
        format!(
            "WITH raised AS (
    INSERT INTO lockkit_fence AS f (domain, name, fence) VALUES ({domain}, {name}, {own})
    ON CONFLICT (domain, name) DO UPDATE SET fence = greatest(f.fence, excluded.fence)
    RETURNING f.fence
)
SELECT CAST(CASE WHEN fence = {own} THEN '{own}' ELSE 'stale fence {own}' END AS bigint) AS fence FROM raised"
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
