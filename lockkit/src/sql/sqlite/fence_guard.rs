//! The fence guard on SQLite.

use sqlx::{Sqlite, SqliteConnection};

use crate::{
    sql::{FenceGuardStatements, units::fence},
    value::{fence::Fence, key::Key},
};

impl FenceGuardStatements for Sqlite {
    async fn guard(conn: &mut SqliteConnection, domain: &Key, key: &Key, own: Fence) -> sqlx::Result<Fence> {
        let raised: Vec<i64> = sqlx::query_scalar(
            "INSERT INTO lockkit_fence (domain, name, fence) VALUES (?, ?, ?)
             ON CONFLICT (domain, name) DO UPDATE SET fence = excluded.fence WHERE fence <= excluded.fence
             RETURNING fence",
        )
        .bind(domain.as_str())
        .bind(key.as_str())
        .bind(own.as_i64())
        .fetch_all(&mut *conn)
        .await?;
        if let Some(raised) = raised.first() {
            return Ok(fence(*raised));
        }
        // The transaction has the write lock by now, so the row cannot change.
        sqlx::query_scalar("SELECT fence FROM lockkit_fence WHERE domain = ? AND name = ?")
            .bind(domain.as_str())
            .bind(key.as_str())
            .fetch_one(conn)
            .await
            .map(fence)
    }

    fn guard_text(domain: &Key, key: &Key, own: Fence) -> String {
        let literal = |text: &str| format!("'{}'", text.replace('\'', "''"));
        let (domain, name, own) = (literal(domain), literal(key), own.get());
        format!(
            "INSERT INTO lockkit_fence (domain, name, fence) VALUES ({domain}, {name}, {own})
ON CONFLICT (domain, name) DO UPDATE SET fence = CASE WHEN fence <= excluded.fence THEN excluded.fence END"
        )
    }

    async fn fences_forget(conn: &mut SqliteConnection, domain: &Key) -> sqlx::Result<u64> {
        let forgotten = sqlx::query("DELETE FROM lockkit_fence WHERE domain = ?").bind(domain.as_str()).execute(conn);
        Ok(forgotten.await?.rows_affected())
    }
}
