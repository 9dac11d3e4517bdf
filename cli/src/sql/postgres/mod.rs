//! PostgreSQL.

mod doctor;
mod explain;

use lockkit::{Key, SessionLock};
use sqlx::{PgConnection, PgPool, Postgres, Result};

use super::Inspect;
use crate::{
    doctor::finding::{Finding, Plan},
    explain::picture::{Session, Wait},
};

impl Inspect for Postgres {
    async fn waits(conn: &mut PgConnection, keys: &[Key]) -> Result<(Vec<Wait>, Vec<String>)> {
        explain::waits(conn, keys).await
    }

    async fn sessions(conn: &mut PgConnection, ids: &[i64]) -> Result<Vec<Session>> {
        explain::sessions(conn, ids).await
    }

    async fn findings(conn: &mut PgConnection, role: Option<&str>) -> Result<Vec<Finding>> {
        doctor::findings(conn, role).await
    }

    async fn session_locks(pool: &PgPool) -> Option<lockkit::Result<()>> {
        Some(async { SessionLock::new("lockkit/doctor").acquire(pool).await?.release().await }.await)
    }

    async fn plan(conn: &mut PgConnection, statement: &str) -> Result<Plan> {
        doctor::plan(conn, statement).await
    }
}
