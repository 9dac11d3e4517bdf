//! MySQL and MariaDB.

mod doctor;
mod explain;

use lockkit::{Key, SessionLock};
use sqlx::{MySql, MySqlConnection, MySqlPool, Result};

use super::{Inspect, SetMost};
use crate::{Finding, Plan, Waits};

impl Inspect for MySql {
    async fn waits(conn: &mut MySqlConnection, keys: &[Key]) -> Result<Waits> {
        explain::waits(conn, keys).await
    }

    async fn findings(conn: &mut MySqlConnection, _role: Option<&str>) -> Result<Vec<Finding>> {
        doctor::findings(conn).await
    }

    async fn most_connections(conn: &mut MySqlConnection) -> Result<Option<(u64, SetMost)>> {
        let most: u64 = sqlx::query_scalar("SELECT @@GLOBAL.max_connections").fetch_one(conn).await?;
        Ok(Some((most, |most| format!("SET GLOBAL max_connections = {most};"))))
    }

    async fn session_locks(pool: &MySqlPool) -> Option<lockkit::Result<()>> {
        Some(async { SessionLock::new("lockkit/doctor").acquire(pool).await?.release().await }.await)
    }

    async fn plan(conn: &mut MySqlConnection, statement: &str) -> Result<Plan> {
        doctor::plan(conn, statement).await
    }
}

async fn is_maria(conn: &mut MySqlConnection) -> Result<bool> {
    let version: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(conn).await?;
    Ok(version.contains("MariaDB"))
}

/// The user, as GRANT wants it.
async fn user(conn: &mut MySqlConnection) -> Result<String> {
    let user = sqlx::query_scalar(
        "SELECT CAST(CONCAT(QUOTE(SUBSTRING_INDEX(CURRENT_USER(), '@', 1)), '@',
             QUOTE(SUBSTRING_INDEX(CURRENT_USER(), '@', -1))) AS CHAR)",
    );
    user.fetch_one(conn).await
}

/// Whether the user lacks a privilege.
fn is_denied(err: &sqlx::Error) -> bool {
    let number = |err: &dyn sqlx::error::DatabaseError| {
        err.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>().map(sqlx::mysql::MySqlDatabaseError::number)
    };
    matches!(err.as_database_error().and_then(number), Some(1044 | 1142 | 1143 | 1227))
}
