//! PostgreSQL.

mod doctor;
mod explain;

use lockkit::{Key, SessionLock};
use sqlx::{PgConnection, PgPool, Postgres, Result};

use super::{Inspect, SetMost};
use crate::{Finding, Plan, Waits};

impl Inspect for Postgres {
    async fn waits(conn: &mut PgConnection, keys: &[Key]) -> Result<Waits> {
        explain::waits(conn, keys).await
    }

    async fn findings(conn: &mut PgConnection, role: Option<&str>) -> Result<Vec<Finding>> {
        doctor::findings(conn, role).await
    }

    async fn most_connections(conn: &mut PgConnection) -> Result<Option<(u64, SetMost)>> {
        let most: i32 = sqlx::query_scalar("SELECT current_setting('max_connections')::int")
            .persistent(false)
            .fetch_one(conn)
            .await?;
        let set = |most| format!("ALTER SYSTEM SET max_connections = {most}; -- and restart the server");
        Ok(Some((most.unsigned_abs().into(), set)))
    }

    async fn session_locks(pool: &PgPool) -> Option<lockkit::Result<()>> {
        Some(async { SessionLock::new("lockkit/doctor").acquire(pool).await?.release().await }.await)
    }

    async fn plan(conn: &mut PgConnection, statement: &str) -> Result<Plan> {
        doctor::plan(conn, statement).await
    }
}
