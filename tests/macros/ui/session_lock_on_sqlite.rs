use lockkit::SessionLock;
use sqlx::SqlitePool;

async fn f(pool: &SqlitePool) {
    let _ = SessionLock::new("leader").acquire(pool).await;
}

fn main() {}
