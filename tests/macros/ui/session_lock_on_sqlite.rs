use lockkit::{Result, SessionLock};
use sqlx::SqlitePool;

async fn f(pool: &SqlitePool) -> Result<()> {
    SessionLock::new("leader").acquire(pool).await?.release().await
}

fn main() {}
