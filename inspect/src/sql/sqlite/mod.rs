//! SQLite, which has one write lock and does not say who holds it.

mod doctor;
#[cfg(any(test, feature = "_fuzz"))]
mod fuzz;

use lockkit::Key;
use sqlx::{Result, Sqlite, SqliteConnection, SqlitePool};

#[cfg(any(test, feature = "_fuzz"))]
pub use self::fuzz::check_statement;
use super::{Inspect, SetMost};
use crate::{Finding, Plan, Waits};

impl Inspect for Sqlite {
    async fn waits(_conn: &mut SqliteConnection, _keys: &[Key]) -> Result<Waits> {
        let unseen = vec!["SQLite does not say who holds its write lock, nor who waits for it".to_owned()];
        Ok(Waits { unseen, ..Waits::default() })
    }

    async fn findings(conn: &mut SqliteConnection, _role: Option<&str>) -> Result<Vec<Finding>> {
        doctor::findings(conn).await
    }

    async fn most_connections(_conn: &mut SqliteConnection) -> Result<Option<(u64, SetMost)>> {
        Ok(None)
    }

    async fn session_locks(_pool: &SqlitePool) -> Option<lockkit::Result<()>> {
        None
    }

    async fn plan(conn: &mut SqliteConnection, statement: &str) -> Result<Plan> {
        doctor::plan(conn, statement).await
    }
}
