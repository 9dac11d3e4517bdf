//! Session locks, on the servers that have them, with and without a pooler in between.

mod attribute;
mod keys;
mod loss;
mod poolers;
mod raw;
mod waits;

use std::time::Duration;

use lockkit::{Session, SessionLock, dialect::SessionOps};
use sqlx::Pool;

const MILLIS: fn(u64) -> Duration = Duration::from_millis;

/// Longer than anything takes that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

async fn acquire<DB: SessionOps>(pool: &Pool<DB>, key: &str) -> Session<DB> {
    SessionLock::new(key).wait(PATIENCE).acquire(pool).await.unwrap_or_else(|err| panic!("acquire `{key}`: {err:?}"))
}

async fn is_held<DB: SessionOps>(pool: &Pool<DB>, key: &str) -> bool {
    let taken = SessionLock::new(key).try_acquire(pool).await.expect("an answer");
    let Some(session) = taken else { return true };
    session.release().await.expect("release");
    false
}

/// The one session lock of this database, in the words of the server, and the session that holds it.
fn holder_sql(server: &str) -> (&'static str, &'static str) {
    if server == "PostgreSQL" {
        return (
            "SELECT classid::bigint << 32 | objid::bigint FROM pg_locks JOIN pg_stat_activity USING (pid)
             WHERE locktype = 'advisory' AND datname = current_database()",
            "SELECT pid FROM pg_locks JOIN pg_stat_activity USING (pid)
             WHERE locktype = 'advisory' AND datname = current_database()",
        );
    }
    (
        "SELECT object_name FROM performance_schema.metadata_locks
         JOIN performance_schema.threads ON thread_id = owner_thread_id
         WHERE object_type = 'USER LEVEL LOCK' AND processlist_db = DATABASE()",
        "SELECT processlist_id FROM performance_schema.metadata_locks
         JOIN performance_schema.threads ON thread_id = owner_thread_id
         WHERE object_type = 'USER LEVEL LOCK' AND processlist_db = DATABASE()",
    )
}

/// Ends the session that holds the lock, as an administrator or a restart would.
macro_rules! kill_holder {
    ($db:expr) => {{
        let holder =
            $db.fetch_i64($crate::sessions::holder_sql(<S as support::Server>::NAME).1).await.expect("a holder");
        match <S as support::Server>::NAME {
            "PostgreSQL" => $db.fetch_text(&format!("SELECT pg_terminate_backend({holder})")).await.map(drop),
            _ => Some($db.execute(&format!("KILL {holder}")).await).map(drop),
        }
        .expect("kill the session");
    }};
}
use kill_holder;
